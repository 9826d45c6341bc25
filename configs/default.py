"""Every key of a bench config; the other files of this folder start from it.

The classes of specdec_jax/settings.py explain the keys. Every drafter has its
own section, with the defaults of its Settings in specdec_jax/drafters/.
"""

import ml_collections

from specdec_jax import fields, settings


def get_config(size: str = 'full') -> ml_collections.ConfigDict:
  """size 'tiny': random models and few tokens, for a quick run."""
  if size not in ('full', 'tiny'):
    raise ValueError(f'config argument {size!r}: allowed are full, tiny')
  tiny = size == 'tiny'
  c = ml_collections.ConfigDict(
    {
      'target': {
        'source': 'random:tiny' if tiny else '',
        'dtype': 'stored',
        'scan_layers': 'auto',
        'kernels': 'auto',
      },
      'mesh': {'data': -1, 'model': 1},
      'decode': {
        'methods': ('lm', 'lookup'),
        'gammas': (3,) if tiny else (2, 4),
        'rule': 'reject',
        'max_new_tokens': 16 if tiny else 128,
      },
      'sampling': {'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'seed': 0},
      'bench': {
        'prompts': '',
        'repeats': 2 if tiny else 5,
        'prompts_per_category': 2 if tiny else 0,
        'prompt_tokens': 64 if tiny else 0,
        'batch_size': 1,
        'chat': True,
        'small': tiny,
      },
    }
  )
  for name, kind in settings.drafter_sections().items():
    c[name] = fields.defaults(kind)
  if tiny:
    c.draft.source = 'random:tiny:1'
  return c.lock()
