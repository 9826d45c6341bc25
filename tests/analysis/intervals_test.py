"""Intervals against formulas."""

import numpy as np
import pytest

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
  with pytest.raises(ValueError, match='resamples=999'):
    intervals.resamples(5, 999)
