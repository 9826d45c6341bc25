r"""Flan-T5-small that writes titles (int8, dequantised); a draft of one layer.

An encoder reads the prompt, for both, and `lookup` searches it too. The draft
comes with the library (specdec_jax/zoo/flan-t5-small-titles); another of the
same tokenizer: --config.draft.source=SOURCE.

  python scripts/bench.py --config=configs/t5.py --minutes=4
  python scripts/bench.py --config=configs/t5.py:tiny

The prompts are paragraphs of Python's manual, which the draft has not learned
(--prompts=YOUR.jsonl for yours). In 80 seconds on 2 threads of an Intel Xeon,
all texts equal to plain decoding's: the draft 1.13x plain decoding at gamma 2
(95 %: 1.04 to 1.24), lookup 1.05x (0.99 to 1.12). On chats, which nobody gives
a title writer, the draft is slower than none: 0.75x at gamma 4 (LOG.md).
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  tiny = size == 'tiny'
  c.target.source = 'wheel:traceforge-title-model==0.2.0'
  if tiny:
    c.decode.methods = ('lm', 'lookup', 'early_exit')
    c.target.source, c.draft.source = 'random:t5_tiny', 'random:t5_tiny:1'
  else:
    c.decode.max_new_tokens = 64
    c.decode.gammas = (1, 2)
    c.draft.source = 'zoo:flan-t5-small-titles'
    c.bench.prompts = 'stdlib:prose'
    c.bench.repeats = 3
  return c
