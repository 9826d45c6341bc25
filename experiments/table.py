"""Measures and renders an empirical table of a paper.

python experiments/table.py leviathan_table2 [--rows=titles,chat] [--quick]
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from experiments import empirical  # noqa: E402
from experiments.block_verification_table1 import render as block  # noqa: E402
from experiments.leviathan_table2 import measure, render  # noqa: E402
from experiments.leviathan_table3 import render as table3  # noqa: E402
from experiments.leviathan_table5 import render as table5  # noqa: E402
from specdec_jax import runtime  # noqa: E402

TABLES = {
  'leviathan_table2': (measure.measure, render.markdown),
  'leviathan_table3': (table3.measure, table3.markdown),
  'leviathan_table5': (table5.measure, table5.markdown),
  'block_verification_table1': (block.measure, block.markdown),
}


def run(names: list[str]) -> bool:
  match names:
    case [name] if name in TABLES:
      return empirical.run(empirical.Table(HERE / name, *TABLES[name]))
  raise ValueError(f'{" ".join(names)}: name one of {", ".join(TABLES)}')


if __name__ == '__main__':
  runtime.launch(run, positional=True)
