"""The benchmark: every method against plain decoding, in one process.

The steps, in an order that keeps the prediction honest: memory bandwidth,
calibration of the parts of a window, a prediction from other prompts, then the
judged prompts. metrics, cost, predict and audit define the numbers.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.console

from specdec_jax import runtime
from specdec_jax.bench import (
  budget,
  cost,
  identity,
  intervals,
  machine,
  metrics,
  predict,
  tables,
  timing,
  verdict,
)
from specdec_jax.bench import calibration as calibration_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files


class Ceiling(NamedTuple):
  """Memory bandwidth, and the speed that it allows.

  gb_s: by dtype, machine.ceiling: gigabytes a second of one device.
  devices: devices that read at once.
  tok_s: upper bound on plain decoding, from the bytes that it reads at the
    sustained bandwidth.
  """

  gb_s: dict[str, dict[str, float]]
  devices: int
  tok_s: float


class Row(NamedTuple):
  """A method on the judged prompts.

  name, drafter, gamma: as in plan.Arm.
  tok_s: tokens per second of decoding; None: too short to measure.
  improvement: the same over plain decoding's, with its 95 % interval.
  whole: the same of whole requests, the prefill of both models included.
  counts: see metrics.
  cost_coefficient, verify: c (None for plain decoding) and v(gamma + 1).
  time_to_first_token, compile_seconds: seconds, the first a median.
  alpha: teacher-forced on plain decoding's text.
  predicted: from other prompts, before these ran.
  explained: the cost model at the acceptance measured here.
  """

  name: str
  drafter: str
  gamma: int
  tok_s: float | None
  improvement: intervals.Interval
  whole: intervals.Interval
  counts: metrics.Summary
  cost_coefficient: float | None
  verify: float
  time_to_first_token: float
  compile_seconds: float
  alpha: predict.Alpha | None
  predicted: predict.Prediction | None
  explained: predict.Prediction | None
  audit: identity.Audit | None


class Category(NamedTuple):
  """A method on the judged prompts of one category; fields as in Row."""

  category: str
  name: str
  drafter: str
  prompts: int
  improvement: intervals.Interval
  predicted: predict.Prediction | None
  explained: predict.Prediction
  counts: metrics.Summary


class BatchRow(NamedTuple):
  """A method at one batch size; fields as in Row."""

  name: str
  tok_s: float | None
  improvement: intervals.Interval
  audit: identity.Audit | None


class Batch(NamedTuple):
  """All methods at one batch size; best_gamma: see _best_gammas."""

  batch_size: int
  rows: list[BatchRow]
  best_gamma: dict[str, int]
  failed: list[identity.Failure]


class Document(NamedTuple):
  """All results of a benchmark; where a request failed, up to that point.

  predicted: by method. measured: seconds that the judged prompts took.
  """

  machine: dict[str, Any]
  ceiling: Ceiling
  setting: plan_lib.Setting
  calibration: calibration_lib.Calibration | None = None
  predicted: dict[str, predict.Prediction] = {}
  measured: float = 0.0
  rows: Sequence[Row] = ()
  categories: Sequence[Category] = ()
  repeated_8grams: float | None = None
  crossover: Sequence[Batch] = ()
  failed: Sequence[identity.Failure] = ()


def run(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  *,
  track: plan_lib.Track,
  console: rich.console.Console,
  clock: budget.Clock = budget.UNLIMITED,
) -> Document:
  """Runs everything and prints it as it comes; arms[0] is plain decoding.

  Raises:
    ValueError: the clock has too little time for one prompt.
  """
  doc = Document(
    machine.describe(), _ceiling(arms, plan), plan_lib.setting(arms, plan)
  )
  tables.start(doc, console)
  main = clock.share(0.5) if plan.batch_sizes else clock
  plan, speed, programs = _first_step(arms, plan, main, track, console)
  programs |= timing.compile_arms(
    arms[1:], plan_lib.groups(arms, plan, plan.judged)[0].full, track
  )
  parts = _calibrate(arms, plan, speed, main, track)
  doc = doc._replace(calibration=parts)
  tables.calibration(doc, console)
  factors = {x.name: _worst(x, parts) for x in arms[1:]}
  speed = speed._replace(step=parts.step, factors=factors)
  plan = _fit(plan, speed, main.left() - speed.closing())

  # The prediction: calibration, and acceptance on the other prompts, before
  # any of the judged ones is run.
  others = plan_lib.groups(arms, plan, plan.others)
  seen = _acceptance(arms, others, programs, track)
  if failed := identity.failures(others, seen):
    return doc._replace(failed=failed)
  plan, width = _last_fit(arms, plan, speed, seen, parts, main)
  judged = plan_lib.groups(arms, plan, plan.judged)
  doc = doc._replace(
    setting=plan_lib.setting(arms, plan),
    predicted=predict.improvements(arms, parts, seen, len(judged)),
  )
  tables.plan(doc, clock, width, console)
  tables.predicted(doc, console)

  blocks = budget.blocks(
    len(judged),
    plan.bench.repeats,
    main._replace(seconds=main.seconds - speed.closing()),
    track,
  )
  start = runtime.elapsed()
  runs = timing.measure(arms, judged, programs, blocks)
  doc = doc._replace(measured=runtime.elapsed() - start)
  judged = judged[: len(runs[arms[0].name].outputs)]
  outputs = {name: r.outputs for name, r in runs.items()}
  if failed := identity.failures(judged, outputs):
    return doc._replace(failed=failed)
  doc = _judge(arms, plan, doc, judged, runs, (others, seen), track)
  tables.rows(doc, console)
  for i, size in enumerate(plan.batch_sizes):
    part = clock.share(1 / (len(plan.batch_sizes) - i))
    found = _batch(arms, plan, size, part, track)
    doc = doc._replace(crossover=[*doc.crossover, found])
  if doc.crossover:
    tables.crossover(doc, console)
  return doc


def finish(
  doc: Document, config: Any, folder: pathlib.Path | None, console
) -> bool:
  """Prints the verdict and the document; true if sound.

  config: a ConfigDict, part of the document.
  folder: for results/bench.json; None saves nothing.
  """
  sentences = verdict.sentences(doc)
  out = {'config': config.to_dict(), **doc._asdict(), 'verdict': sentences}
  tables.close(sentences, out, console)
  if folder:
    (folder / 'results').mkdir(exist_ok=True)
    files.write(folder / 'results/bench.json', runtime.compact(out))
  return verdict.sound(doc)


def _ceiling(arms, plan: plan_lib.Plan) -> Ceiling:
  target = arms[0].engine.target
  models = [target, *(a.engine.draft for a in arms if a.engine.draft)]
  dtypes = sorted({m.dtype for m in models})
  gb_s = {d: machine.ceiling(d, small=plan.bench.small) for d in dtypes}
  devices = 1 if target.layout is None else target.layout.mesh.size
  # A step reads the weights and, on average, half the answer in the cache.
  prompt = np.mean([len(item.tokens) for item in plan.judged])
  slots = float(prompt) + plan.max_new_tokens / 2
  rows = plan.bench.batch_size
  step = metrics.step_bytes(target.params)
  step += metrics.slot_bytes(target.model, rows) * slots
  sustained = gb_s[target.dtype]['sustained'] * 1e9 * devices
  return Ceiling(gb_s, devices, rows * sustained / step)


# --- what fits ---------------------------------------------------------------


def _first_step(arms, plan: plan_lib.Plan, clock, track, console):
  """Compiles plain decoding and times it; (plan, budget.Speed, programs)."""
  (first, *_) = plan_lib.groups(arms, plan, plan.judged[:1])
  programs = timing.compile_arms(arms[:1], first.full, track)
  program, seconds = programs[arms[0].name]
  weights, host = arms[0].engine.weights, first.host
  few_B = np.minimum(host.lengths_B + 4, host.limit_B)
  timing.timed(program, weights, first.none)
  prefill, _ = timing.timed(program, weights, first.none)
  total, out = timing.timed(
    program, weights, first.full._replace(limit_B=few_B)
  )
  step = max(total - prefill, 1e-6) / max(int(out.info.calls), 1)
  speed = budget.Speed(
    step, prefill, seconds, {arm.name: 1.5 for arm in arms[1:]}
  )
  left = clock.left() - speed.compiling() - speed.closing()
  return _fit(plan, speed, left * (1 - budget.CALIBRATION)), speed, programs


def _fit(plan, speed: budget.Speed, seconds: float) -> plan_lib.Plan:
  found = budget.fit(plan, speed, seconds)
  if found is None:
    raise ValueError(
      'minutes: too few for one prompt in every method, which takes some '
      f'{budget.needed(plan, speed):.1f} with loading and compiling: give '
      'more, or fewer decode.methods and decode.gammas'
    )
  return found


def _calibrate(arms, plan: plan_lib.Plan, speed: budget.Speed, clock, track):
  widths = len({arm.gamma for arm in arms})
  windows, repeats = budget.calibration(speed, widths, clock)
  request = plan_lib.calibration_request(arms, plan, windows)
  steps = int(np.max(request.limit_B - request.lengths_B))
  found = calibration_lib.parts(arms, request, steps, track)
  return calibration_lib.calibrate(arms, found, repeats, track)


def _worst(arm: plan_lib.Arm, parts: calibration_lib.Calibration) -> float:
  """Time of a token over plain decoding's, if a window emits 1.2 of them."""
  return predict.window(arm, parts, arm.gamma, 1.0) / 1.2


def _acceptance(arms, groups, programs, track) -> dict[str, list]:
  """Outputs of every arm; of plain decoding only where rows share batches."""
  alone = all(len(group.items) == 1 for group in groups)
  return {
    arm.name: [
      jax.device_get(programs[arm.name][0](arm.engine.weights, group.full))
      for group in track(groups, f'acceptance of {arm.name}')
    ]
    for arm in arms
    if arm.gamma or not alone
  }


def _last_fit(arms, plan, speed: budget.Speed, seen, parts, clock):
  """(the plan at the speed that was seen, the width of its intervals)."""
  each = [
    predict.improvements(arms, parts, {k: [x[i]] for k, x in seen.items()})
    for i in range(min((len(x) for x in seen.values()), default=0))
  ]
  if not each:
    return plan, None
  gains = {k: [x[k].improvement for x in each] for k in each[0]}
  factors = {k: 1 / float(np.mean(x)) for k, x in gains.items()}
  speed = speed._replace(factors=factors)
  left = clock.left() - speed.closing()
  fitted = budget.fit(plan._replace(others=()), speed, left) or plan
  plan = fitted._replace(others=plan.others)
  widths = [budget.width(np.log(x), len(plan.judged)) for x in gains.values()]
  known = [x for x in widths if x is not None]
  return plan, max(known, default=None)


# --- rows --------------------------------------------------------------------


def _judge(arms, plan, doc: Document, judged, runs, before, track) -> Document:
  """The document with the figures of the judged prompts.

  before: batches and outputs of the other prompts.
  """
  others, seen = before
  outputs = {name: r.outputs for name, r in runs.items()}
  audits = identity.compare(arms, plan, judged, outputs, track)
  alphas = predict.alphas(arms, judged, outputs, track)
  texts = plan_lib.answers(judged, outputs[arms[0].name])
  return doc._replace(
    rows=_rows(arms, doc, runs, alphas, audits),
    categories=_categories(arms, doc.calibration, judged, runs, (others, seen)),
    repeated_8grams=metrics.repeated_ngrams([x.tokens for x in texts]),
  )


def _rows(arms, doc: Document, runs, alphas, audits) -> list[Row]:
  outputs = {name: r.outputs for name, r in runs.items()}
  explained = predict.improvements(arms, doc.calibration, outputs)
  plain, parts = runs[arms[0].name], doc.calibration
  assert parts is not None
  out = []
  for arm in arms:
    mine = runs[arm.name]
    row = Row(
      name=arm.name,
      drafter=arm.drafter,
      gamma=arm.gamma,
      tok_s=timing.tok_s(mine),
      improvement=timing.improvement(mine, plain),
      whole=timing.improvement(mine, plain, whole=True),
      counts=metrics.summary(metrics.join(mine.outputs)),
      cost_coefficient=parts.c.get(arm.name),
      verify=parts.verify[arm.gamma + 1],
      time_to_first_token=timing.first_token(mine),
      compile_seconds=mine.compile_seconds,
      alpha=alphas.get(arm.drafter),
      predicted=doc.predicted.get(arm.name),
      explained=explained.get(arm.name),
      audit=audits.get(arm.name),
    )
    out.append(row)
  return out


def _categories(arms, parts, groups, runs, before) -> list[Category]:
  """At batch size 1 only: the time of a larger batch is of no one category."""
  if any(len(group.items) > 1 for group in groups):
    return []
  others, seen = before
  names = dict.fromkeys(group.items[0].category for group in groups)
  of = lambda groups, name: [
    g for g, group in enumerate(groups) if group.items[0].category == name
  ]
  plain = runs[arms[0].name]
  out = []
  for category in filter(None, names):
    chosen, known = of(groups, category), of(others, category)
    for arm in arms[1:]:
      mine = runs[arm.name]
      picked = [mine.outputs[g] for g in chosen]
      before = [seen[arm.name][g] for g in known]
      row = Category(
        category=category,
        name=arm.name,
        drafter=arm.drafter,
        prompts=len(chosen),
        improvement=timing.improvement(mine, plain, chosen),
        predicted=predict.improvement(arm, parts, before, None, len(chosen))
        if before
        else None,
        explained=predict.improvement(arm, parts, picked, None),
        counts=metrics.summary(metrics.join(picked)),
      )
      out.append(row)
  return out


# --- crossover ---------------------------------------------------------------


def _batch(arms, plan: plan_lib.Plan, size: int, clock, track) -> Batch:
  """Every arm at one batch size, prompts repeated to fill it; audited too."""
  groups = plan_lib.groups(arms, plan, plan.judged, size)
  programs = timing.compile_arms(
    arms, groups[0].full, track, f'compiling batch {size}'
  )
  blocks = budget.blocks(len(groups), plan.bench.repeats, clock, track)
  runs = timing.measure(arms, groups, programs, blocks)
  groups = groups[: len(runs[arms[0].name].outputs)]
  outputs = {name: r.outputs for name, r in runs.items()}
  audits = identity.compare(arms, plan, groups, outputs, track)
  rows = [
    BatchRow(
      arm.name,
      timing.tok_s(runs[arm.name]),
      timing.improvement(runs[arm.name], runs[arms[0].name]),
      audits.get(arm.name),
    )
    for arm in arms
  ]
  failed = identity.failures(groups, outputs)
  return Batch(size, rows, _best_gammas(arms, rows), failed)


def _best_gammas(arms, rows) -> dict[str, int]:
  """By drafter, the gamma with the largest measured win; 0 where none wins."""
  best: dict[str, dict[int, float]] = {}
  for arm, row in zip(arms[1:], rows[1:], strict=True):
    won = best.setdefault(arm.drafter, {})
    if row.improvement.outcome == 'win':
      won[arm.gamma] = row.improvement.value
  return {drafter: cost.best(won) for drafter, won in best.items()}
