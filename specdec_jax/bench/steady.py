"""Speed of pools whose rows all have requests for as long as the clock runs.

It runs from when every row has one until nothing waits for a row: meanwhile as
many prompts are read as answers end.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

from specdec_jax import pool, requests
from specdec_jax.bench import budget, intervals, records
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import parts

_TURNS = 2  # answers of a row, at least, that end while the clock runs


class Steady(NamedTuple):
  """An arm on one queue.

  tokens, seconds: emitted, and gone, while the clock ran.
  ended: the requests that ended meanwhile, by index.
  """

  tokens: int
  seconds: float
  ended: dict[int, requests.Ended]


def queues(plan: plan_lib.Plan) -> list[list[requests.Item]]:
  """Disjoint sets of test prompts, each for all rows and _TURNS times more.

  What is missing are copies, which draw their own noise. There are as many sets
  as do without, and intervals.FEWEST, or one of each prompt, at least.
  """
  items, rows = plan.test, plan.bench.batch_size
  count = max(len(items) // (_TURNS * rows), min(intervals.FEWEST, len(items)))
  sets = [items[g::count] for g in range(count)]
  turns = lambda prompts: max(_TURNS, -(-prompts // rows))
  return [plan_lib.filled(x, rows + rows * turns(len(x))) for x in sets]


def measure(
  arms: Sequence[plan_lib.Arm], plan: plan_lib.Plan, found, clock: budget.Clock
) -> list[list[Steady]]:
  """Of as many queues as the clock allows, every arm, which take turns."""
  s, ends = plan.sampling, arms[0].engine.target.tokenizer.eos_ids
  rows, asked = plan.bench.batch_size, (s.temperature, s.top_k, s.top_p, s.seed)
  sizes = dict(length=plan.buffer, sources=plan.sources, stops=len(ends))
  engines = {id(x.engine): x.engine for x in arms}
  pools = {x: pool.Pool.of(y, rows=rows, **sizes) for x, y in engines.items()}

  def run(arm: plan_lib.Arm, queue, new: int) -> Steady:
    wanted = requests.Wanted(new, *asked, ends, arm.gamma)
    return timed(pools[id(arm.engine)], [(x, wanted) for x in queue])

  for arm in arms:  # compiles
    run(arm, found[0], 1)
  out = []
  for _, g in budget.blocks(len(found), 1, clock):
    turns = [(i + g) % len(arms) for i in range(len(arms))]
    ran = {i: run(arms[i], found[g], plan.max_new_tokens) for i in turns}
    out.append([ran[i] for i in range(len(arms))])
  return out


def timed(held: pool.Pool, queue) -> Steady:
  """Runs (prompt, what is asked of it), of which there are more than rows."""
  waiting = collections.deque((i, *pair) for i, pair in enumerate(queue))
  held.refill(waiting)
  held.news()  # returns when the prompts are read

  def full():
    ended = {}
    while waiting:
      done = held.advance()
      ended |= zip(done, held.take(done), strict=True)
      held.refill(waiting)
    return ended, held.news()

  seconds, (ended, news) = parts.timed(full)
  held.cancel(range(len(queue)))
  tokens = sum(len(x.tokens) - x.start for x in ended.values())
  return Steady(tokens + sum(len(x) for x, *_ in news.values()), seconds, ended)


def answers(
  arms: Sequence[plan_lib.Arm], found, runs: Sequence[Sequence[Steady]]
) -> dict[str, dict[tuple[int, int], records.Answer]]:
  """By arm, its answers to the requests that ended, by queue and index."""
  of = lambda item, x: records.Answer(
    item, x.tokens[x.start :], x.reason == 'non-finite'
  )
  return {
    arm.name: {
      (g, i): of(found[g][i], x)
      for g, each in enumerate(runs)
      for i, x in each[at].ended.items()
    }
    for at, arm in enumerate(arms)
  }
