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
  cost,
  identity,
  machine,
  metrics,
  predict,
  tables,
  timing,
  verdict,
)
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files


class Ceiling(NamedTuple):
  """Memory bandwidth, and the speed that it allows.

  gb_s: by dtype, machine.ceiling: gigabytes a second of one device.
  devices: devices that read at once.
  tok_s: upper bound on plain decoding, from the bytes that it reads.
  """

  gb_s: dict[str, dict[str, float]]
  devices: int
  tok_s: float


class Memory(NamedTuple):
  """Bytes held: weights of the target and of the draft, and their caches."""

  target: int
  draft: int
  target_cache: int
  draft_cache: int


class Row(NamedTuple):
  """A method on the judged prompts.

  name, drafter, gamma: as in plan.Arm.
  tok_s, improvement: tokens per second of decoding; the same over plain's.
  counts, inter_token: see metrics.
  cost_coefficient, verify: c (None for plain decoding) and v(gamma + 1).
  time_to_first_token, compile_seconds: seconds, the first a median.
  alpha: teacher-forced on plain decoding's text.
  predicted: from other prompts, before these ran.
  explained: the cost model at the acceptance measured here.
  """

  name: str
  drafter: str
  gamma: int
  tok_s: metrics.Spread
  improvement: metrics.Spread
  counts: metrics.Summary
  cost_coefficient: float | None
  verify: float
  time_to_first_token: float
  inter_token: metrics.Gaps
  memory: Memory
  compile_seconds: float
  alpha: predict.Alpha | None
  predicted: predict.Prediction | None
  explained: predict.Prediction | None
  audit: identity.Audit | None


class Category(NamedTuple):
  """A method on the judged prompts of one category; fields as in Row."""

  category: str
  name: str
  prompts: int
  improvement: metrics.Spread
  explained: predict.Prediction
  counts: metrics.Summary


class BatchRow(NamedTuple):
  """A method at one batch size; fields as in Row."""

  name: str
  tok_s: metrics.Spread
  improvement: metrics.Spread
  audit: identity.Audit | None


class Batch(NamedTuple):
  """All methods at one batch size; best_gamma: see _best_gammas."""

  batch_size: int
  rows: list[BatchRow]
  best_gamma: dict[str, int]
  failed: list[identity.Failure]


class Document(NamedTuple):
  """All results of a benchmark; where a request failed, up to that point.

  predicted: by method.
  """

  machine: dict[str, Any]
  ceiling: Ceiling
  setting: plan_lib.Setting
  calibration: timing.Calibration | None = None
  predicted: dict[str, predict.Prediction] = {}
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
) -> Document:
  """Runs everything and prints it as it comes; arms[0] is plain decoding."""
  doc = Document(
    machine.describe(), _ceiling(arms, plan), plan_lib.setting(arms, plan)
  )
  tables.start(doc, console)
  judged = plan_lib.groups(arms, plan, plan.judged)
  others = plan_lib.groups(arms, plan, plan.others)
  programs = timing.compile_arms(arms, judged[0].full, track)
  calibration = timing.calibrate(
    arms,
    plan_lib.calibration_request(arms, plan),
    plain=programs[arms[0].name][0],
    repeats=max(3, plan.bench.repeats),
    track=track,
  )
  doc = doc._replace(calibration=calibration)
  tables.calibration(doc, console)

  # The prediction: calibration, and acceptance on the other prompts, before
  # any of the judged ones is run.
  seen = {
    arm.name: [
      jax.device_get(programs[arm.name][0](arm.engine.weights, group.full))
      for group in track(others, f'acceptance of {arm.name}')
    ]
    for arm in arms
  }
  if failed := identity.failures(others, seen):
    return doc._replace(failed=failed)
  doc = doc._replace(predicted=predict.improvements(arms, calibration, seen))
  tables.predicted(doc.predicted, console)

  runs = timing.measure(arms, judged, programs, plan.bench.repeats, track)
  outputs = {name: r.outputs for name, r in runs.items()}
  if failed := identity.failures(judged, outputs):
    return doc._replace(failed=failed)
  gaps = timing.stream(arms, judged[: plan.bench.stream_prompts], track)
  every = {name: outputs[name] + seen[name] for name in outputs}
  audits = identity.compare(arms, plan, judged + others, every, track)
  alphas = predict.alphas(arms, judged, outputs, track)
  rows = _rows(arms, doc, judged, runs, gaps, alphas, audits)
  texts = plan_lib.answers(judged, outputs[arms[0].name])
  doc = doc._replace(
    rows=rows,
    categories=_categories(arms, judged, runs, calibration),
    repeated_8grams=metrics.repeated_ngrams([x.tokens for x in texts]),
  )
  tables.rows(doc, console)
  if plan.batch_sizes:
    found = [_batch(arms, plan, size, track) for size in plan.batch_sizes]
    doc = doc._replace(crossover=found)
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
  best = gb_s[target.dtype]['best'] * 1e9 * devices
  return Ceiling(gb_s, devices, rows * best / step)


# --- rows --------------------------------------------------------------------


def _rows(arms, doc: Document, groups, runs, gaps, alphas, audits) -> list[Row]:
  outputs = {name: r.outputs for name, r in runs.items()}
  explained = predict.improvements(arms, doc.calibration, outputs)
  plain, parts = runs[arms[0].name], doc.calibration
  assert parts is not None
  out = []
  for arm in arms:
    mine = runs[arm.name]
    info = metrics.join(mine.outputs)
    row = Row(
      name=arm.name,
      drafter=arm.drafter,
      gamma=arm.gamma,
      tok_s=metrics.spread(timing.speeds(mine)),
      improvement=timing.improvement(mine, plain),
      counts=metrics.summary(info),
      cost_coefficient=parts.c.get(arm.name),
      verify=parts.verify[arm.gamma + 1],
      time_to_first_token=float(np.median(mine.first_RG)),
      inter_token=metrics.inter_token(gaps.get(arm.name, [])),
      memory=_memory(arm, groups[0].full),
      compile_seconds=mine.compile_seconds,
      alpha=alphas.get(arm.drafter),
      predicted=doc.predicted.get(arm.name),
      explained=explained.get(arm.name),
      audit=audits.get(arm.name),
    )
    out.append(row)
  return out


def _memory(arm: plan_lib.Arm, request) -> Memory:
  engine, params = arm.engine, arm.engine.target.params
  state, _ = jax.eval_shape(engine.programs.start, engine.weights, request)
  # A head reduced to some ids is held beside the full one.
  whole = engine.draft.params if engine.draft else ()
  return Memory(
    metrics.tree_bytes(params),
    metrics.own_bytes((engine.weights.draft, whole), params),
    metrics.tree_bytes(state.cache),
    metrics.tree_bytes(state.drafter),
  )


def _categories(arms, groups, runs, calibration) -> list[Category]:
  by: dict[str, list[int]] = {}
  for g, group in enumerate(groups):
    by.setdefault(group.items[0].category, []).append(g)
  by.pop('', None)
  plain = runs[arms[0].name]
  out = []
  for category, chosen in by.items():
    joined = lambda runs, chosen=chosen: metrics.join(
      [runs.outputs[g] for g in chosen]
    )
    base = metrics.tokens_per_window(joined(plain))
    for arm in arms[1:]:
      mine = runs[arm.name]
      info = joined(mine)
      row = Category(
        category=category,
        name=arm.name,
        prompts=sum(len(groups[g].items) for g in chosen),
        improvement=timing.improvement(mine, plain, chosen),
        explained=predict.improvement(arm, calibration, info, base),
        counts=metrics.summary(info),
      )
      out.append(row)
  return out


# --- crossover ---------------------------------------------------------------


def _batch(arms, plan: plan_lib.Plan, size: int, track) -> Batch:
  """Every arm at one batch size, prompts repeated to fill it; audited too."""
  groups = plan_lib.groups(arms, plan, filled(plan.judged, size), size)
  programs = timing.compile_arms(
    arms, groups[0].full, track, f'compiling batch {size}'
  )
  runs = timing.measure(arms, groups, programs, plan.bench.repeats, track)
  outputs = {name: r.outputs for name, r in runs.items()}
  audits = identity.compare(arms, plan, groups, outputs, track)
  rows = [
    BatchRow(
      arm.name,
      metrics.spread(timing.speeds(runs[arm.name])),
      timing.improvement(runs[arm.name], runs[arms[0].name]),
      audits.get(arm.name),
    )
    for arm in arms
  ]
  failed = identity.failures(groups, outputs)
  return Batch(size, rows, _best_gammas(arms, rows), failed)


def filled(items, size: int) -> list:
  """The prompts, repeated in order until batches of `size` are full.

  Each copy has its own request number, so repeats draw different noise.
  """
  count = -(-len(items) // size) * size
  return [
    items[i % len(items)]._replace(number=i, category='') for i in range(count)
  ]


def _best_gammas(arms, rows) -> dict[str, int]:
  """By drafter, the gamma with the largest measured win; 0 where none wins."""
  best: dict[str, dict[int, float]] = {}
  for arm, row in zip(arms[1:], rows[1:], strict=True):
    won = best.setdefault(arm.drafter, {})
    if row.improvement.outcome == 'win':
      won[arm.gamma] = row.improvement.median
  return {drafter: cost.best(won) for drafter, won in best.items()}
