"""Measures pools while all rows have requests: the clock runs from when every
row has one until nothing waits for a row, and meanwhile as many prompts are
read as answers end."""

import collections
from collections.abc import Sequence

import numpy as np

from specdec_jax import pool, printing, requests
from specdec_jax.bench import budget, intervals, records, timing
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import parts

_TURNS = 2  # answers of a row, at least, that end while the clock runs


def queues(plan: plan_lib.Plan) -> list[list[requests.Item]]:
  """Deals test prompts to sets, each for all rows and _TURNS times more.

  Copies, which draw their own noise, fill them up. There are as many sets as
  need none, and at least intervals.FEWEST or, with few prompts, one for each.
  """
  items, rows = plan.test, plan.bench.batch_size
  count = max(len(items) // (_TURNS * rows), min(intervals.FEWEST, len(items)))
  sets = [items[g::count] for g in range(count)]
  turns = lambda prompts: max(_TURNS, -(-prompts // rows))
  return [plan_lib.filled(x, rows + rows * turns(len(x))) for x in sets]


def measure(
  arms: Sequence[plan_lib.Arm], plan: plan_lib.Plan, clock: budget.Clock
) -> dict[str, timing.Runs]:
  """Runs every arm, in turns, on as many queues as the clock allows; Runs has
  answers and outputs for the requests that ended."""
  rows, ends = plan.bench.batch_size, arms[0].engine.target.tokenizer.eos_ids
  sizes = dict(length=plan.buffer, sources=plan.sources, stops=len(ends))
  engines = {id(x.engine): x.engine for x in arms}
  pools = {x: pool.Pool.of(y, rows=rows, **sizes) for x, y in engines.items()}
  found = queues(plan)

  def run(arm: plan_lib.Arm, g: int, new: int):
    asked = dict(sampling=plan.sampling, stop_ids=ends, drafts=arm.gamma)
    queue = [x._replace(new=new, **asked) for x in found[g]]
    return timed(pools[id(arm.engine)], queue)

  for arm in printing.track(arms, f'compiling for batches of {rows}'):
    run(arm, 0, 1)
  ran = {arm.name: [] for arm in arms}
  for _, g in budget.blocks(len(found), 1, clock):
    for i in range(len(arms)):
      arm = arms[(i + g) % len(arms)]
      ran[arm.name].append(run(arm, g, plan.max_new_tokens))
  runs = {}
  for name, each in ran.items():
    tokens_G, seconds_G, ended_G = zip(*each, strict=True)
    prompts_G = [len({x.id for x in queue}) for queue in found[: len(each)]]
    answers = {
      (g, i): records.Answer(
        found[g][i], x.tokens[x.start :], x.reason == 'non-finite'
      )
      for g, ended in enumerate(ended_G)
      for i, x in ended.items()
    }
    outputs = [x for ended in ended_G for x in ended.values()]
    none_G, once_G = np.full(len(each), ''), np.ones(len(each), int)
    counts = np.array(tokens_G), np.array(prompts_G), none_G, once_G
    seconds = np.array(seconds_G), np.zeros(len(each))
    runs[name] = timing.Runs(answers, outputs, *counts, *seconds)
  return runs


def timed(held: pool.Pool, queue) -> tuple[int, float, dict]:
  """Returns tokens, seconds, and what ended meanwhile by index; queue has more
  items than rows, and the last are cancelled."""
  waiting = collections.deque(enumerate(queue))
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
