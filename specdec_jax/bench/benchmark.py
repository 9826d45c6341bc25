"""The benchmark: every method against plain decoding, in one process.

Four steps, in an order that keeps the prediction honest: what the parts cost, a
prediction from the calibration prompts, runs of the test prompts, a judgement.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import (
  build,
  decode,
  hosts,
  machine,
  metrics,
  printing,
  program,
)
from specdec_jax import settings as settings_lib
from specdec_jax.bench import (
  budget,
  identity,
  intervals,
  predict,
  records,
  tables,
  timing,
  verdict,
)
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.costs import cost
from specdec_jax.costs import distance as distance_lib
from specdec_jax.io import files

Arms = Sequence[plan_lib.Arm]
Outputs = dict[str, list[decode.Output]]  # by arm, one for each batch


def run(
  arms: Arms,
  plan: plan_lib.Plan,
  *,
  track: plan_lib.Track,
  console: tables.Console,
  clock: budget.Clock = budget.UNLIMITED,
) -> records.Document:
  """Runs everything and prints it as it comes.

  Args:
    arms: arms[0] is plain decoding.
    plan: prompts and amounts, of which as many run as the clock allows.

  Raises:
    ValueError: the clock has too little time for one prompt.
  """
  about, (ceiling, reads) = machine.describe(), timing.ceiling(arms, plan)
  asked = plan_lib.setting(arms, plan)
  tables.start(about, ceiling, asked, console)
  main = clock.share(0.5) if plan.batch_sizes else clock

  costs = _costs(arms, plan, main, track)
  tables.calibration(costs.parts, asked.batch_size, ceiling.tok_s, console)
  arms, plan = costs.arms, budget.fit(plan, costs.speed, main)
  seen = _seen(costs, plan, main, track)
  setting = plan_lib.setting(arms, seen.planned)
  if seen.failed:
    return records.Document(
      about, ceiling, setting, costs.parts, costs.given, failed=seen.failed
    )
  tables.plan(setting, clock, seen.width, console)
  tables.predicted(seen.predicted, seen.left_out, len(arms) - 1, console)
  costs = costs.without(seen.left_out)

  end = main._replace(seconds=main.seconds - costs.speed.closing())
  tested = _tested(costs, plan, reads, end, track)
  setting = plan_lib.setting(costs.arms, tested.plan)
  doc = records.Document(
    machine=about,
    ceiling=ceiling.beside(setting.dtype, tested.gb_s),
    setting=setting,
    calibration=costs.parts,
    costs=costs.given,
    predicted=seen.predicted,
    measured=tested.seconds,
    cut=_cut(asked, setting),
    left_out=seen.left_out,
    **_judged(costs, seen, tested, track),
  )
  if doc.failed:
    return doc
  tables.rows(doc, console)
  for i, size in enumerate(plan.batch_sizes):
    part = clock.share(1 / (len(plan.batch_sizes) - i))
    found = _batch(costs.arms, plan, size, part, track)
    doc = doc._replace(crossover=[*doc.crossover, found])
  if doc.crossover:
    tables.crossover(doc, console)
  return doc


def distance(
  e: settings_lib.Setup,
  arms: Arms,
  plan: plan_lib.Plan,
  asked: str,
  track: plan_lib.Track,
) -> distance_lib.Distance:
  """The target's Distance from `asked` (settings.reference), over all prompts.

  Raises:
    ValueError: a reference that cannot be read, or compared with the target.
  """
  groups = plan_lib.groups(arms, plan, plan.test + plan.calibration)
  other = settings_lib.reference(e, asked)
  requests = (x.full for x in track(groups, f'distance from {other.label}'))
  chunk = arms[0].engine.options.chunk
  return distance_lib.between(e.target, other, requests, chunk=chunk)


def finish(
  doc: records.Document, config, folder: pathlib.Path | None, console
) -> bool:
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


# --- costs -------------------------------------------------------------------


class _Costs(NamedTuple):
  """What the parts of a window cost.

  arms: those of run; adaptive has its costs.
  parts: as timed. given: what adaptive chooses by.
  programs: compiled, by arm.
  """

  arms: Arms
  parts: calibration_lib.Calibration
  given: Mapping[str, Any]
  programs: dict[str, Any]
  speed: budget.Speed

  def without(self, names: Mapping[str, str]) -> '_Costs':
    return self._replace(arms=[x for x in self.arms if x.name not in names])


def _costs(arms: Arms, plan, clock: budget.Clock, track) -> _Costs:
  """Compiles everything and times the parts."""
  group = plan_lib.middle(arms, plan, budget.WINDOWS)
  programs = timing.compile_arms(arms[:1], group.full, track)
  speed = timing.first_step(arms, group, programs)
  budget.check(plan, speed, clock)
  widths = {arm.gamma for arm in arms} | {*arms[-1].engine.options.widths}
  windows, repeats = budget.windows(speed, len(widths), clock)
  request = plan_lib.shortened(group.full, windows)
  arms, parts, given = _calibrated(arms, request, repeats, track)
  programs |= timing.compile_arms(arms[1:], group.full, track)
  factors = {x.name: predict.slowest(x, parts) for x in arms[1:]}
  speed = speed._replace(step=parts.step, factors=factors)
  return _Costs(arms, parts, given, programs, speed)


def _calibrated(arms: Arms, request: decode.Request, repeats: int, track):
  """(arms, Calibration, costs); adaptive chooses by what is measured here."""
  parts = calibration_lib.calibrate(arms, request, repeats, track)
  costs = calibration_lib.costs(parts, max(arm.gamma for arm in arms))
  engines = [arm.engine for arm in arms]
  made = {id(x): build.with_costs(x, costs) for x in engines if x.costs == {}}
  arms = [x._replace(engine=made.get(id(x.engine), x.engine)) for x in arms]
  return arms, parts, next((x.costs for x in engines if x.costs), costs)


# --- prediction --------------------------------------------------------------


class _Seen(NamedTuple):
  """What the calibration prompts tell.

  failed: those that did. planned, width: of the test prompts; see budget.
  left_out: arms that these do not run, and why.
  """

  failed: list[records.Failure]
  predicted: dict[str, records.Prediction]
  planned: plan_lib.Plan
  width: float | None
  left_out: dict[str, str] = {}


def _seen(costs: _Costs, plan, clock: budget.Clock, track) -> _Seen:
  """Runs the calibration prompts and predicts; no test prompt is run."""
  arms = costs.arms
  groups = plan_lib.groups(arms, plan, plan.calibration)
  # Plain decoding emits one token a window but where rows share batches.
  alone = plan.bench.batch_size == 1
  outputs = {
    arm.name: [
      plan_lib.decoded(arm, costs.programs[arm.name][0], group)
      for group in track(groups, f'acceptance of {arm.name}')
    ]
    for arm in arms
    if arm.gamma or not alone
  }
  failed = identity.failures(groups, outputs)
  if failed:
    return _Seen(failed, {}, plan, None)
  gains = predict.each(arms, costs.parts, outputs)

  def planned(left_out):
    kept = [
      {name: y for name, y in x.items() if name not in left_out} for x in gains
    ]
    found, width = budget.expected(plan, costs.speed, kept, clock)
    batches = -(-len(found.test) // plan.bench.batch_size)
    predicted = predict.improvements(arms, costs.parts, outputs, batches)
    return _Seen([], predicted, found, width, left_out)

  seen = planned({})
  if seen.planned == plan:
    return seen
  out = budget.left_out(arms, seen.predicted)
  return planned(out) if out else seen


# --- runs --------------------------------------------------------------------


class _Tested(NamedTuple):
  """Runs of the test prompts.

  plan, groups: that were run. runs: by arm. gb_s: of the reads between them.
  seconds: that all took.
  """

  plan: plan_lib.Plan
  groups: list[plan_lib.Group]
  runs: dict[str, timing.Runs]
  gb_s: list[float]
  seconds: float

  @property
  def outputs(self) -> Outputs:
    return {name: x.outputs for name, x in self.runs.items()}


def _tested(costs: _Costs, plan, reads, clock: budget.Clock, track) -> _Tested:
  """Runs all arms on the test prompts until the time is over."""
  groups = plan_lib.groups(costs.arms, plan, plan.test)
  start, gb_s = program.elapsed(), []
  after = costs.speed.alpha(plan.max_new_tokens)
  blocks = budget.blocks(len(groups), plan.bench.repeats, clock, track, after)
  blocks = timing.reading(blocks, reads, gb_s)
  runs = timing.measure(costs.arms, groups, costs.programs, blocks)
  seconds = program.elapsed() - start
  ran_RG = np.isfinite(runs[costs.arms[0].name].total_RG)
  count, whole = ran_RG.shape[1], ran_RG.all(1).sum()
  plan = plan_lib.cut(plan, count, int(whole))
  return _Tested(plan, groups[:count], runs, gb_s, seconds)


# --- judgement ---------------------------------------------------------------


def _judged(
  costs: _Costs, seen: _Seen, tested: _Tested, track
) -> dict[str, Any]:
  """The fields of a Document that the test prompts give, by name."""
  arms, groups, outputs = costs.arms, tested.groups, tested.outputs
  if failed := identity.failures(groups, outputs):
    return {'failed': failed}
  audits = identity.compare(arms, tested.plan, groups, outputs, track)
  alphas = predict.alphas(arms, groups, outputs, track)
  explained = predict.improvements(arms, costs.parts, outputs)
  improvement = timing.improvements(tested.runs)
  whole = timing.improvements(tested.runs, whole=True)
  rows = [
    records.Row(
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
      predicted=seen.predicted.get(arm.name),
      explained=explained.get(arm.name),
      audit=audits.get(arm.name),
    )
    for arm, mine in zip(arms, tested.runs.values(), strict=True)
  ]
  texts = plan_lib.answers(groups, outputs[arms[0].name])
  return {
    'rows': rows,
    'categories': _categories(arms, costs.parts, groups, tested.runs),
    'repeated_8grams': metrics.repeated_ngrams([x.tokens for x in texts]),
  }


def _categories(arms: Arms, parts, groups, runs) -> list[records.Category]:
  """At batch size 1 only: the time of a larger batch is of no one category."""
  if any(len(group.items) > 1 for group in groups):
    return []
  of: dict[str, list[int]] = {}
  for i, group in enumerate(groups):
    if name := group.items[0].category:
      of.setdefault(name, []).append(i)
  # Those with an interval share the chance of an error.
  tested = sum(len(x) >= intervals.FEWEST for x in of.values())
  out, level = [], 1 - 0.05 / max(tested, 1)
  for category, chosen in of.items():
    improvement = timing.improvements(runs, chosen, level=level)
    for arm in arms[1:]:
      picked = [runs[arm.name].outputs[g] for g in chosen]
      row = records.Category(
        category=category,
        name=arm.name,
        drafter=arm.drafter,
        prompts=len(chosen),
        improvement=improvement[arm.name],
        explained=predict.improvement(arm, parts, picked),
        counts=metrics.summary(metrics.join(picked)),
      )
      out.append(row)
  return out


def _cut(asked: records.Setting, ran: records.Setting):
  """Of what the time left less than was asked for: (left, asked for)."""
  names = {
    'judged_prompts': 'test prompts',
    'other_prompts': 'calibration prompts',
    'max_new_tokens': 'new tokens',
    'repeats': 'repeats',
  }
  both = {x: (getattr(ran, x), getattr(asked, x)) for x in names}
  return {names[x]: y for x, y in both.items() if y[0] < y[1]}


# --- crossover ---------------------------------------------------------------


def _batch(arms: Arms, plan, size: int, clock, track) -> records.Batch:
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
    records.BatchRow(
      *(arm.name, arm.drafter, arm.gamma, timing.tok_s(runs[arm.name])),
      *(improvement[arm.name], audits.get(arm.name)),
    )
    for arm in arms
  ]
  failed = identity.failures(groups, outputs)
  prompts = min(len(groups) * size, len(plan.test))
  return records.Batch(size, rows, _best_gammas(rows), failed, prompts)


def _best_gammas(rows: Sequence[records.BatchRow]) -> dict[str, int]:
  """By drafter, the gamma with the largest measured win; 0 where none wins."""
  won: dict[str, dict[int, float]] = {x.drafter: {} for x in rows[1:]}
  for row in rows[1:]:
    value = row.improvement.value
    if row.improvement.outcome == 'win' and value:
      won[row.drafter][row.gamma] = value
  return {drafter: cost.best(x) for drafter, x in won.items()}
