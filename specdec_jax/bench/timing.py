"""Turns prompts into timed runs: requests, repeats, streams.

One executable call per generate. The limits of a request are traced, so the
same executable gives the time of the prefill alone (no room for a token), the
time to the first token (room for one) and of the whole. Arms take turns inside
every repeat.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import decode, requests, types
from specdec_jax.bench import calibrate, metrics

# track(items, description): items, with a progress bar.
Track = Callable[[Iterable, str], Iterable]


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
  """A method: an engine (build.Engine) under a name.

  model, draft: the pure functions of the target and of the draft model, None
  for drafters without one.
  """

  name: str
  drafter: str
  gamma: int
  engine: Any
  model: types.Model
  draft: types.Model | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
  """What to run. judged and others are disjoint; others predict judged.

  batch_sizes: of the crossover, run after the main table; may be empty.
  small: arrays of a smoke test for the ceiling.
  """

  judged: tuple[requests.Item, ...]
  others: tuple[requests.Item, ...]
  max_new_tokens: int
  sampling: Any
  batch_size: int = 1
  batch_sizes: tuple[int, ...] = ()
  repeats: int = 3
  windows: int = 64
  stream_prompts: int = 2
  small: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """Prompts that decode together, and their requests on the device."""

  items: tuple[requests.Item, ...]
  host: decode.Request
  full: decode.Request
  first: decode.Request
  none: decode.Request


@dataclasses.dataclass
class Runs:
  """What an arm did: an Output per group; times[repeat][group], in seconds."""

  outputs: list[decode.Output]
  total: list[list[float]]
  prefill: list[list[float]]
  first: list[list[float]]
  compile_seconds: float


def grouper(arms, plan: Plan, rows: int | None = None):
  """items -> groups; all of a run share one buffer length: one compilation."""
  gamma = max(arm.gamma for arm in arms)
  longest = max(len(item.tokens) for item in plan.judged + plan.others)
  length = requests.bucket(longest + plan.max_new_tokens + gamma)
  rows = rows or plan.batch_size

  def make(items: Sequence[requests.Item]) -> list[Group]:
    # Rows of one category together, so that time can be told apart by it.
    by: dict[str, list[requests.Item]] = {}
    for item in items:
      by.setdefault(item.category, []).append(item)
    parts = [
      x[i : i + rows] for x in by.values() for i in range(0, len(x), rows)
    ]
    return [
      _group(arms[0], plan, part, rows=rows, length=length, gamma=gamma)
      for part in parts
    ]

  return make


def _group(arm: Arm, plan: Plan, items, *, new: int | None = None, **shape):
  target = arm.engine.target
  s = plan.sampling
  host = requests.make(
    items,
    ids=target.ids,
    context=target.context,
    max_new_tokens=new or plan.max_new_tokens,
    temperature=s.temperature,
    top_k=s.top_k,
    top_p=s.top_p,
    seed=s.seed,
    stop_ids=target.tokenizer.eos_ids,
    **shape,
  )
  place = lambda request: (
    jax.device_put(request)
    if target.layout is None
    else requests.place(request, target.layout)
  )
  one = np.minimum(host.lengths_B + 1, host.limit_B)
  return Group(
    tuple(items),
    host,
    place(host),
    place(host._replace(limit_B=one)),
    place(host._replace(limit_B=host.lengths_B)),
  )


def setting(arms, plan: Plan) -> dict[str, Any]:
  """What runs, for the record."""
  target = arms[0].engine.target
  drafts = {a.drafter: a.engine.draft for a in arms if a.engine.draft}
  host = grouper(arms, plan)(plan.judged[:1])[0].host
  return {
    'target': target.label,
    'draft': next((d.label for d in drafts.values()), None),
    'dtype': target.dtype,
    'rule': arms[0].engine.rule.name,
    'lossless': arms[0].engine.rule.lossless,
    'sampling': dataclasses.asdict(plan.sampling),
    'batch_size': plan.batch_size,
    'max_new_tokens': plan.max_new_tokens,
    'buffer': int(host.tokens_BL.shape[1]),
    'chunk': arms[0].engine.options.chunk,
    'narrow': arms[0].engine.options.narrow,
    'repeats': plan.repeats,
    'judged_prompts': len(plan.judged),
    'other_prompts': len(plan.others),
  }


def calibration_request(arms, plan: Plan) -> decode.Request:
  """The shortest prompt in every row, with room for the windows to time."""
  items = plan.judged + plan.others
  item = min(plan.others or items, key=lambda item: len(item.tokens))
  gamma = max(arm.gamma for arm in arms)
  longest = max(len(item.tokens) for item in items)
  length = requests.bucket(longest + plan.max_new_tokens + gamma)
  context = arms[0].engine.target.context
  room = min(length - gamma, context) - len(item.tokens)
  return _group(
    arms[0],
    plan,
    [item] * plan.batch_size,
    new=min(plan.windows, room),
    rows=plan.batch_size,
    length=length,
    gamma=gamma,
  ).full


def measure(arms, groups, programs, repeats: int, track: Track):
  """Arms take turns, group by group; the first arm changes with the repeat."""
  runs = {a.name: Runs([], [], [], [], programs[a.name][1]) for a in arms}
  for arm in arms:
    # The first call of an executable is slower.
    program = programs[arm.name][0]
    jax.block_until_ready(program(arm.engine.weights, groups[0].first))
  jobs = [(r, g) for r in range(repeats) for g in range(len(groups))]
  for repeat, g in track(jobs, 'timing'):
    turn = (repeat + g) % len(arms)
    for arm in (*arms[turn:], *arms[:turn]):
      program, weights = programs[arm.name][0], arm.engine.weights
      took = lambda request, p=program, w=weights: calibrate.seconds(
        lambda: p(w, request)
      )
      mine, group = runs[arm.name], groups[g]
      if g == 0:
        for kept in (mine.total, mine.prefill, mine.first):
          kept.append([])
      mine.prefill[repeat].append(took(group.none))
      mine.first[repeat].append(took(group.first))
      start = time.perf_counter()
      output = jax.block_until_ready(program(weights, group.full))
      mine.total[repeat].append(time.perf_counter() - start)
      if repeat == 0:
        mine.outputs.append(jax.device_get(output))
  return runs


def stream(arms, groups, track: Track) -> dict[str, list[list[float]]]:
  """When each token came out, window by window, driven from the host."""
  stamps: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
  for arm in track(arms, 'streaming') if groups else ():
    programs, weights = arm.engine.programs, arm.engine.weights
    # Compiles; its own times are thrown away.
    for group in (groups[0], *groups):
      request = group.full
      state, info = jax.block_until_ready(programs.start(weights, request))
      before = np.asarray(state.lengths_B)
      rows: list[list[float]] = [[] for _ in group.items]
      while np.asarray(state.live_B).any():
        state, info = programs.step(weights, request, state, info)
        after, now = np.asarray(state.lengths_B), time.perf_counter()
        for row, n in zip(rows, after - before, strict=False):
          row.extend([now] * int(n))
        before = after
      stamps[arm.name] += rows
    stamps[arm.name] = stamps[arm.name][len(groups[0].items) :]
  return stamps


def texts(groups, outputs) -> list[list[int]]:
  """Emitted tokens of every prompt, in the groups' order."""
  return [
    out.tokens_BL[row, group.host.lengths_B[row] : out.lengths_B[row]].tolist()
    for group, out in zip(groups, outputs, strict=True)
    for row in range(len(group.items))
  ]


def speeds(runs: Runs, pick: Sequence[int] | None = None) -> list[float | None]:
  """tok/s of every repeat, over the chosen groups; None: too short to measure.

  That is where decoding takes no longer than the prefill varies.
  """
  chosen = list(range(len(runs.outputs)) if pick is None else pick)
  emitted = metrics.summary(join([runs.outputs[g] for g in chosen]))
  # The fastest prefill of each group: a slow one must not shorten a decode.
  prefill_RG = np.asarray(runs.prefill)[:, chosen]
  prefill = float(np.min(prefill_RG, 0).sum())
  noise = float(np.median(prefill_RG, 0).sum()) - prefill
  return [
    metrics.tokens_per_second(
      emitted['emitted_tokens'], sum(total[g] for g in chosen), prefill, noise
    )
    for total in runs.total
  ]


def join(outputs: Sequence[decode.Output]) -> types.Info:
  return metrics.concat([out.info for out in outputs])
