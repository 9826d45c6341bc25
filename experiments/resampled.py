"""Intervals for the papers' tables, over resampled requests or prompts."""

import functools

import numpy as np
from scipy import stats

from specdec_jax.bench import intervals


@functools.lru_cache(maxsize=4)  # a page asks for the same ones a hundred times
def draws(prompts: int, resamples: int = 2000) -> np.ndarray:
  """Counts how often each prompt is drawn: [1 + R, prompts].

  Each once, then in every resample if there are intervals.FEWEST or more.
  """
  once = np.ones((1, prompts), int)
  few = prompts < intervals.FEWEST
  rng, even = np.random.default_rng(0), np.full(prompts, 1 / prompts)
  drawn = rng.multinomial(prompts, even, size=0 if few else resamples)
  return np.concatenate([once, drawn])


def interval(value_R, prompts: int) -> intervals.Interval:
  """Returns the first value with its 95 % interval, from the others' spread.

  For the rows of `draws(prompts)`. Their percentiles would be too narrow for
  few prompts: 88 % for seven instead of 95 %.
  """
  value = float(value_R[0])
  if len(value_R) == 1:
    return intervals.Interval(value)
  t = stats.t.ppf(0.975, prompts - 1)
  half = t * np.std(value_R[1:]) * np.sqrt(prompts / (prompts - 1))
  return intervals.Interval(value, float(value - half), float(value + half))


def one_of(x: intervals.Interval, many: int) -> intervals.Interval:
  """Widens an interval for one of `many`, whichever of them is looked at.

  x: a 95 % interval from a sample that is large enough to be normal.
  """
  if x.value is None or x.low is None or x.high is None:
    return x
  times = stats.norm.ppf(1 - 0.025 / many) / stats.norm.ppf(0.975)
  end = lambda y: float(x.value + (y - x.value) * times)
  return intervals.Interval(x.value, end(x.low), end(x.high))
