"""Intervals of resampled prompts hold the truth as often as they say."""

import numpy as np
import pytest

from experiments import resampled
from specdec_jax.bench import intervals


def test_one_of_many_is_wider():
  """Twenty: 3.02 normal deviations for 1.96, on either side."""
  x = resampled.one_of(intervals.Interval(1.0, 0.9, 1.2), 20)
  assert x == pytest.approx(
    (1.0, 1 - 0.1 * 3.023 / 1.96, 1 + 0.2 * 3.023 / 1.96), rel=1e-3
  )
  assert resampled.one_of(intervals.Interval(1.0), 20) == (1.0, None, None)


def test_a_bootstrap_of_few_prompts_is_widened():
  """The means of six normal values hold theirs 95 times in 100; none of 5."""
  rng, times_RB = np.random.default_rng(0), resampled.draws(6, 400)
  held = [
    x.low <= 0 <= x.high
    for x in (
      resampled.interval(times_RB @ rng.normal(size=6), 6) for _ in range(1000)
    )
  ]
  assert 0.93 <= np.mean(held) <= 0.97
  assert len(resampled.draws(5)) == 1
  assert resampled.interval(np.array([0.5]), 5) == (0.5, None, None)
