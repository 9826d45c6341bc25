"""Intervals against formulas, and what they need."""

import numpy as np
import pytest
from scipy import stats

from specdec_jax.analysis import intervals


def test_bootstrap_of_a_mean():
  x_B = np.random.default_rng(0).normal(5, 1, 400)
  one_B = np.ones(400)
  found = intervals.interval(
    intervals.ratio(x_B, one_B, intervals.resamples(400, 4000))
  )
  assert found['value'] == pytest.approx(x_B.mean())
  half = 1.96 * x_B.std() / 20
  assert found['low'] == pytest.approx(x_B.mean() - half, abs=0.1 * half)
  assert found['high'] == pytest.approx(x_B.mean() + half, abs=0.1 * half)
  again = intervals.resamples(400, 4000)
  np.testing.assert_array_equal(again, intervals.resamples(400, 4000))


def test_one_request_has_no_interval():
  one_B = np.ones(1)
  value_R = intervals.ratio(3 * one_B, one_B, intervals.resamples(1, 2000))
  assert intervals.interval(value_R) == {'value': 3, 'low': None, 'high': None}
  with pytest.raises(ValueError, match='1 request: a difference'):
    intervals.difference(one_B, one_B, one_B, one_B, level=0.95)
  with pytest.raises(ValueError, match='resamples=999'):
    intervals.resamples(5, 999)


def test_difference_of_means_is_the_paired_t_interval():
  rng = np.random.default_rng(1)
  a_B, one_B = rng.normal(size=9), np.ones(9)
  b_B = a_B + 0.1 * rng.normal(size=9)
  found = intervals.difference(a_B, one_B, b_B, one_B, level=0.99)
  low, high = stats.ttest_rel(a_B, b_B).confidence_interval(0.99)
  assert found['value'] == pytest.approx((a_B - b_B).mean())
  assert (found['low'], found['high']) == pytest.approx((low, high))


def test_difference_of_ratios_covers_as_often_as_it_says():
  rng = np.random.default_rng(2)
  missed = 0
  for _ in range(400):
    b_B, d_B = rng.integers(5, 50, (2, 30))
    a_B, c_B = b_B + rng.normal(0, 3, 30), d_B + rng.normal(0, 3, 30)
    found = intervals.difference(a_B, b_B, c_B, d_B, level=0.9)
    missed += not found['low'] <= 0 <= found['high']
  # 40 expected, 4 standard deviations either way.
  assert 16 <= missed <= 64
