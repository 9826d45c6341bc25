"""What is chosen among batch sizes and categories pays for the choice; cuts."""

import types

import numpy as np
import pytest

from specdec_jax import metrics, requests, settings
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
    plan_lib.Arm(x, x.split()[0], int(x[-1]) if x != 'plain' else 0, None)  # pyright: ignore
    for x in runs
  ]
  for name in 'compare', 'failures':
    monkeypatch.setattr(benchmark.identity, name, lambda *_: {})
  for name in 'join', 'summary':
    monkeypatch.setattr(metrics, name, lambda *_: None)
  monkeypatch.setattr(timing, 'first_token', lambda *_: 0.0)
  return arms, runs


def batch(clocks, monkeypatch, sizes):
  """benchmark._batch of the first size, of one prompt a set."""
  arms, runs = clocks
  each = [(x.tokens_G, x.decoding_G, [], {}) for x in runs.values()]
  monkeypatch.setattr(steady, 'measure', lambda *_: each)
  s = settings.settings(bench_test.settings())
  items = tuple(requests.Item((1,), i, str(i)) for i in range(14))
  sections = s.sampling, s.bench, sizes
  plan = plan_lib.Plan(items, (), 8, 32, *sections)
  return benchmark._batch(arms, plan, sizes[0], budget.UNLIMITED)


def test_batch_sizes_share_the_chance_of_an_error(clocks, monkeypatch):
  _, runs = clocks
  each = [(x.tokens_G, x.decoding_G) for x in runs.values()]
  for sizes, level in (((4,), 0.95), ((4, 1, 16, 64, 256), 0.99)):
    found = batch(clocks, monkeypatch, sizes)
    want = intervals.speedups(*zip(*each, strict=True), level=level)
    np.testing.assert_allclose([x.improvement for x in found.rows[1:]], want)
    assert found.prompts == 14


def test_only_a_gamma_that_surely_wins_is_exported(clocks, monkeypatch):
  rows = batch(clocks, monkeypatch, (4,)).rows
  assert {x.drafter for x in rows} == {'plain', '0', '1'}
  gains = [(1.0, 1.0, 1.0), (1.3, 0.9, 1.7), (1.1, 1.05, 1.2), (1.2, 1.1, 1.3)]
  gains += [(1.5, 0.9, 2.0), (9.0, None, None), (0.5, 0.4, 0.6)]
  rows = [
    x._replace(improvement=intervals.Interval(*y))
    for x, y in zip(rows, gains, strict=True)
  ]
  assert benchmark._best_gammas(rows) == {'0': 3, '1': 0}


def test_categories_share_the_chance_of_an_error(clocks, monkeypatch):
  """Two of six prompts and one of two, which has no interval."""
  arms, runs = clocks
  names = ['code'] * 6 + ['chat'] * 6 + ['few'] * 2
  item = lambda name: types.SimpleNamespace(category=name)
  groups = [types.SimpleNamespace(items=[item(x)]) for x in names]
  none = dict.fromkeys(runs)
  monkeypatch.setattr(benchmark.predict, 'improvements', lambda *_: none)
  found = benchmark._categories(arms, None, groups, runs)  # pyright: ignore
  code = {x.name: x.improvement for x in found if x.category == 'code'}
  part = {name: x.picked(range(6)) for name, x in runs.items()}
  want = timing.improvements(part, level=0.975)
  assert code == {x: y for x, y in want.items() if x != 'plain'}
  assert {x.improvement.outcome for x in found if x.category == 'few'} == {
    'too few'
  }
  assert [x.prompts for x in found[::6]] == [6, 6, 2]


def test_what_the_time_left_less_of_is_told():
  setting = lambda *sizes: types.SimpleNamespace(
    **dict(
      zip(
        ('judged_prompts', 'other_prompts', 'max_new_tokens', 'repeats'),
        sizes,
        strict=True,
      )
    )
  )
  cut = lambda *sizes: benchmark._cut(setting(14, 14, 64, 5), setting(*sizes))  # pyright: ignore
  # Those that predict nothing are judged.
  assert cut(20, 8, 64, 1) == {'repeats': (1, 5)}
  assert cut(14, 8, 32, 5) == {
    'test prompts': (14, 20),
    'new tokens': (32, 64),
  }
