r"""Qwen2.5-Coder-1.5B-Instruct with Qwen2.5-Coder-0.5B-Instruct as its draft.

  python scripts/bench.py --config=configs/qwen2_5_coder.py
  python scripts/bench.py --config=configs/qwen2_5_coder.py:tiny

Needs huggingface_hub and network. Hardware, wall time, result: not yet run.
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  if size != 'tiny':
    c.target.source = 'hf:Qwen/Qwen2.5-Coder-1.5B-Instruct'
    c.draft.source = 'hf:Qwen/Qwen2.5-Coder-0.5B-Instruct'
  return c
