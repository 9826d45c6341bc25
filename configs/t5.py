r"""Flan-T5-small that writes titles (int8, dequantised); a draft of one layer.

An encoder reads the prompt, for both, and `lookup` searches it too. The draft
comes with the library (specdec_jax/zoo/flan-t5-small-titles); another of the
same tokenizer: --config.draft.source=SOURCE.

  python scripts/bench.py --config=configs/t5.py --minutes=4
  python scripts/bench.py --config=configs/t5.py:tiny

The prompts are paragraphs of Python's manual, which the draft has not learned
(--prompts=YOUR.jsonl for yours). 2 threads of an AMD EPYC, --minutes=4
(6af7e36): the draft 1.32x plain decoding at gamma 1 (95 %: 1.18 to 1.45),
lookup 1.09x (0.99 to 1.19). On chats, which nobody gives a title writer, the
draft is slower than none: 0.75x at gamma 4 (LOG.md).
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  c.bench.prompts = 'stdlib:prose'
  c.decode.gammas = (1, 2)
  c.target.dtype = c.draft.dtype = 'float32'
  if size == 'tiny':
    c.target.source, c.draft.source = 'random:t5_tiny', 'random:t5_tiny:1'
  else:
    c.target.source = 'wheel:traceforge-title-model==0.2.0'
    c.draft.source = 'zoo:flan-t5-small-titles'
    c.decode.max_new_tokens = 64
    c.bench.repeats = 3
  return c
