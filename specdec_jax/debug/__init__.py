"""Checks of a drafter, a rule or a model while it decodes; slow, and exact.

Both drive the loop of decode.py a window at a time, and raise at the first
window that is wrong: the error names the row, the window and the slot. Windows
count from 0, as in Info.window_BL. What a check finds is a bug of the code
under it, so an error is an AssertionError.

debug.check_cache(target, drafter, rule, weights, request)
debug.check_values(target, drafter, rule, weights, request)
"""

from specdec_jax.debug.caches import check as check_cache
from specdec_jax.debug.values import check as check_values
from specdec_jax.debug.watch import (
  BadValue,
  CacheMismatch,
  DraftMismatch,
  Finding,
)

__all__ = [
  'BadValue',
  'CacheMismatch',
  'DraftMismatch',
  'Finding',
  'check_cache',
  'check_values',
]
