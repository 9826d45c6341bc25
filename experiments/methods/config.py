"""SmolLM2-135M-Instruct with every drafter.

No smaller model with its tokenizer is published, so `lm` drafts with the target
itself: the highest acceptance, and the highest cost of a draft model.
"""

from configs import smollm2


def get_config(size: str = 'full'):
  c = smollm2.get_config(size).unlock()
  c.eagle.tree = ''  # for every rule
  c.decode.methods = ('lm', 'lookup', 'ngram', 'early_exit')
  if size != 'tiny':
    c.decode.methods += ('eagle', 'adaptive')
  c.draft.source = c.target.source
  c.decode.gammas = (4,)
  c.early_exit.exit = 1 if size == 'tiny' else 20
  if size == 'full':
    c.decode.max_new_tokens = 48
    c.bench.prompts_per_category = 1
    c.bench.repeats = 2
  return c.lock()
