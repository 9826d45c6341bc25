"""Intervals hold the truth as often as they say, and pay for every choice."""

import math

import numpy as np
import pytest

from specdec_jax.bench import intervals
from tests.bench import simulation

Case = simulation.Case


@pytest.fixture
def few_resamples(monkeypatch):
  monkeypatch.setattr(intervals, 'RESAMPLES', 400)


# All of them, more often: python tests/bench/simulation.py. Of 600 runs up to
# 30 may be wrong; of thousands 2 to 4 % are.
@pytest.mark.parametrize(
  'case',
  [
    Case(6),
    Case(6, 5, 4, 0.9),
    Case(8, 3, 3, 0.5, lengths=1.0),
    Case(14, 5, 1, 0.8, lengths=1.0),
    Case(14, 3, 2, 0.5, spread=0.4),
    Case(28, 4, 4, 0.0),
    Case(28, 3, 1, 0.9, spread=0.05),
    Case(16, 3, 1, 0.8, batch=4),
    Case(14, 2, 3, 0.8, categories=7, share=0.5),
    Case(28, 2, 3, 0.8, categories=7, share=0.8),
    Case(28, 2, 3, 0.8, first=1.0),
  ],
  ids=str,
)
def test_equal_arms_are_rarely_called_faster(case, few_resamples):
  """Of the best of all drafters and gammas, chosen by the same numbers."""
  found = simulation.rates(case, 600, seed=1)
  assert found.given <= found.any <= 0.05
  assert found.slower <= 0.05
  assert found.holds >= 0.93


def test_one_that_is_faster_is_mostly_called_so(few_resamples):
  """1.35x on 24 prompts whose gains differ by 30 %."""
  case = Case(24, 3, 1, 0.8, improvement=1.35, spread=0.3)
  found = simulation.rates(case, 200)
  assert found.given > 0.9 and found.holds >= 0.93 and found.width < 0.2
  lost = simulation.rates(case._replace(improvement=1 / 1.35), 200)
  assert lost.slower > 0.9 and lost.any == 0


def test_of_few_categories_intervals_are_of_their_prompts_alone(few_resamples):
  """Which the verdict says: others would gain more or less."""
  case = Case(24, 2, 3, 0.8, categories=4, share=0.8)
  found = simulation.rates(case, 100)
  assert found.any > 0.1 and found.holds < 0.9


def test_a_prompt_is_in_both_arms_at_once():
  """Prompts of very different length and equal gain leave no doubt."""
  seconds = np.array([1.0, 10.0, 100.0])
  (x,) = intervals.speedups([seconds] * 2, [seconds, seconds / 1.5])
  assert x == pytest.approx((1.5, 1.5, 1.5))


def test_the_jackknife_by_hand():
  """Units of 1, 2 and 3 s, and of 1, 1 and 2 s: 6 / 4 = 1.5 times as fast.

  Without each of them 5 / 3, 4 / 3 and 3 / 2. Their shares are means over both
  arms.
  """
  left, shares = np.array([5 / 3, 4 / 3, 3 / 2]), np.array([5, 7, 12]) / 24
  shares = (np.array([1, 2, 3]) / 6 + np.array([1, 1, 2]) / 4) / 2
  error = math.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
  freedom = 1 / (shares**2).sum() - 1
  t = intervals.stats.t.ppf(0.975, freedom)
  (x,) = intervals.speedups([[4, 4, 4]] * 2, [[1, 2, 3], [1, 1, 2]])
  assert x == pytest.approx((1.5, max(1.5 - t * error, 0), 1.5 + t * error))
  assert x.width == pytest.approx(t * error / 1.5)


def test_what_choosing_costs():
  """Nothing for one arm or for equal arms, and Bonferroni's at most."""
  rng = np.random.default_rng(0)
  one_GA, four_GA = rng.normal(size=(28, 1)), rng.normal(size=(28, 4))
  each = lambda errors_GA: intervals._each(np.transpose(errors_GA), 0.05)
  assert each(one_GA) == 0.05
  assert 0.025 < each(np.repeat(one_GA, 4, 1) + 1e-6 * four_GA) < 0.05
  assert each(four_GA) == pytest.approx(0.05 / 4, rel=0.2)
  assert each(np.concatenate([four_GA] * 9, 1)) >= 0.05 / 36
  assert each(np.zeros((28, 3))) == 0.05
  # Few units overstate it, so that they pay more.
  assert each(one_GA[:6] @ np.ones((1, 4))) < each(one_GA @ np.ones((1, 4)))


def test_outcomes():
  outcome = lambda *ends: intervals.Interval(*ends).outcome
  assert outcome(1.3, 1.2, 1.4) == 'win' and outcome(0.8, 0.7, 0.9) == 'loss'
  assert outcome(1.3, 0.99, 1.4) == 'unclear'
  (x,) = intervals.speedups([[9.0]] * 2, [[2.0], [1.0]])
  assert x == (2.0, None, None) and x.outcome == 'too few'
