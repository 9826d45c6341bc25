"""Intervals over requests: the bootstrap, and Student's t for differences."""

from typing import Any

import numpy as np
from scipy import special


def resamples(requests: int, count: int, seed: int = 0) -> np.ndarray | None:
  """How often each request is in each resample: [count, requests].

  None for fewer than two requests: one says nothing about others.

  Raises:
    ValueError: count < 1000, too few for the ends of an interval.
  """
  if count < 1000:
    raise ValueError(f'resamples={count}: a bootstrap wants 1000 or more')
  if requests < 2:
    return None
  rng = np.random.default_rng(seed)
  return rng.multinomial(requests, np.full(requests, 1 / requests), size=count)


def ratio(top_B, bottom_B, times_RB) -> np.ndarray:
  """Ratio of sums over all requests, then of each resample: [1 + R]."""
  all_B = np.ones((1, len(top_B)), int)
  times_RB = all_B if times_RB is None else np.concatenate([all_B, times_RB])
  return (times_RB @ top_B) / (times_RB @ bottom_B)


def interval(value_R) -> dict[str, Any]:
  """The value, value_R[0], and the 95 % percentile interval of the resamples.

  Without resamples its ends are None.
  """
  low, high = None, None
  if len(value_R) > 1:
    low, high = map(float, np.percentile(value_R[1:], (2.5, 97.5)))
  return {'value': float(value_R[0]), 'low': low, 'high': high}


def difference(
  top_B, bottom_B, other_top_B, other_bottom_B, *, level: float
) -> dict[str, Any]:
  """One ratio of sums less another, paired by request, with an interval.

  Linearised: a request moves the ratio r of sums a / b by (a - r b) / mean b;
  the interval is Student's t over what each moves the difference by.

  Raises:
    ValueError: fewer than two requests.
  """
  n = len(top_B)
  if n < 2:
    raise ValueError(
      f'{n} request: a difference between runs needs two or more'
    )
  one, other = (
    np.sum(a) / np.sum(b)
    for a, b in ((top_B, bottom_B), (other_top_B, other_bottom_B))
  )
  moved_B = (top_B - one * bottom_B) / np.mean(bottom_B)
  moved_B = moved_B - (other_top_B - other * other_bottom_B) / np.mean(
    other_bottom_B
  )
  t = float(special.stdtrit(n - 1, (1 + level) / 2))
  half = t * float(np.std(moved_B, ddof=1)) / n**0.5
  value = float(one - other)
  return {'value': value, 'low': value - half, 'high': value + half}
