"""Pools that are full as long as the clock runs, and what they are given."""

import dataclasses

import pytest

from specdec_jax import pool, requests, settings
from specdec_jax.bench import budget, steady
from specdec_jax.bench import plan as plan_lib
from tests.bench import bench_test


@pytest.mark.parametrize(
  'prompts, rows, sets, queue',
  [
    (14, 1, 7, [3] * 7),  # two of each set end, and one more is begun
    (14, 4, 6, [12] * 6),  # copies, so that there are six sets
    (3, 2, 3, [6] * 3),
    (80, 4, 10, [12] * 10),
    (7, 3, 6, [9] * 6),
  ],
)
def test_prompts_are_dealt_to_sets_that_fill_the_rows(
  prompts, rows, sets, queue
):
  s = settings.settings(bench_test.settings())
  bench = dataclasses.replace(s.bench, batch_size=rows)
  items = tuple(requests.Item((1,), i, str(i)) for i in range(prompts))
  plan = plan_lib.Plan(items, (), 8, 32, s.sampling, bench)
  found = steady.queues(plan)
  assert [*map(len, found)] == queue and len(found) == sets
  names = [{x.id for x in queue} for queue in found]
  assert sum(map(len, names)) == len(set.union(*names)) == prompts
  # A copy draws its own noise.
  assert all(len({x.number for x in queue}) == len(queue) for queue in found)


def test_the_clock_runs_while_all_rows_have_requests(monkeypatch):
  """Answers of 3, 5, 4 and 9 tokens in two rows: the last row is given at 5."""
  e = settings.load(settings.settings(bench_test.settings(())))
  engine = plan_lib.arms(e)[0].engine
  held, free = pool.Pool.of(engine, rows=2, length=32), []

  def timed(run):
    free.append(held.free)
    out = run()
    free.append(held.free)
    return 2.0, out

  monkeypatch.setattr(steady.parts, 'timed', timed)
  news = enumerate((3, 5, 4, 9))
  queue = [requests.Item((1, 2, i), i, new=new) for i, new in news]
  found = steady.timed(held, queue)
  # Plain decoding emits a token a window: five in both rows.
  assert found[:2] == (10, 2.0) and found[2].keys() == {0, 1}
  assert free == [0, 0]
  assert not held.busy and held.free


def test_what_a_row_says_of_its_windows_is_what_ran():
  """A window of each arm has at most its gamma, and some have as many; copies
  of a prompt are one prompt, and an answer is that of its own."""
  given = bench_test.settings(('lookup',))
  given.decode.gammas, given.bench.batch_size = (1, 3), 2
  e = settings.load(settings.settings(given))
  arms = plan_lib.arms(e)
  assert [x.gamma for x in arms] == [0, 1, 3]
  # Texts that repeat, so that lookup drafts.
  items = tuple(requests.Item((1, 2, 3, 4) * 3, i, str(i)) for i in range(2))
  s = e.settings
  plan = plan_lib.Plan(items, (), 6, 32, s.sampling, s.bench)
  runs = steady.measure(arms, plan, budget.UNLIMITED)
  for arm in arms:
    drafted = [x.info.proposed_BK[0] for x in runs[arm.name].outputs]
    longest = [int((x > 0).sum()) for x in drafted]
    assert max(longest) == arm.gamma, (arm.name, longest)
    assert runs[arm.name].prompts_G.tolist() == [1, 1]
    for (g, i), one in runs[arm.name].answers.items():
      assert one.item == steady.queues(plan)[g][i]
