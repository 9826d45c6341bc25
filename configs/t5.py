r"""Flan-T5-small that writes titles (int8, dequantised); a draft of one layer.

An encoder reads the prompt, for both, and `lookup` searches it too. The draft
comes with the library (specdec_jax/zoo/flan-t5-small-titles); another of the
same tokenizer: --config.draft.source=SOURCE.

  python scripts/bench.py --config=configs/t5.py --minutes=4
  python scripts/bench.py --config=configs/t5.py:tiny

2 threads of an Intel Xeon, quiet, all texts equal to plain decoding's (LOG.md):
on paragraphs like those it learned from (--prompts=YOUR.jsonl) the draft is
1.14x plain decoding at gamma 2 (95 %: 1.05 to 1.25), lookup 1.10x (0.99 to
1.22); on the built-in prompts, chats and translations that nobody gives a title
writer, the draft is 0.75x at gamma 4 (0.62 to 0.92), lookup 1.18x (0.91 to
1.52).
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
    c.decode.gammas = (2, 4)
    c.draft.source = 'zoo:flan-t5-small-titles'
    c.bench.repeats = 3
  return c
