"""Intervals hold the truth as often as they say, for few prompts too."""

import math

import numpy as np
import pytest

from specdec_jax.bench import metrics


def simulated(rng, prompts, repeats, spread, noise):
  """(tokens, seconds) of two arms; the true improvement is 1.2 a prompt."""
  tokens_G = np.exp(rng.normal(0, 0.5, prompts))
  gain_G = np.exp(rng.normal(np.log(1.2), spread, prompts))
  drift_RG = np.exp(rng.normal(0, 0.2, (repeats, prompts)))
  seconds = lambda s_G: np.mean(
    s_G * drift_RG * np.exp(rng.normal(0, noise, (repeats, prompts))), 0
  )
  # Drift is of a block, so both arms have the same.
  return [tokens_G] * 2, [seconds(tokens_G / gain_G), seconds(tokens_G)]


@pytest.mark.parametrize(
  'spread, noise, repeats', [(0.3, 0.03, 1), (0.02, 0.05, 2), (0.1, 0.1, 3)]
)
@pytest.mark.parametrize('prompts', [2, 4, 7, 14])
def test_coverage_is_95_percent(prompts, spread, noise, repeats, monkeypatch):
  monkeypatch.setattr(metrics, 'RESAMPLES', 200)
  rng = np.random.default_rng(prompts)
  truth = 1.2 / math.exp(spread**2 / 2)  # tokens over expected seconds
  hits = 0
  for _ in range(400):
    x = metrics.speedup(*simulated(rng, prompts, repeats, spread, noise))
    hits += x.low <= truth <= x.high
  assert 0.91 <= hits / 400 <= 0.985


def test_a_prompt_is_drawn_for_both_arms_at_once():
  """Prompts of very different length and equal gain leave no doubt."""
  seconds = [1.0, 10.0, 100.0]
  x = metrics.speedup([seconds] * 2, [np.array(seconds) / 1.5, seconds])
  assert x.value == pytest.approx(1.5)
  assert (x.low, x.high) == pytest.approx((1.5, 1.5))


@pytest.mark.parametrize(
  'ends, outcome',
  [
    ((1.3, 1.2, 1.4), 'win'),
    ((0.8, 0.7, 0.9), 'loss'),
    ((1.3, 0.99, 1.4), 'unclear'),
    ((1.3, None, None), 'one prompt'),
    ((None, None, None), 'too short'),
  ],
)
def test_outcomes(ends, outcome):
  assert metrics.Interval(*ends).outcome == outcome


def test_one_prompt_is_never_called():
  x = metrics.speedup([[9.0]] * 2, [[1.0], [2.0]])
  assert x == (2.0, None, None) and x.outcome == 'one prompt'


def test_time_that_would_tell():
  """Twice the distance to 1 takes four times as long."""
  x = metrics.Interval(1.1, 1.1 / 1.21, 1.1 * 1.21)
  assert x.more(60.0) == pytest.approx(180.0)
  assert metrics.Interval(1.0, 0.9, 1.2).more(1.0) == math.inf
