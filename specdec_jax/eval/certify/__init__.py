"""Is a rule exact? Laws by enumeration.

Drives the production rule (window), or the whole production step (walk), with
injected noise: every draft path, every side of every accept test and every next
token is taken once, with its probability, so nothing is estimated. Knows no
model.
"""

from specdec_jax.eval.certify.walk import (
  Choice,
  completed,
  outcomes,
  step_with,
  walk,
)
from specdec_jax.eval.certify.window import (
  NotEnumerable,
  Outcomes,
  Windows,
  breaks,
  draws,
  draws_nothing,
  first_token_law,
  length_law,
  next_law,
  not_enumerable,
  outcomes_of,
  run_rule,
  target_law,
  window_law,
  windows,
)

__all__ = [
  'Choice',
  'NotEnumerable',
  'Outcomes',
  'Windows',
  'breaks',
  'completed',
  'draws',
  'draws_nothing',
  'first_token_law',
  'length_law',
  'next_law',
  'not_enumerable',
  'outcomes',
  'outcomes_of',
  'run_rule',
  'step_with',
  'target_law',
  'walk',
  'window_law',
  'windows',
]
