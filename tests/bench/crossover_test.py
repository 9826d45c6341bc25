"""What is chosen among batch sizes and categories pays for the choice."""

import numpy as np
import pytest

from specdec_jax import metrics, settings
from specdec_jax.bench import benchmark, budget, intervals, steady, timing
from specdec_jax.bench import plan as plan_lib
from tests.bench import bench_test, simulation


@pytest.fixture
def clocks(monkeypatch):
  """(arms, Runs of two drafters at three gammas on 14 prompts)."""
  monkeypatch.setattr(intervals, 'RESAMPLES', 200)
  case = simulation.Case(14, 3, 2, 0.8, improvement=1.2)
  runs = simulation.measured(case, np.random.default_rng(0))
  arms = [
    plan_lib.Arm(x, x[0], i, None)  # pyright: ignore
    for i, x in enumerate(runs)
  ]
  for name in 'compare', 'failures':
    monkeypatch.setattr(benchmark.identity, name, lambda *_: {})
  for name in 'join', 'summary':
    monkeypatch.setattr(metrics, name, lambda *_: None)
  return arms, runs


def batch(clocks, monkeypatch, sizes):
  """The first Batch of benchmark._crossover, of one prompt a set."""
  arms, runs = clocks
  monkeypatch.setattr(steady, 'measure', lambda *_: runs)
  s = settings.settings(bench_test.settings())
  plan = plan_lib.Plan((), (), 8, 32, s.sampling, s.bench, sizes)
  return benchmark._crossover(arms, plan, budget.UNLIMITED)[0]


def test_batch_sizes_share_the_chance_of_an_error(clocks, monkeypatch):
  for sizes, level in (((4,), 0.95), ((4, 1, 16, 64, 256), 0.99)):
    found = batch(clocks, monkeypatch, sizes)
    want = timing.improvements(clocks[1], level=level)
    assert {x.name: x.improvement for x in found.rows} == want


def test_categories_share_the_chance_of_an_error(clocks):
  """Two of six prompts and one of two, which has no interval."""
  arms, runs = clocks
  names = ['code'] * 6 + ['chat'] * 6 + ['few'] * 2
  runs = {k: x._replace(kind_G=np.array(names)) for k, x in runs.items()}
  found = benchmark._categories(arms, None, runs)
  code = {x.name: x.improvement for x in found if x.category == 'code'}
  part = {name: x.picked(range(6)) for name, x in runs.items()}
  want = timing.improvements(part, level=0.975)
  assert code == {x: y for x, y in want.items() if x != 'plain'}
  assert {x.improvement.outcome for x in found if x.category == 'few'} == {
    'too few'
  }
  assert [x.prompts for x in found[::6]] == [6, 6, 2]
