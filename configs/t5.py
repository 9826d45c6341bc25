r"""Flan-T5-small that writes titles (int8, dequantised), without a draft model.

An encoder reads the prompt, and `lookup` searches it too; `early_exit` leaves
the decoder after some layers. A draft of the same tokenizer, if there is one:
--config.decode.methods="('lm',)" --config.draft.source=SOURCE.

  python scripts/bench.py --config=configs/t5.py --minutes=4
  python scripts/bench.py --config=configs/t5.py:tiny

2 threads of an AMD EPYC beside other work, --minutes=4 (commit d4e1b9f): 16 of
16 texts equal; lookup 0.80x plain decoding (95 %: 0.63 to 1.02), early exit
0.25x: the head is 43 % of a step, and titles copy little.
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
