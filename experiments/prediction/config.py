"""SmolLM2-135M-Instruct with its EAGLE layer and lookup, at three gammas."""

from configs import smollm2


def get_config(size: str = 'full'):
  c = smollm2.get_config(size).unlock()
  c.eagle.tree = ''  # a tree has one gamma
  c.decode.gammas = (1, 2) if size == 'tiny' else (1, 2, 4)
  if size == 'full':
    c.decode.max_new_tokens = 48
    c.bench.repeats = 1
  return c.lock()
