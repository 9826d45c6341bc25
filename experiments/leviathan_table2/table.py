"""Leviathan et al., table 2, with EXP and EMP of table 4.

bash experiments/leviathan_table2/run.sh [--rows=titles,chat] [--quick]
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from experiments import empirical  # noqa: E402
from experiments.leviathan_table2 import measure, render  # noqa: E402
from specdec_jax import runtime  # noqa: E402

TABLE = empirical.Table(HERE, measure.measure, render.markdown)

if __name__ == '__main__':
  runtime.launch(lambda: empirical.run(TABLE))
