"""Kills training runs at random times, or jobs of several processes.

python scripts/kill_matrix.py [--full]
python scripts/kill_matrix.py --processes=2 --kills=30

A small run is killed in every phase and restarted until it is done. Each saved
step must restore, and the result must equal that of a run that was never
killed, byte for byte. Exit status 1 if anything is wrong.

Of several processes, the first or second of a job that decodes or trains is
killed or stopped: all have to end soon, and the same command to go on.
"""

import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags, logging

from specdec_jax import printing, program
from tests.kills import hosts, kill_matrix

_KILLS = flags.DEFINE_integer('kills', 20, 'how often to kill', lower_bound=0)
_FULL = flags.DEFINE_bool('full', False, '100 kills')
_STEPS = flags.DEFINE_integer(
  'steps', 14, 'of the run that is killed', lower_bound=8
)
_PROCESSES = flags.DEFINE_integer(
  'processes', 1, 'of a job; 1: training runs are killed', lower_bound=1
)
_SEED = flags.DEFINE_integer('seed', 0, 'of the times at which it kills')


def run() -> bool:
  """True if nothing is wrong."""
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  began = time.monotonic()
  count = 100 if _FULL.value else _KILLS.value
  with tempfile.TemporaryDirectory(prefix='kill_matrix') as name:
    folder, steps, seed = pathlib.Path(name), _STEPS.value, _SEED.value
    if (processes := _PROCESSES.value) > 1:
      found = hosts.kill(*hosts.jobs(folder, processes, steps), count, seed)
      doc = hosts.summary(found, time.monotonic() - began)
    else:
      runs = kill_matrix.Runs(folder, steps)
      found = kill_matrix.kill(runs, folder / 'run', count, seed)
      doc = kill_matrix.summary(found, time.monotonic() - began)
  printing.result(
    doc, 'nothing is wrong' if doc['good'] else 'something is wrong'
  )
  return doc['good']


if __name__ == '__main__':
  program.launch(run)
