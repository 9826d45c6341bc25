r"""A language model from scratch, on Python's manual and library or your text.

  python scripts/train.py --config=configs/train_lm.py:tiny --workdir=DIR
  python scripts/train.py --config=configs/train_lm.py --workdir=DIR \
    --config.text.source=my_corpus.jsonl

The keys are explained in specdec_jax/train: train_lm.py, step.py (optimiser),
loop.py (run).
"""

import ml_collections


def get_config(size: str = 'full') -> ml_collections.ConfigDict:
  """size 'tiny': a small model and few steps, for a quick run."""
  if size not in ('full', 'tiny'):
    raise ValueError(f'config argument {size!r}: allowed are full, tiny')
  tiny = size == 'tiny'
  c = ml_collections.ConfigDict(
    {
      'model': {
        'size': 'tiny' if tiny else 'smollm2_135m',
        'source': '',
        'dtype': 'float32' if tiny else 'bfloat16',
        'remat': not tiny,
        'dropout': 0.0,
      },
      'text': {
        'source': 'stdlib:prose' if tiny else 'stdlib',
        'field': 'text',
        'source_field': '',
        'tokenizer': '',
        'vocab': 512 if tiny else 8192,
        'length': 64 if tiny else 512,
        'source_length': 64 if tiny else 512,
        'held_out': 20,
        'rows': 16 if tiny else 64,
      },
      'mesh': {'data': -1, 'model': 1, 'fsdp': False},
      'optimiser': {
        'learning_rate': 3e-3 if tiny else 6e-4,
        'warmup': 10 if tiny else 200,
        'final': 0.1,
        'weight_decay': 0.1,
        'clip': 1.0,
        'b1': 0.9,
        'b2': 0.95,
        'muon': 0.0,
        'accumulate': 1,
      },
      'run': {
        'steps': 100 if tiny else 5000,
        'checkpoint_every': 25 if tiny else 500,
        'evaluate_every': 50 if tiny else 500,
        'log_every': 10,
        'keep': 2,
        'seed': 0,
      },
      'judge': {'metric': '', 'pairs': 64},
    }
  )
  return c.lock()
