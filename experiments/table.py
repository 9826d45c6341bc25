"""Measures and renders a paper's table, or reports on all.

python experiments/table.py leviathan_table2 [--rows=titles,chat] [--quick]
python experiments/table.py leviathan_table3 leviathan_table5    # read once
python experiments/table.py report [--quick]    # from what is stored alone
python experiments/table.py methods --render    # or a name of PAGES
python experiments/table.py leviathan_analytic [--workdir=DIR]  # of COMPUTED
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

from experiments import empirical, page, plots, report
from experiments.block_verification_table1 import render as block
from experiments.chen_table1 import render as chen
from experiments.distillspec_t5 import render as distillspec
from experiments.gpu import render as gpu
from experiments.heads import render as heads
from experiments.leviathan_analytic import table as analytic
from experiments.leviathan_table2 import render as table2
from experiments.leviathan_table3 import render as table3
from experiments.leviathan_table5 import render as table5
from experiments.methods import render as methods
from experiments.quantised import render as quantised
from experiments.serving import render as serving
from experiments.specbench import render as specbench
from experiments.tpu_roofline import table as roofline
from experiments.tree_rules import render as tree_rules
from specdec_jax import machine, program
from specdec_jax.io import files

MODULES = table2, table3, table5, block, chen, distillspec
TABLES = {x.TABLE.name: x.TABLE for x in MODULES}
# Measured by programs of their own; some have a figure.
PAGES = {
  'gpu': gpu,
  'heads': heads,
  'methods': methods,
  'quantised': quantised,
  'serving': serving,
  'specbench': specbench,
  'tree_rules': tree_rules,
}
# By formulas, without a model: a block of the README for each table.
COMPUTED = {'leviathan_analytic': analytic, 'tpu_roofline': roofline}
_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'of what is computed; if given, README.md is left alone'
)


def compute(name: str, workdir: str = '') -> bool:
  """Prints and writes every table and figure; True if the numbers are right."""
  home, module, good = empirical.HOMES / name, COMPUTED[name], True
  folder = program.open_workdir(workdir or str(home / 'results'))
  assert folder is not None
  made_by = f'{machine.made_by(*machine.commit(*page.WRITTEN))}.'
  for table, compute_table in module.TABLES.items():
    found = compute_table()
    text = '\n'.join([made_by, '', *found.lines])
    files.write(folder / f'{table}.md', text)
    if table in module.FIGURES:
      files.write(folder / f'{table}.png', plots.png(module.FIGURES[table]))
    if not workdir:
      page.fill(home / 'README.md', text, table)
    print(f'\n{table}\n\n{text}')
    good &= found.good
  return good


def run(names: list[str]) -> bool:
  """Measures the rows that are not stored, and renders the pages.

  Raises ValueError for an unknown table or row, a missing model, or results
  from another commit; before anything is measured.
  """
  if len(names) == 1 and names[0] in COMPUTED:
    return compute(names[0], _WORKDIR.value)
  if names == ['report']:
    return report.run([*TABLES.values()])
  if empirical.RENDER.value and names and set(names) <= set(PAGES):
    for name in names:
      home = empirical.HOMES / name
      doc = files.read_json(home / f'results/{name}.json')
      if hasattr(PAGES[name], 'figure'):
        picture = PAGES[name].figure(doc)
        files.write(home / f'results/{name}.png', picture)
      page.write(home / 'results', home, PAGES[name].markdown(doc))
    return True
  if not names or not set(names) <= set(TABLES):
    allowed = ', '.join([*TABLES, *COMPUTED, 'report'])
    raise ValueError(f'{" ".join(names)}: name one of {allowed}')
  tables = [TABLES[x] for x in names]
  _, folders = empirical.folders_of(tables)
  every, asked = [empirical.rows(x) for x in tables], empirical.asked()
  given = list(zip(tables, folders, every, strict=True))
  if not empirical.RENDER.value:
    empirical.measure(given, asked)
  for table, folder, known in given:
    found = report.rendered(table, folder, known)
    if not found.commit:
      raise ValueError(f'{folder}: no results; run without --render first')
    report.write(found, folder)
    print(found.outcome, found.text, sep='\n\n')
  return True


if __name__ == '__main__':
  program.launch(run, positional=True)
