"""Measures and renders an empirical table of a paper, or reports on all.

python experiments/table.py leviathan_table2 [--rows=titles,chat] [--quick]
python experiments/table.py leviathan_table3 leviathan_table5    # read once
python experiments/table.py report [--quick]    # from what is stored alone
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from experiments import empirical, report  # noqa: E402
from experiments.block_verification_table1 import render as block  # noqa: E402
from experiments.chen_table1 import measure as chen  # noqa: E402
from experiments.chen_table1 import render as chen_page  # noqa: E402
from experiments.chen_table1 import texts as chen_texts  # noqa: E402
from experiments.distillspec_t5 import render as distilled  # noqa: E402
from experiments.distillspec_t5 import train  # noqa: E402
from experiments.leviathan_table2 import measure, render  # noqa: E402
from experiments.leviathan_table3 import render as table3  # noqa: E402
from experiments.leviathan_table5 import render as table5  # noqa: E402
from specdec_jax import program  # noqa: E402

TABLES = {
  'leviathan_table2': (measure.measure, render.markdown, render.claims),
  'leviathan_table3': (table3.measure, table3.markdown, table3.claims),
  'leviathan_table5': (table5.measure, table5.markdown, table5.claims),
  'block_verification_table1': (block.measure, block.markdown, block.claims),
  'chen_table1': (
    chen.measure,
    chen_page.markdown,
    chen_page.claims,
    chen_page.figure,
    chen_texts.rows,
  ),
  'distillspec_t5': (
    distilled.measure,
    distilled.markdown,
    distilled.claims,
    None,
    train.rows,
  ),
}
TABLES = {
  name: empirical.Table(HERE / name, *parts) for name, parts in TABLES.items()
}


def run(names: list[str]) -> bool:
  if names == ['report']:
    return report.run([*TABLES.values()])
  if names and set(names) <= set(TABLES):
    return empirical.run([TABLES[x] for x in names])
  allowed = ', '.join([*TABLES, 'report'])
  raise ValueError(f'{" ".join(names)}: name one of {allowed}')


if __name__ == '__main__':
  program.launch(run, positional=True)
