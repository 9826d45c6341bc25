"""The benchmark: every method against plain decoding, in one process.

The steps, in an order that keeps the prediction honest: memory bandwidth,
calibration of the parts, a prediction from other prompts, the judged prompts.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.console

from specdec_jax import build, hosts, machine, metrics, printing, program
from specdec_jax.bench import (
  budget,
  identity,
  intervals,
  predict,
  tables,
  timing,
  verdict,
)
from specdec_jax.bench import ceiling as ceiling_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.costs import cost
from specdec_jax.io import files
from specdec_jax.models import work


class Row(NamedTuple):
  """A method on the judged prompts.

  name, drafter, gamma: as in plan.Arm.
  tok_s: tokens per second of decoding; None: too short to measure.
  improvement: the same over plain decoding's; see timing.improvements.
  whole: the same of whole requests, the prefill of both models included.
  counts: see metrics.
  time_to_first_token, compile_seconds: seconds, the first a median.
  alpha: teacher-forced on plain decoding's text; None as in predict.alphas.
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
  time_to_first_token: float
  compile_seconds: float
  alpha: predict.Alpha | None
  predicted: predict.Prediction | None
  explained: predict.Prediction | None
  audit: identity.Audit | None


class Category(NamedTuple):
  """As Row, on a category's prompts; all their intervals hold at once."""

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
  drafter: str
  gamma: int
  tok_s: float | None
  improvement: intervals.Interval
  audit: identity.Audit | None


class Batch(NamedTuple):
  """All methods at a batch size; all intervals of all sizes hold at once."""

  batch_size: int
  rows: list[BatchRow]
  best_gamma: dict[str, int]  # see _best_gammas
  failed: list[identity.Failure]
  prompts: int


class Document(NamedTuple):
  """All results of a benchmark; where a request failed, up to that point.

  costs: what adaptive chose by; given as adaptive.costs it chooses the same.
  predicted: by method. measured: seconds that the judged prompts took.
  """

  machine: dict[str, Any]
  ceiling: ceiling_lib.Ceiling
  setting: plan_lib.Setting
  calibration: calibration_lib.Calibration | None = None
  costs: Mapping[str, Any] = {}
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
  """Runs everything and prints it as it comes.

  Args:
    arms: arms[0] is plain decoding.
    plan: prompts and amounts, of which as many run as the clock allows.

  Raises:
    ValueError: the clock has too little time for one prompt.
  """
  ceiling, reads = _ceiling(arms, plan)
  doc = Document(machine.describe(), ceiling, plan_lib.setting(arms, plan))
  tables.start(doc, console)
  main = clock.share(0.5) if plan.batch_sizes else clock
  before = _before(arms, plan, doc, main, track, console)
  repeats = plan.bench.repeats
  arms, plan, doc = before.arms, before.plan, before.doc
  if doc.failed:
    return doc
  tables.plan(doc, clock, before.width, console)
  tables.predicted(doc, console)

  judged = plan_lib.groups(arms, plan, plan.test)
  end = main._replace(seconds=main.seconds - before.speed.closing())
  blocks = budget.blocks(len(judged), repeats, end, track)
  start, gb_s = program.elapsed(), []
  blocks = ceiling_lib.reading(blocks, reads, gb_s)
  runs = timing.measure(arms, judged, before.programs, blocks)
  judged = judged[: len(runs[arms[0].name].outputs)]
  ran = plan._replace(test=plan.test[: len(judged) * plan.bench.batch_size])
  doc = doc._replace(
    ceiling=ceiling.beside(arms[0].engine.target.dtype, gb_s),
    setting=plan_lib.setting(arms, ran),
    measured=program.elapsed() - start,
  )
  outputs = {name: r.outputs for name, r in runs.items()}
  if failed := identity.failures(judged, outputs):
    return doc._replace(failed=failed)
  doc = _judge(arms, before, doc, judged, runs, track)
  tables.rows(doc, console)
  for i, size in enumerate(plan.batch_sizes):
    part = clock.share(1 / (len(plan.batch_sizes) - i))
    found = _batch(arms, plan, size, part, track)
    doc = doc._replace(crossover=[*doc.crossover, found])
  if doc.crossover:
    tables.crossover(doc, console)
  return doc


class _Before(NamedTuple):
  """All that is known before the judged prompts run.

  arms: those of run, with costs.
  doc: with the calibration and the prediction, or with failed.
  others, seen: batches of the other prompts, and their outputs by arm.
  width: of the intervals to expect, as budget.width.
  """

  arms: Sequence[plan_lib.Arm]
  plan: plan_lib.Plan
  doc: Document
  programs: dict[str, Any]
  speed: budget.Speed
  others: list[plan_lib.Group]
  seen: dict[str, list]
  width: float | None


def _before(arms, plan, doc: Document, clock, track, console) -> _Before:
  """Plans, compiles, calibrates and predicts; none of the judged is run."""
  speed, programs = budget.first_step(arms, plan, track)
  plan = budget.first_fit(plan, speed, clock)
  arms, parts, costs = _calibrate(arms, plan, speed, clock, track)
  doc = doc._replace(calibration=parts, costs=costs)
  tables.calibration(doc, console)
  first = plan_lib.groups(arms, plan, plan.test)[0]
  programs |= timing.compile_arms(arms[1:], first.full, track)
  speed = speed._replace(
    step=parts.step,
    factors={x.name: predict.slowest(x, parts) for x in arms[1:]},
  )
  plan = budget.fit(plan, speed, clock.left() - speed.closing()) or plan
  others = plan_lib.groups(arms, plan, plan.calibration)
  # Plain decoding emits one token a window but where rows share batches.
  alone = plan.bench.batch_size == 1
  seen = {
    arm.name: [
      hosts.fetch(
        programs[arm.name][0](
          arm.engine.weights, plan_lib.capped(arm, group.full)
        )
      )
      for group in track(others, f'acceptance of {arm.name}')
    ]
    for arm in arms
    if arm.gamma or not alone
  }
  if failed := identity.failures(others, seen):
    doc = doc._replace(failed=failed)
    return _Before(arms, plan, doc, programs, speed, others, seen, None)
  gains = predict.each(arms, parts, seen)
  plan, width = budget.last_fit(plan, speed, gains, clock)
  batches = -(-len(plan.test) // plan.bench.batch_size)
  doc = doc._replace(
    setting=plan_lib.setting(arms, plan),
    predicted=predict.improvements(arms, parts, seen, batches),
  )
  return _Before(arms, plan, doc, programs, speed, others, seen, width)


def _calibrate(arms, plan: plan_lib.Plan, speed, clock, track):
  """(arms, Calibration, costs); adaptive chooses by what is measured here."""
  gammas = {arm.gamma for arm in arms}
  widths = len(gammas | {*arms[-1].engine.options.widths})
  windows, repeats = budget.calibration(speed, widths, clock)
  request = plan_lib.calibration_request(arms, plan, windows)
  parts = calibration_lib.calibrate(arms, request, repeats, track)
  costs = calibration_lib.costs(parts, max(gammas))
  engines = [arm.engine for arm in arms]
  made = {id(x): build.with_costs(x, costs) for x in engines if x.costs == {}}
  arms = [x._replace(engine=made.get(id(x.engine), x.engine)) for x in arms]
  return arms, parts, next((x.costs for x in engines if x.costs), costs)


def finish(doc: Document, config, folder: pathlib.Path | None, console) -> bool:
  """Prints the verdict and the document; true if sound.

  config: a ConfigDict, part of the document.
  folder: for results/bench.json; None saves nothing.
  """
  sentences = verdict.sentences(doc)
  out = {'config': config.to_dict(), **doc._asdict(), 'verdict': sentences}
  tables.close(sentences, out, console)
  if folder and hosts.is_first():
    (folder / 'results').mkdir(exist_ok=True)
    files.write(folder / 'results/bench.json', printing.compact(out))
  return verdict.sound(doc)


def _ceiling(arms, plan: plan_lib.Plan):
  """(machine.Ceiling of plain decoding, the reads to repeat)."""
  target = arms[0].engine.target
  models = [target, *(a.engine.draft for a in arms if a.engine.draft)]
  packed = any(m.lm_config and m.lm_config.packed for m in models)
  reads = {
    d: ceiling_lib.reads(d, packed=packed, small=plan.bench.small)
    for d in sorted({m.dtype for m in models})
  }
  gb_s = hosts.from_first(
    lambda: {d: ceiling_lib.bandwidth(x) for d, x in reads.items()}
  )
  devices = 1 if target.layout is None else target.layout.mesh.size
  # A step reads the weights, on average half the answer in the cache, and what
  # the encoder left.
  prompt = np.mean([len(item.tokens) for item in plan.test])
  source = np.mean([len(item.source) for item in plan.test])
  slots = float(prompt) + plan.max_new_tokens / 2
  rows = plan.bench.batch_size
  step = work.step_bytes(target.params)
  step += work.slot_bytes(target.model, rows) * slots
  step += work.source_bytes(target.model, target.params, rows) * source
  mine = gb_s[target.dtype]
  tok_s = float(rows * mine['sustained'] * 1e9 * devices / step)
  kept = ceiling_lib.kept(reads[target.dtype], mine)
  return ceiling_lib.Ceiling(gb_s, devices, tok_s), kept


# --- rows --------------------------------------------------------------------


def _judge(arms, before: _Before, doc, judged, runs, track) -> Document:
  """The document with the figures of the judged prompts."""
  outputs = {name: r.outputs for name, r in runs.items()}
  audits = identity.compare(arms, before.plan, judged, outputs, track)
  alphas = predict.alphas(arms, judged, outputs, track)
  texts = plan_lib.answers(judged, outputs[arms[0].name])
  return doc._replace(
    rows=_rows(arms, doc, runs, alphas, audits),
    categories=_categories(arms, before, judged, runs),
    repeated_8grams=metrics.repeated_ngrams([x.tokens for x in texts]),
  )


def _rows(arms, doc: Document, runs, alphas, audits) -> list[Row]:
  outputs = {name: r.outputs for name, r in runs.items()}
  explained = predict.improvements(arms, doc.calibration, outputs)
  improvement = timing.improvements(runs)
  whole = timing.improvements(runs, whole=True)
  out = []
  for arm in arms:
    mine = runs[arm.name]
    row = Row(
      name=arm.name,
      drafter=arm.drafter,
      gamma=arm.gamma,
      tok_s=timing.tok_s(mine),
      improvement=improvement[arm.name],
      whole=whole[arm.name],
      counts=metrics.summary(metrics.join(mine.outputs)),
      time_to_first_token=timing.first_token(mine),
      compile_seconds=mine.compile_seconds,
      alpha=alphas.get(arm.drafter),
      predicted=doc.predicted.get(arm.name),
      explained=explained.get(arm.name),
      audit=audits.get(arm.name),
    )
    out.append(row)
  return out


def _categories(arms, before: _Before, groups, runs) -> list[Category]:
  """At batch size 1 only: the time of a larger batch is of no one category."""
  if any(len(group.items) > 1 for group in groups):
    return []
  parts, whole = before.doc.calibration, before.doc.predicted
  assert parts is not None
  name = lambda group: group.items[0].category
  names = dict.fromkeys(filter(None, map(name, groups)))
  of = lambda groups: {
    x: [i for i, group in enumerate(groups) if name(group) == x] for x in names
  }
  every, known = of(groups), of(before.others)
  told = predict.by_category(arms, parts, before.seen, whole, known, every)
  # Those with an interval share the chance of an error.
  tested = sum(len(x) >= intervals.FEWEST for x in every.values())
  out, level = [], 1 - 0.05 / max(tested, 1)
  for category, chosen in every.items():
    improvement = timing.improvements(runs, chosen, level=level)
    for arm in arms[1:]:
      picked = [runs[arm.name].outputs[g] for g in chosen]
      row = Category(
        category=category,
        name=arm.name,
        drafter=arm.drafter,
        prompts=len(chosen),
        improvement=improvement[arm.name],
        predicted=told.get((category, arm.name)),
        explained=predict.improvement(arm, parts, picked, None),
        counts=metrics.summary(metrics.join(picked)),
      )
      out.append(row)
  return out


# --- crossover ---------------------------------------------------------------


def _batch(arms, plan: plan_lib.Plan, size: int, clock, track) -> Batch:
  """Every arm at one of the plan's batch sizes, audited too."""
  groups = plan_lib.groups(arms, plan, plan.test, size)
  what = f'compiling batch {size}'
  programs = timing.compile_arms(arms, groups[0].full, track, what)
  blocks = budget.blocks(len(groups), plan.bench.repeats, clock, track)
  runs = timing.measure(arms, groups, programs, blocks)
  groups = groups[: len(runs[arms[0].name].outputs)]
  outputs = {name: r.outputs for name, r in runs.items()}
  audits = identity.compare(arms, plan, groups, outputs, track)
  level = 1 - 0.05 / len(plan.batch_sizes)
  improvement = timing.improvements(runs, level=level)
  rows = [
    BatchRow(
      *(arm.name, arm.drafter, arm.gamma, timing.tok_s(runs[arm.name])),
      *(improvement[arm.name], audits.get(arm.name)),
    )
    for arm in arms
  ]
  failed = identity.failures(groups, outputs)
  prompts = min(len(groups) * size, len(plan.test))
  return Batch(size, rows, _best_gammas(rows), failed, prompts)


def _best_gammas(rows) -> dict[str, int]:
  """By drafter, the gamma with the largest measured win; 0 where none wins."""
  won: dict[str, dict[int, float]] = {x.drafter: {} for x in rows[1:]}
  for row in rows[1:]:
    if row.improvement.outcome == 'win':
      won[row.drafter][row.gamma] = row.improvement.value
  return {drafter: cost.best(x) for drafter, x in won.items()}
