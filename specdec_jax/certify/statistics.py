"""Counts against laws: one bound on the chance of any false alarm."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats

from specdec_jax.certify import base

# Chance of any false alarm in one promise.
ALPHA = 1e-9


class Test(NamedTuple):
  """Counts and the law they should follow, of one shape."""

  counts: np.ndarray
  law: np.ndarray


def chi_square(counts, law, *, least: float = 10.0) -> float:
  """p-value of counts under a law; cells expecting under `least` are pooled."""
  counts = np.asarray(counts, np.float64).ravel()
  expected = np.asarray(law, np.float64).ravel() * counts.sum()
  if counts[expected == 0].any():
    return 0.0
  big = expected >= least
  pool = lambda x: np.append(x[big], x[~big].sum())
  counts, expected = pool(counts), pool(expected)
  if expected[-1] < least and len(counts) > 1:
    counts[-2] += counts[-1]
    expected[-2] += expected[-1]
    counts, expected = counts[:-1], expected[:-1]
  if len(counts) < 2:
    return 1.0
  score = ((counts - expected) ** 2 / expected).sum()
  return float(stats.chi2.sf(score, len(counts) - 1))


def prefix_tests(name: str, counts, law) -> dict[str, Test]:
  """The first m tokens for every m, and the last few alone."""
  n, tests = law.ndim, {}
  for m in range(1, n + 1):
    rest = tuple(range(m, n))
    tests[f'{name}: first {m} tokens'] = Test(counts.sum(rest), law.sum(rest))
  before = tuple(range(n - 3))
  tests[f'{name}: last 3 tokens'] = Test(counts.sum(before), law.sum(before))
  return tests


def judge(
  tests: Mapping[str, Test | float], size: str, extra: str = ''
) -> base.Figure:
  """Every p-value against ALPHA over the number of tests.

  tests: shortest texts first, or p-values themselves.

  Raises:
    base.Broken: the first test that fails, with its worst cell.
  """
  bound, least = ALPHA / max(len(tests), 1), 1.0
  for name, test in tests.items():
    p = chi_square(*test) if isinstance(test, Test) else test
    if not p > bound:
      raise base.Broken(
        f'{name}: the counts do not follow the law, p = {p:.1e} in '
        f'{len(tests)} tests, allowed {bound:.0e}{_worst(test)}; {size}'
      )
    least = min(least, p)
  if not tests:
    return base.Figure('no law is known', 'none', size)
  return base.Figure(
    f'p >= {least:.2g} in {len(tests)} tests{extra}',
    f'p > {bound:.0e} each',
    size,
  )


def _worst(test: Test | float) -> str:
  """The cell that is furthest off, in words."""
  if not isinstance(test, Test):
    return ''
  expected = test.law * test.counts.sum()
  off = np.abs(test.counts - expected) / np.sqrt(np.maximum(expected, 1e-9))
  at = np.unravel_index(np.nanargmax(off), test.law.shape)
  return (
    f'; worst at {" ".join(map(str, at))}: {test.counts[at]:.0f} seen, '
    f'{expected[at]:.1f} expected'
  )


def detectable(n: int, cells: int, tests: int, power: float = 0.999) -> float:
  """Least total variation that n draws over `cells` would show: worst case."""
  limit = stats.chi2.isf(ALPHA / tests, cells - 1)
  low, high = 1.0, 1e4
  for _ in range(60):
    middle = (low + high) / 2
    seen = stats.ncx2.sf(limit, cells - 1, middle) >= power
    low, high = (low, middle) if seen else (middle, high)
  return math.sqrt(high / (4 * n))


def amount_of(n: int) -> str:
  whole = math.log2(n)
  return f'2^{int(whole)}' if whole == int(whole) else f'{n:,}'
