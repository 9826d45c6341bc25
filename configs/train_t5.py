r"""An encoder-decoder on pairs of texts: Flan-T5-small on yours.

  python scripts/train.py --config=configs/train_t5.py:tiny --workdir=DIR
  python scripts/train.py --config=configs/train_t5.py --workdir=DIR \
    --config.text.source=pairs.jsonl --config.text.source_field=en \
    --config.text.field=de --config.judge.metric=bleu

tiny: names of digits in reverse, from random weights; BLEU 88 after 300 steps,
half a minute on 2 CPU cores. translation: of English captions into German
(experiments/train_rows.sh); 1.4 epochs, some 65 minutes on 2 quiet cores. code:
what a function does, in a line, by the same script; an epoch, ROUGE-L 32.9 on
192 held-out functions, 75 minutes beside other work. The full one has not been
run to its end.
"""

import ml_collections

from configs import train_lm

# An epoch is some 450 steps; 3 % of Multi30k's pairs are longer.
TASKS = {
  'translation': dict(
    source_field='en', field='de', length=40, source_length=28
  ),
  'code': dict(
    source_field='code', field='summary', length=32, source_length=128
  ),
}


def get_config(size: str = 'full') -> ml_collections.ConfigDict:
  """size 'tiny': a small model and few steps; 'translation', 'code': a task."""
  c = train_lm.get_config('full' if size in TASKS else size).unlock()
  tiny = size == 'tiny'
  c.model.update(
    size='t5_tiny' if tiny else '',
    source='' if tiny else 'wheel:traceforge-title-model==0.2.0',
    dropout=0.0 if tiny else 0.1,
  )
  c.text.update(
    source='numbers' if tiny else '',
    field='words' if tiny else 'target',
    source_field='digits' if tiny else 'source',
    vocab=320 if tiny else 8192,
    length=24 if tiny else 128,
    source_length=8 if tiny else 256,
    rows=64 if tiny else 32,
  )
  c.optimiser.update(learning_rate=3e-3 if tiny else 3e-4, weight_decay=0.0)
  c.run.update(
    steps=300 if tiny else 2000,
    checkpoint_every=100 if tiny else 500,
    evaluate_every=100 if tiny else 500,
  )
  c.judge.metric = 'bleu' if tiny else ''
  if size in TASKS:
    c.text.update(TASKS[size], held_out=100, rows=64)
    c.model.update(dtype='float32', remat=False)
    c.optimiser.update(learning_rate=5e-4, warmup=50)
    translates = size == 'translation'
    c.run.update(
      steps=640 if translates else 448,
      checkpoint_every=64,
      evaluate_every=64,
      log_every=4,
      keep=1,
    )
    c.judge.update(metric='bleu' if translates else 'rouge', pairs=192)
  return c.lock()
