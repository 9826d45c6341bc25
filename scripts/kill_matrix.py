"""Kills training runs at random times.

python scripts/kill_matrix.py [--full]

A small run is killed in every phase and restarted until it is done. Each saved
step must restore, and the result must equal that of a run that was never
killed, byte for byte. Exit status 1 if anything is wrong.
"""

import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import rich.console  # noqa: E402
from absl import flags  # noqa: E402

from specdec_jax import runtime  # noqa: E402
from tests.kills import kill_matrix  # noqa: E402

_KILLS = flags.DEFINE_integer('kills', 20, 'how many', lower_bound=0)
_FULL = flags.DEFINE_bool('full', False, '100 kills')
_STEPS = flags.DEFINE_integer('steps', 14, 'of a run', lower_bound=8)
_SEED = flags.DEFINE_integer('seed', 0, 'of the times')


def run() -> bool:
  """True if nothing is wrong; the last line of stdout is JSON."""
  began = time.monotonic()
  count = 100 if _FULL.value else _KILLS.value
  with tempfile.TemporaryDirectory(prefix='kill_matrix') as name:
    folder = pathlib.Path(name)
    runs = kill_matrix.Runs(folder, _STEPS.value)
    found = kill_matrix.kill(runs, folder / 'run', count, _SEED.value)
  doc = kill_matrix.summary(found, time.monotonic() - began)
  kill_matrix.show(doc, rich.console.Console())
  print(runtime.compact(doc))
  return doc['good']


if __name__ == '__main__':
  runtime.launch(run)
