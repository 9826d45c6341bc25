r"""What a pair would do on chips that are not there: compiles it for TPUs.

python scripts/tpu_report.py --config=configs/llama3.py --topology=v5e:2x4 \
  --config.target.source=random:llama3_8b --config.draft.source=random:llama3_1b

Without weights and without a TPU: whether it fits, what it reads and sends, and
a roofline estimate of the improvement; for GPUs (--topology=h100:8) by the data
sheet alone. A mesh of 1 x 1 is all devices of the topology. Exit status 1 if it
does not fit.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
# No device is needed; a process that asks for a TPU would hold it.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from absl import flags

from specdec_jax import fields, printing, program
from specdec_jax import settings as settings_lib
from specdec_jax.chips import aot, report
from specdec_jax.io import sources
from specdec_jax.models import convert, weights

_CONFIG = program.config_flag('configs/llama3.py')
_TOPOLOGY = flags.DEFINE_string(
  'topology', 'v5e:2x4', 'of TPUs or GPUs, as in v5p:2x2x1 or h100:8'
)
_TRAIN = flags.DEFINE_integer(
  'train', 0, 'also the train step of the draft, of rows of so many tokens'
)
_CONTEXT = flags.DEFINE_integer(
  'context', 2048, 'tokens of each row, prompt and output'
)


def run() -> bool:
  """True if it fits."""
  s = settings_lib.settings(_CONFIG.value)
  draft = s.drafters['lm']
  fields.check_needed(draft)
  sides = s.target, draft
  kinds = [x.dtype if x.dtype in weights.INTEGERS else '' for x in sides]
  target, drafted = (
    sources.open_source(x.source).config.running(
      dtype='bfloat16' if x.dtype in convert.CODES else x.dtype,
      scan_layers=True,
    )
    for x in sides
  )
  setting = aot.Setting(
    _TOPOLOGY.value,
    max(s.mesh.data, 1),
    s.mesh.model,
    target,
    drafted,
    s.bench.batch_size,
    _CONTEXT.value,
    max(s.decode.gammas),
    draft.tensor_parallel,
    (s.target.source, draft.source),
    (kinds[0], kinds[1]),
    _TRAIN.value,
  )
  doc = report.make(setting)
  print(*report.lines(doc), sep='\n')
  printing.result(doc)
  return doc['fits'] and (not doc['train'] or doc['train']['fits'])


if __name__ == '__main__':
  program.launch(run)
