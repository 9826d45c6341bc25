r"""A draft for a T5 that writes titles: two layers of its decoder, 4,096 ids.

The encoder, embedding and head stay the teacher's. Sources are the paragraphs
of Python's manual; the draft learns from the titles that the teacher gives.

  python scripts/distill.py --config=configs/distill_t5.py --workdir=DIR
  python scripts/distill.py --config=configs/distill_t5.py:tiny --workdir=DIR

w128 and w256: T5s of that width instead, from random weights, with four layers
of encoder and one of decoder; experiments/train_rows.sh has all.

For another task: --config.data.source=YOUR.jsonl --config.data.source_field=
the field to read, and --config.data.field= the field of what to write.
"""

import ml_collections

from configs import distill

# Learning rate and steps; w128 and w256 are T5s of their own.
TRAINED = {'full': (1e-3, 2000), 'w128': (2e-3, 2200), 'w256': (1.5e-3, 1300)}


def get_config(size: str = 'full') -> ml_collections.ConfigDict:
  """size 'tiny': a random teacher and few steps; w128, w256: small T5s."""
  own = size in ('w128', 'w256')
  c = distill.get_config('full' if own else size)
  tiny = size == 'tiny'
  c.teacher.source = 'wheel:traceforge-title-model==0.2.0'
  if tiny:
    c.teacher.source = 'random:t5_tiny'
  c.student.update(
    kind='lm',
    taps=(),
    layers=(0,) if tiny else (0, 7),
    vocabulary=128 if tiny else 4096,
  )
  if own:
    c.student.update(size=f't5_{size}', layers=(), share=False)
  if size in TRAINED:
    c.optimiser.learning_rate, c.run.steps = TRAINED[size]
  c.data.update(
    source='stdlib:prose',
    keep=True,
    length=24 if tiny else 32,
    source_length=32 if tiny else 128,
  )
  c.optimiser.muon = 0.0
  c.judge.new_tokens = 16 if tiny else 24
  return c
