"""Computes the six tables and figures; exit status 1 if a number is wrong."""

import pathlib

from absl import flags

from experiments import page, plots
from experiments.leviathan_analytic import figures, table
from specdec_jax import runtime
from specdec_jax.bench import machine
from specdec_jax.io import files

HOME = pathlib.Path(__file__).parent
# Files that a run writes are not counted as changes of the code.
WRITTEN = (':!experiments/*/results/*', ':!experiments/*/README.md')
_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'folder for the results; if given, README.md is left alone'
)


def run(workdir: str = '') -> bool:
  """Prints every table, writes NAME.md and NAME.png, fills README.md.

  Raises:
    ValueError: the folder cannot be written.
  """
  folder = runtime.open_workdir(workdir or str(HOME / 'results'))
  assert folder is not None
  made_by = f'{machine.made_by(*machine.commit(*WRITTEN))}.'
  good = True
  for name, compute in table.TABLES.items():
    found = compute()
    lines = [made_by, '', *found.lines]
    paint, size = figures.FIGURES[name]
    files.write(folder / f'{name}.md', '\n'.join(lines))
    files.write(folder / f'{name}.png', plots.png(paint, size=size))
    if not workdir:
      page.fill(HOME, '\n'.join(lines), name)
    print('\n'.join([f'\n{name}\n', *lines]))
    good &= found.good
  return good


if __name__ == '__main__':
  runtime.launch(lambda: run(_WORKDIR.value))
