"""Plots loss, alpha and block efficiency over the steps of training runs.

python scripts/plot.py WORKDIR [WORKDIR...] [--out=curves.png]

Without --out: curves.png in the first workdir. Prints the path.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags  # noqa: E402

from specdec_jax import runtime  # noqa: E402
from specdec_jax.analysis import curves  # noqa: E402

_OUT = flags.DEFINE_string('out', '', 'file to write')


def run(workdirs: list[str]) -> bool:
  print(curves.draw(workdirs, _OUT.value))
  return True


if __name__ == '__main__':
  runtime.launch(run, positional=True)
