r"""SmolLM2-1.7B-Instruct with SmolLM2-135M-Instruct as its draft.

  python scripts/bench.py --config=configs/smollm2_1_7b.py
  python scripts/bench.py --config=configs/smollm2_1_7b.py:tiny

Needs huggingface_hub and network. Hardware, wall time, result: not yet run.
"""

from configs import default


def get_config(size: str = 'full'):
  c = default.get_config(size)
  if size != 'tiny':
    c.target.source = 'hf:HuggingFaceTB/SmolLM2-1.7B-Instruct'
    c.draft.source = 'hf:HuggingFaceTB/SmolLM2-135M-Instruct'
  return c
