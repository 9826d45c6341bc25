"""Computes the tables and figures; exit status 1 if a number is wrong."""

import pathlib
from collections.abc import Callable, Mapping

from absl import flags

from experiments import page, plots
from experiments.leviathan_analytic import figures, table
from specdec_jax import machine, program
from specdec_jax.io import files

HOME = pathlib.Path(__file__).parent
WORKDIR = flags.DEFINE_string(
  'workdir', '', 'folder for the results; if given, README.md is left alone'
)


def run(
  workdir: str = '',
  home: pathlib.Path = HOME,
  tables: Mapping[str, Callable[[], table.Table]] = table.TABLES,
  drawn: Mapping[str, tuple] = figures.FIGURES,
) -> bool:
  """Prints every table, writes NAME.md and NAME.png, fills README.md.

  Args:
    workdir: for the results; if empty, those of `home`, whose README is filled.
    home: folder of an experiment.
    tables, drawn: what to compute and draw, by name.

  Raises:
    ValueError: the folder cannot be written.
  """
  folder = program.open_workdir(workdir or str(home / 'results'))
  assert folder is not None
  made_by = f'{machine.made_by(*machine.commit(*page.WRITTEN))}.'
  good = True
  for name, compute in tables.items():
    found = compute()
    lines = [made_by, '', *found.lines]
    files.write(folder / f'{name}.md', '\n'.join(lines))
    if name in drawn:
      paint, size = drawn[name]
      files.write(folder / f'{name}.png', plots.png(paint, size=size))
    if not workdir:
      page.fill(home, '\n'.join(lines), name)
    print('\n'.join([f'\n{name}\n', *lines]))
    good &= found.good
  return good


if __name__ == '__main__':
  program.launch(lambda: run(WORKDIR.value))
