r"""Flan-T5-small that writes titles (int8, dequantised), without a draft model.

An encoder reads the prompt, and `lookup` searches it too; `early_exit` leaves
the decoder after some layers. A draft of the same tokenizer, if there is one:
--config.decode.methods="('lm',)" --config.draft.source=SOURCE.

  python scripts/bench.py --config=configs/t5.py --minutes=4
  python scripts/bench.py --config=configs/t5.py:tiny

2 threads of an AMD EPYC, quiet, --minutes=3 (commit 6652ea2): 28 of 28 texts
equal; lookup 1.33x plain decoding (95 %: 0.96 to 1.85), whole requests 1.12x
(0.97 to 1.30); early exit 0.36x: the head is 43 % of a step.
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  tiny = size == 'tiny'
  c.decode.methods = ('lookup', 'early_exit')
  c.target.source = 'wheel:traceforge-title-model==0.2.0'
  if tiny:
    c.decode.methods = ('lm', 'lookup', 'early_exit')
    c.target.source, c.draft.source = 'random:t5_tiny', 'random:t5_tiny:1'
  else:
    c.decode.max_new_tokens = 64
    c.decode.gammas = (4,)
    c.early_exit.exit = 2
    c.bench.repeats = 3
  return c
