"""Computes an experiment's tables and figures; status 1 if a number is wrong.

python experiments/computed.py leviathan_analytic [--workdir=DIR]
python experiments/computed.py tpu_roofline
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

from experiments import page, plots
from experiments.leviathan_analytic import table as analytic
from experiments.tpu_roofline import table as roofline
from specdec_jax import machine, program
from specdec_jax.io import files

HOMES = pathlib.Path(__file__).parent
PAGES = {'leviathan_analytic': analytic, 'tpu_roofline': roofline}
_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'folder for the results; if given, README.md is left alone'
)


def run(name: str, workdir: str = '') -> bool:
  """Prints every table, writes NAME.md and NAME.png, fills README.md.

  Args:
    name: of PAGES.
    workdir: for the results; if empty, the experiment's own, and fills README.

  Raises:
    ValueError: the folder cannot be written.
  """
  home, module = HOMES / name, PAGES[name]
  folder = program.open_workdir(workdir or str(home / 'results'))
  assert folder is not None
  made_by = f'{machine.made_by(*machine.commit(*page.WRITTEN))}.'
  good = True
  for name, compute in module.TABLES.items():
    found = compute()
    lines = [made_by, '', *found.lines]
    files.write(folder / f'{name}.md', '\n'.join(lines))
    if name in module.FIGURES:
      files.write(folder / f'{name}.png', plots.png(module.FIGURES[name]))
    if not workdir:
      page.fill(home, '\n'.join(lines), name)
    print('\n'.join([f'\n{name}\n', *lines]))
    good &= found.good
  return good


def main(names: list[str]) -> bool:
  if len(names) != 1 or names[0] not in PAGES:
    raise ValueError(f'{" ".join(names)}: name one of {", ".join(PAGES)}')
  return run(names[0], _WORKDIR.value)


if __name__ == '__main__':
  program.launch(main, positional=True)
