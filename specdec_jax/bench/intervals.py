"""Computes improvements' intervals, over prompts and the choice of an arm.

Prompts (see units) are the sample, not repeats: what makes a prompt long or the
machine slow is in both arms, and cancels. An improvement is a ratio of sums;
its standard error is the jackknife's, leaving out one prompt at a time. (By its
logarithm, arms that are not faster would win twice as often as lose.) Few long
prompts hold most of the time, so Student's t has (sum s)^2 / sum s^2 - 1
degrees of freedom, by their seconds s (Kish 1965). With n - 1, intervals for
six prompts whose lengths vary much would hold the truth 90 times in 100:
tests/bench/simulation.py counts.
"""

import functools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 2000  # draws of _each
FEWEST = 6  # prompts of an interval

# What an interval of an improvement says.
Outcome = Literal['win', 'unclear', 'too few', 'loss']


class Interval(NamedTuple):
  """A value, None if not measured, and its interval's ends, None for fewer than
  FEWEST prompts or for one batch."""

  value: float | None = None
  low: float | None = None
  high: float | None = None

  @property
  def outcome(self) -> Outcome:
    if self.low is None or self.high is None:
      return 'too few'
    if self.low > 1:
      return 'win'
    return 'loss' if self.high < 1 else 'unclear'

  @property
  def width(self) -> float | None:
    """Returns its upper half, from value to high, as a share of the value."""
    if not self.value or self.high is None:
      return None
    return self.high / self.value - 1


def units(kinds: Iterable[str]) -> np.ndarray:
  """Returns [G, U]: 1 where a batch is in a unit: a category where there are
  FEWEST or more, else one batch. '' is no category."""
  kinds = [*kinds]
  many = len({*kinds} - {''}) >= FEWEST
  names = [x if x and many else i for i, x in enumerate(kinds)]
  return np.array([[x == y for y in dict.fromkeys(names)] for x in names], int)


def speedups(
  tokens_AG, seconds_AG, level: float = 0.95, prompts: int = FEWEST
) -> list[Interval]:
  """Divides every later arm's tokens per second by the first arm's.

  The intervals hold all at once: whichever arm is chosen afterwards, by these
  numbers too, its interval has paid for the choice.

  tokens_AG, seconds_AG: by arm A and unit G, a prompt or a batch; seconds are
    means over repeats, above 0.
  level: how often all hold. prompts: different ones in all units.
  """
  tokens_AG, seconds_AG = np.array([tokens_AG, seconds_AG], float)
  sums = lambda x_AG: x_AG.sum(1, keepdims=True)
  over = lambda tokens, seconds: (tokens / seconds)[1:] / (tokens / seconds)[:1]
  value_A = over(sums(tokens_AG), sums(seconds_AG))[:, 0]
  units = tokens_AG.shape[1]
  if units < 2 or prompts < FEWEST:
    return [Interval(float(x)) for x in value_A]
  left_AG = over(sums(tokens_AG) - tokens_AG, sums(seconds_AG) - seconds_AG)
  left_AG -= left_AG.mean(1, keepdims=True)
  error_A = np.sqrt((units - 1) / units * (left_AG**2).sum(1))
  weight_G = (seconds_AG / sums(seconds_AG)).mean(0)
  freedom = max(1 / (weight_G**2).sum() - 1, 1.0)
  t = stats.t.ppf(1 - _each(left_AG, 1 - level) / 2, freedom)
  return [
    Interval(float(x), float(max(x - y, 0)), float(x + y))
    for x, y in zip(value_A, t * error_A, strict=True)
  ]


def _each(errors_AG: np.ndarray, chance: float) -> float:
  """Returns one interval's chance to err, for `chance` that any of them errs.

  At least Bonferroni's chance / A, and more where arms err together: the
  largest of normal errors, correlated as these are, passes the quantile for the
  returned chance with probability `chance` (the max-t test: Hothorn, Bretz and
  Westfall 2008, https://doi.org/10.1002/bimj.200810425).
  """
  arms, units = errors_AG.shape
  size_A1 = np.sqrt((errors_AG**2).sum(1, keepdims=True))
  if arms == 1 or not size_A1.any():
    return chance
  # Few units overstate how alike arms are: one of them counts as unshared.
  own = np.sqrt(1 / units)
  unit_AG = np.sqrt(1 - own**2) * errors_AG / np.where(size_A1, size_A1, 1)
  normal_RX = _normals(RESAMPLES, units + arms)
  alone_RA = own * normal_RX[:, units:]
  largest_R = np.abs(normal_RX[:, :units] @ unit_AG.T + alone_RA).max(1)
  found = 2 * stats.norm.sf(np.quantile(largest_R, 1 - chance))
  return float(np.clip(found, chance / arms, chance))


@functools.cache
def _normals(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).normal(size=shape)
