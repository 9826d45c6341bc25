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
  """An arm on sets G of prompts.

  tokens_G, seconds_G: emitted, and gone, while the clock ran.
  ended: the requests that ended meanwhile.
  answers: theirs, by set and index in its queue.
  """

  tokens_G: list[int]
  seconds_G: list[float]
  ended: list[requests.Ended]
  answers: dict[tuple[int, int], records.Answer]


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
) -> list[Steady]:
  """By arm, of as many queues as the clock allows; the arms take turns."""
  s, ends = plan.sampling, arms[0].engine.target.tokenizer.eos_ids
  rows, asked = plan.bench.batch_size, (s.temperature, s.top_k, s.top_p, s.seed)
  sizes = dict(length=plan.buffer, sources=plan.sources, stops=len(ends))
  engines = {id(x.engine): x.engine for x in arms}
  pools = {x: pool.Pool.of(y, rows=rows, **sizes) for x, y in engines.items()}

  def run(arm: plan_lib.Arm, g: int, new: int):
    wanted = requests.Wanted(new, *asked, ends, arm.gamma)
    return timed(pools[id(arm.engine)], [(x, wanted) for x in found[g]])

  for arm in arms:  # compiles
    run(arm, 0, 1)
  out = [Steady([], [], [], {}) for _ in arms]
  for _, g in budget.blocks(len(found), 1, clock):
    turns = [(i + g) % len(arms) for i in range(len(arms))]
    for arm, mine in ((arms[i], out[i]) for i in turns):
      tokens, seconds, ended = run(arm, g, plan.max_new_tokens)
      mine.tokens_G.append(tokens)
      mine.seconds_G.append(seconds)
      for i, x in ended.items():
        text = x.tokens[x.start :], x.reason == 'non-finite'
        mine.answers[g, i] = records.Answer(found[g][i], *text)
        mine.ended.append(x)
  return out


def timed(held: pool.Pool, queue) -> tuple[int, float, dict]:
  """Tokens, seconds, and what ended meanwhile by index.

  queue: (prompt, what is asked of it), more than rows; the last are cancelled.
  """
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
  return tokens + sum(len(x) for x, *_ in news.values()), seconds, ended
