"""Trains a language model on a text; after a kill the same command resumes.

python scripts/train.py --config=configs/train_lm.py:tiny --workdir=DIR
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags, logging

from specdec_jax import printing, program
from specdec_jax.train import train_lm

_CONFIG = program.config_flag('configs/train_lm.py', keys='configs/train_lm.py')
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder of the run')
_CHANGED = flags.DEFINE_bool(
  'changed', False, "go on though settings differ from the run's"
)


def run() -> bool:
  """True; prints the best step's metrics."""
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  settings = train_lm.settings(_CONFIG.value)
  if not _WORKDIR.value:
    raise ValueError("workdir='': name a folder for the run, --workdir=DIR")
  figures = train_lm.run(
    settings, pathlib.Path(_WORKDIR.value), changed=_CHANGED.value
  )
  said = f'stopped at step {figures["step"]}; the same command goes on'
  if figures['finished']:
    said = (
      f'{figures["model"]}: of step {figures["step"]}, held-out loss '
      f'{figures["held_out_loss"]:.3f}'
    )
  printing.result(figures, said)
  return True


if __name__ == '__main__':
  program.set_xla_flags(trains=True)
  program.launch(run, hosts=True)
