"""A small pair trained from scratch on Python's manual and library."""

import ml_collections

KL = ('forward_kl', 'reverse_kl')
OTHERS = ('jensen_shannon:0.5', 'total_variation', 'log_alpha')


def get_config(size: str = 'full') -> ml_collections.ConfigDict:
  """size 'quick': two divergences, two sources, a tenth of the steps."""
  if size not in ('full', 'quick'):
    raise ValueError(f'config argument {size!r}: allowed are full, quick')
  quick = size == 'quick'
  c = ml_collections.ConfigDict(
    {
      'pair': {
        'text': 'stdlib:prose' if quick else 'stdlib',  # of train.text.read
        'target': 'small',  # of models.config.SIZES
        'draft': 'mini',
        'vocab': 1024 if quick else 3072,
        'length': 64 if quick else 128,  # tokens of a row
        'rows': 8,  # of a batch
        'target_steps': 150 if quick else 3000,
        'draft_steps': 100 if quick else 2000,  # before a distillation
        'learning_rate': 3e-3,  # of cross-entropy
      },
      'grid': {
        'divergences': KL if quick else KL + OTHERS,
        'sources': ('text', 'student')
        if quick
        else ('text', 'teacher', 'student', 'mixed'),
        'temperatures': (0.0, 1.0),
        'steps': 50 if quick else 400,  # of a distillation
        'learning_rate': 2e-3,
        'refresh': 10,
        'seed': 0,
        # For which the best cell and the baseline are trained again.
        'more_seeds': () if quick else (1, 2),
      },
      'judge': {
        'prompts': 32 if quick else 128,  # two halves choose and judge
        'prompt_tokens': 16 if quick else 32,
        'new_tokens': 32 if quick else 64,
        'gamma': 4,
      },
    }
  )
  return c.lock()
