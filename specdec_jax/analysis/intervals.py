"""Bootstrap intervals of ratios, over requests."""

from typing import Any

import numpy as np

from specdec_jax.bench import metrics


def resamples(requests: int, count: int, seed: int = 0) -> np.ndarray | None:
  """Draws how often each request is in each resample: [count, requests].

  Returns None for fewer than two requests, which do not show any variation.

  Raises:
    ValueError: count < 1000, too few for the ends of an interval.
  """
  if count < 1000:
    raise ValueError(f'resamples={count}: a bootstrap needs 1000 or more')
  return metrics.resamples(requests, count, seed) if requests > 1 else None


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
