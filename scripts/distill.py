"""Trains a draft for a target; the same command resumes a run that was killed.

python scripts/distill.py --config=configs/distill.py --workdir=DIR
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags, logging

from specdec_jax import printing, program
from specdec_jax.distill import distillation

_CONFIG = program.config_flag('configs/distill.py', keys='configs/distill.py')
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder of the run')
_CHANGED = flags.DEFINE_bool(
  'changed', False, "go on though settings differ from the run's"
)


def run() -> bool:
  """True; prints the best step's metrics."""
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  settings = distillation.settings(_CONFIG.value)
  if not _WORKDIR.value:
    raise ValueError("workdir='': name a folder for the run, --workdir=DIR")
  figures = distillation.run(
    settings, pathlib.Path(_WORKDIR.value), changed=_CHANGED.value
  )
  said = f'stopped at step {figures["step"]}; the same command goes on'
  if figures['finished']:
    said = (
      f'{figures["draft"]}: of step {figures["step"]}, '
      f'{figures["block_efficiency"]:.2f} tokens a pass of the target'
    )
  printing.result(figures, said)
  return True


if __name__ == '__main__':
  program.set_xla_flags(trains=True)
  program.launch(run, hosts=True)
