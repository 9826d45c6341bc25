r"""Llama-3.1-8B-Instruct with Llama-3.2-1B-Instruct as the draft, in bfloat16.

  python scripts/bench.py --config=configs/llama3.py
  python scripts/bench.py --config=configs/llama3.py:tiny

Gated: accept the licence on the Hub and log in first. Needs an accelerator with
24 GB or more; on a mesh: --config.mesh.model=8. Hardware, wall time, result:
not yet run.
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  c.target.dtype = c.draft.dtype = 'bfloat16'
  if size != 'tiny':
    c.target.source = 'hf:meta-llama/Llama-3.1-8B-Instruct'
    c.draft.source = 'hf:meta-llama/Llama-3.2-1B-Instruct'
  return c
