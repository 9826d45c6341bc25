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
  counts, inter_token, arithmetic_factor, bytes_per_token: see metrics.
  wide_share: share of windows in which any row proposed something.
  cost_coefficient, verify: c (None for plain decoding) and v(gamma + 1).
  time_to_first_token: seconds, median over prompts.
  compile_seconds: seconds.
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
  wide_share: float
  cost_coefficient: float | None
  verify: float
  time_to_first_token: float
  inter_token: metrics.Gaps
  arithmetic_factor: float | None
  bytes_per_token: float | None
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
  repeated_8grams: float | None


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
  largest_batch: by drafter, the largest batch size at which a gamma wins.
  """

  machine: dict[str, Any]
  ceiling: Ceiling
  setting: plan_lib.Setting
  calibration: timing.Calibration | None = None
  predicted: dict[str, predict.Prediction] = {}
  rows: Sequence[Row] = ()
  categories: Sequence[Category] = ()
  repeated_8grams: float | None = None
  best_gamma: dict[str, int] = {}
  crossover: Sequence[Batch] = ()
  largest_batch: dict[str, int | None] = {}
  failed: Sequence[identity.Failure] = ()


def run(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  *,
  track: plan_lib.Track,
  console: rich.console.Console,
) -> Document:
  """Runs everything and prints it as it comes; arms[0] is plain decoding."""
  ceiling, setting = _ceiling(arms, plan), plan_lib.setting(arms, plan)
  doc = Document(machine.describe(), ceiling, setting)
  tables.machine(doc.machine, console)
  tables.ceiling(ceiling.gb_s, console)
  tables.setting(setting, console)
  tables.judged(setting, console)
  judged = plan_lib.groups(arms, plan, plan.judged)
  others = plan_lib.groups(arms, plan, plan.others)
  programs = timing.compile_arms(arms, judged[0].full, track)
  calibration = timing.calibrate(
    arms,
    plan_lib.calibration_request(arms, plan),
    plain=programs[arms[0].name][0],
    repeats=max(3, plan.repeats),
    track=track,
  )
  doc = doc._replace(calibration=calibration)
  tables.calibration(calibration, ceiling.tok_s, plan.batch_size, console)

  # The prediction: calibration, and acceptance on the other prompts, before
  # any of the judged ones is run.
  seen = _outputs(arms, programs, others, track)
  if failed := _failed(arms, others, seen):
    tables.failures(failed, console)
    return doc._replace(failed=failed)
  alphas = predict.alphas(arms, others, seen, track)
  doc = doc._replace(
    predicted=predict.improvements(arms, calibration, seen, alphas)
  )
  tables.predicted(doc.predicted, console)

  runs = timing.measure(arms, judged, programs, plan.repeats, track)
  outputs = {name: r.outputs for name, r in runs.items()}
  if failed := _failed(arms, judged, outputs):
    tables.failures(failed, console)
    return doc._replace(failed=failed)
  gaps = timing.stream(arms, judged[: plan.stream_prompts], track)
  every = {name: outputs[name] + seen[name] for name in outputs}
  audits = identity.compare(arms, plan, judged + others, every, track)
  rows = _rows(arms, doc, judged, runs, gaps, audits, track)
  doc = doc._replace(
    rows=rows,
    categories=_categories(arms, judged, runs, calibration),
    repeated_8grams=_repeated(judged, outputs[arms[0].name]),
    best_gamma=_best_gammas(arms, rows),
  )
  tables.rows(doc, console)
  found = [_batch(arms, plan, size, track) for size in plan.batch_sizes]
  doc = doc._replace(crossover=found, largest_batch=_largest(arms, found))
  if found:
    tables.crossover(doc, console)
  return doc


def finish(
  doc: Document, config: Any, folder: pathlib.Path | None, console
) -> bool:
  """Prints the verdict and the document; true if sound.

  config: a ConfigDict, part of the document.
  folder: for config.json, env.json and results/bench.json; None saves nothing.
  """
  sentences = verdict.sentences(doc)
  out = {'config': config.to_dict(), **doc._asdict(), 'verdict': sentences}
  tables.close(sentences, out, console)
  if folder:
    (folder / 'results').mkdir(exist_ok=True)
    files.write(folder / 'config.json', config.to_json_best_effort())
    files.write(folder / 'env.json', runtime.compact(doc.machine))
    files.write(folder / 'results/bench.json', runtime.compact(out))
  return verdict.sound(doc)


def _outputs(arms, programs, groups, track: plan_lib.Track) -> dict[str, list]:
  """By arm, its Output on every group; not timed."""
  return {
    arm.name: [
      jax.device_get(programs[arm.name][0](arm.engine.weights, group.full))
      for group in track(groups, f'acceptance of {arm.name}')
    ]
    for arm in arms
  }


def _failed(arms, groups, outputs) -> list[identity.Failure]:
  """Failed requests: their texts are cut short, so no figure would be valid."""
  return [
    x
    for arm in arms
    for x in identity.broken(arm.name, groups, outputs[arm.name])
  ]


def _ceiling(arms, plan: plan_lib.Plan) -> Ceiling:
  target = arms[0].engine.target
  models = [target, *(a.engine.draft for a in arms if a.engine.draft)]
  dtypes = sorted({m.dtype for m in models})
  gb_s = {d: machine.ceiling(d, small=plan.small) for d in dtypes}
  devices = 1 if target.layout is None else target.layout.mesh.size
  # A step reads the weights and, on average, half the answer in the cache.
  slots = plan.max_new_tokens / 2 + np.mean(
    [len(i.tokens) for i in plan.judged]
  )
  cache = jax.eval_shape(lambda: arms[0].model.init_cache(plan.batch_size, 1))
  step = metrics.step_bytes(target.params)
  step += metrics.tree_bytes(cache) * float(slots)
  best = gb_s[target.dtype]['best'] * 1e9 * devices
  return Ceiling(gb_s, devices, plan.batch_size * best / step)


# --- rows --------------------------------------------------------------------


def _rows(
  arms, doc: Document, groups, runs, gaps, audits, track: plan_lib.Track
) -> list[Row]:
  outputs = {name: r.outputs for name, r in runs.items()}
  alphas = predict.alphas(arms, groups, outputs, track)
  explained = predict.improvements(arms, doc.calibration, outputs, alphas)
  plain, parts = runs[arms[0].name], doc.calibration
  assert parts is not None
  out = []
  for arm in arms:
    mine, engine = runs[arm.name], arm.engine
    info, base = metrics.join(mine.outputs), metrics.join(plain.outputs)
    state, _ = jax.eval_shape(
      engine.programs.start, engine.weights, groups[0].full
    )
    caches = [metrics.tree_bytes(x) for x in (state.cache, state.drafter)]
    work = metrics.drafting(engine, arm.gamma, state.drafter, info)
    target = metrics.step_bytes(engine.target.params)
    row = Row(
      name=arm.name,
      drafter=arm.drafter,
      gamma=arm.gamma,
      tok_s=metrics.spread(timing.speeds(mine)),
      improvement=timing.improvement(mine, plain),
      counts=metrics.summary(info),
      wide_share=metrics.wide_share(info),
      cost_coefficient=parts.c.get(arm.name),
      verify=parts.verify[arm.gamma + 1],
      time_to_first_token=float(np.median(np.median(mine.first, 0))),
      inter_token=metrics.inter_token(gaps[arm.name]),
      arithmetic_factor=metrics.arithmetic_factor(
        info,
        base,
        narrow=engine.options.narrow,
        target=metrics.step_parameters(engine.target.params),
        drafting=work.parameters,
      ),
      bytes_per_token=metrics.bytes_per_token(
        info, target + caches[0] + work.bytes
      ),
      memory=Memory(
        metrics.tree_bytes(engine.target.params), work.held, *caches
      ),
      compile_seconds=mine.compile_seconds,
      alpha=alphas.get(arm.drafter),
      predicted=doc.predicted.get(arm.name),
      explained=explained.get(arm.name),
      audit=audits.get(arm.name),
    )
    out.append(row)
  return out


def _categories(arms, groups, runs, calibration) -> list[Category]:
  by: dict[str, list[int]] = {}
  for g, group in enumerate(groups):
    by.setdefault(group.items[0].category, []).append(g)
  by.pop('', None)
  plain = runs[arms[0].name]
  out = []
  for category, chosen in by.items():
    of = lambda runs, chosen=chosen: [runs.outputs[g] for g in chosen]
    base = metrics.tokens_per_window(metrics.join(of(plain)))
    for arm in arms[1:]:
      mine = runs[arm.name]
      info = metrics.join(of(mine))
      row = Category(
        category=category,
        name=arm.name,
        prompts=sum(len(groups[g].items) for g in chosen),
        improvement=timing.improvement(mine, plain, chosen),
        explained=predict.improvement(arm, calibration, info, base, None),
        counts=metrics.summary(info),
        repeated_8grams=_repeated([groups[g] for g in chosen], of(plain)),
      )
      out.append(row)
  return out


def _repeated(groups, outputs) -> float | None:
  """Share of repeated 8-grams in plain decoding's texts, over all of them."""
  return metrics.repeated_ngrams(timing.texts(groups, outputs))


# --- crossover ---------------------------------------------------------------


def _batch(arms, plan: plan_lib.Plan, size: int, track) -> Batch:
  """Every arm at one batch size, prompts repeated to fill it; audited too."""
  groups = plan_lib.groups(arms, plan, filled(plan.judged, size), size)
  programs = timing.compile_arms(
    arms, groups[0].full, track, f'compiling batch {size}'
  )
  runs = timing.measure(arms, groups, programs, plan.repeats, track)
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
  failed = _failed(arms, groups, outputs)
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
  best: dict[str, int] = {}
  for drafter in dict.fromkeys(arm.drafter for arm in arms[1:]):
    found = {
      arm.gamma: row.improvement.median
      for arm, row in zip(arms, rows, strict=True)
      if arm.drafter == drafter and row.improvement.outcome == 'win'
    }
    best[drafter] = cost.best(found)
  return best


def _largest(arms, found: Sequence[Batch]) -> dict[str, int | None]:
  """By drafter, the largest batch size that helps; {} if none was tried."""
  sizes = lambda name: [x.batch_size for x in found if x.best_gamma[name]]
  drafters = dict.fromkeys(arm.drafter for arm in arms[1:]) if found else {}
  return {name: max(sizes(name), default=None) for name in drafters}
