"""Sun et al., table 1: block verification against token verification.

bash experiments/block_verification_table1/run.sh [--rows=titles,chat] [--quick]
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from experiments import empirical  # noqa: E402
from experiments.block_verification_table1 import render  # noqa: E402
from specdec_jax import runtime  # noqa: E402

TABLE = empirical.Table(HERE, render.measure, render.markdown)

if __name__ == '__main__':
  runtime.launch(lambda: empirical.run(TABLE))
