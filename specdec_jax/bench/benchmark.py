"""The benchmark: every method against plain decoding, in one process.

Four steps, in an order that keeps the prediction honest: what the parts cost, a
prediction from the calibration prompts, runs of the test prompts, a judgement.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import build, decode, machine, metrics, printing, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import (
  budget,
  identity,
  intervals,
  predict,
  records,
  steady,
  tables,
  timing,
  verdict,
)
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.costs import cost
from specdec_jax.costs import distance as distance_lib

Arms = Sequence[plan_lib.Arm]


def run(
  arms: Arms, plan: plan_lib.Plan, clock: budget.Clock = budget.UNLIMITED
) -> records.Document:
  """Runs as much of the plan as the clock allows, and prints it as it comes.

  arms[0] is plain decoding.

  Raises:
    ValueError: the clock has too little time for one prompt.
  """
  about, (ceiling, read) = machine.describe(), timing.ceiling(arms, plan)
  console = printing.console()
  asked = plan_lib.setting(arms, plan)
  tables.start(about, ceiling, asked, console)
  main = clock.share(0.5) if plan.batch_sizes else clock

  costs = _costs(arms, plan, main)
  tables.calibration(costs.parts, asked.batch_size, ceiling.tok_s, console)
  end = main.later(-costs.speed.closing())
  arms, plan = costs.arms, budget.fit(plan, costs.speed, end)
  setting = plan_lib.setting(arms, plan)
  doc = records.Document(about, ceiling, setting, costs.parts, costs.given)
  most = asked.max_new_tokens
  doc, width = _predicted(doc, costs, plan, end, most)
  if doc.failed:
    return doc
  plan = plan._replace(max_new_tokens=doc.setting.max_new_tokens)
  tables.plan(doc.setting, clock, width, console)
  if arms[1:]:
    tables.predicted(doc.predicted, console)
  arms = [x for x in arms if x.name not in doc.left_out]
  costs = costs._replace(arms=arms)

  doc = _tested(doc, costs, plan, read, end)
  doc = doc._replace(cut=_cut(asked, doc.setting))
  if doc.failed:
    return doc
  tables.rows(doc, console)
  for i, size in enumerate(plan.batch_sizes):
    part = clock.share(1 / (len(plan.batch_sizes) - i))
    found = _batch(arms, plan, size, part)
    doc = doc._replace(crossover=[*doc.crossover, found])
  if doc.crossover:
    tables.crossover(doc, console)
  return doc


def distance(
  e: settings_lib.Setup, arms: Arms, plan: plan_lib.Plan, asked: str
) -> distance_lib.Distance:
  """The target's Distance from `asked` (settings.reference), over all prompts.

  Raises:
    ValueError: a reference that cannot be read, or compared with the target.
  """
  prompts = plan.test + plan.calibration
  groups = plan_lib.groups(arms, plan, prompts)
  other = settings_lib.reference(e, asked)
  shown = printing.track(groups, f'distance from {other.label}')
  requests = (x.full for x in shown)
  chunk = arms[0].engine.options.chunk
  return distance_lib.between(
    e.target, other, requests, len(prompts), chunk=chunk
  )


def finish(doc: records.Document, config, folder: pathlib.Path | None) -> bool:
  """Prints the verdict and the document; true if sound.

  config: a ConfigDict, part of the document.
  folder: for results/bench.json; None saves nothing.
  """
  sentences = verdict.sentences(doc)
  out = {'config': config.to_dict(), **doc._asdict(), 'verdict': sentences}
  path = folder and folder / 'results/bench.json'
  tables.close(sentences, out, printing.console(), path)
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


def _costs(arms: Arms, plan, clock: budget.Clock) -> _Costs:
  """Compiles everything and times the parts."""
  group = plan_lib.middle(arms, plan, budget.WINDOWS)
  programs, speed = timing.first_step(arms, group)
  budget.check(plan, speed, clock)
  widths = {arm.gamma for arm in arms} | {*arms[-1].engine.options.widths}
  windows, repeats = budget.windows(speed, len(widths), clock)
  request = plan_lib.shortened(group.full, windows)
  arms, parts, given = _calibrated(arms, request, repeats)
  programs |= timing.compile_arms(arms[1:], group.full)
  factors = {x.name: predict.slowest(x, parts) for x in arms[1:]}
  speed = speed._replace(step=parts.step, factors=factors)
  return _Costs(arms, parts, given, programs, speed)


def _calibrated(arms: Arms, request: decode.Request, repeats: int):
  """(arms, Calibration, costs); adaptive chooses by what is measured here."""
  parts = calibration_lib.calibrate(arms, request, repeats)
  costs = calibration_lib.costs(parts, max(arm.gamma for arm in arms))
  engines = [arm.engine for arm in arms]
  made = {id(x): build.with_costs(x, costs) for x in engines if x.costs == {}}
  arms = [x._replace(engine=made.get(id(x.engine), x.engine)) for x in arms]
  return arms, parts, next((x.costs for x in engines if x.costs), costs)


# --- prediction --------------------------------------------------------------


def _predicted(
  doc: records.Document, costs: _Costs, plan, clock: budget.Clock, most: int
) -> tuple[records.Document, float | None]:
  """The document with what the calibration prompts give, and the width of an
  interval to expect. No test prompt is run; its setting is of those that will,
  with answers of at most `most` tokens.
  """
  arms = costs.arms
  groups = plan_lib.groups(arms, plan, plan.calibration)
  # Plain decoding emits one token a window but where rows share batches.
  asked = arms[1:] if plan.bench.batch_size == 1 else arms
  shown = printing.track(groups, 'acceptance')
  ran = [timing.turn(asked, costs.programs, group) for group in shown]
  outputs = {arm.name: [x[arm.name].output for x in ran] for arm in asked}
  if failed := identity.failures(plan_lib.texts(groups, outputs)):
    return doc._replace(failed=failed), None
  gains = predict.gains(arms, costs.parts, outputs)

  def planned(left_out):
    kept = {name: x for name, x in gains.items() if name not in left_out}
    names = {x.drafter for x in arms if x.name in kept}
    speed = costs.speed._replace(drafters=len(names))
    found, width = budget.expected(plan, speed, kept, clock, most)
    batches = -(-len(found.test) // plan.bench.batch_size)
    told = doc._replace(
      setting=plan_lib.setting(arms, found),
      predicted=predict.improvements(arms, costs.parts, outputs, batches),
      left_out=left_out,
    )
    return told, width

  told, width = planned({})
  fits = told.setting == doc.setting
  out = {} if fits else budget.left_out(arms, told.predicted)
  return planned(out) if out else (told, width)


# --- the test prompts --------------------------------------------------------


def _tested(
  doc: records.Document, costs: _Costs, plan, read, clock
) -> records.Document:
  """The document with what test prompts give, run until the time is over."""
  arms, groups = costs.arms, plan_lib.groups(costs.arms, plan, plan.test)
  start, gb_s = program.elapsed(), []
  after = costs.speed.alpha(plan.max_new_tokens)
  blocks = budget.blocks(len(groups), plan.bench.repeats, clock, after)
  blocks = timing.reading(blocks, read, gb_s)
  runs = timing.measure(arms, groups, costs.programs, blocks)
  measured = program.elapsed() - start
  ran_RG = np.isfinite(runs[arms[0].name].decoding_RG)
  plan = plan_lib.cut(plan, ran_RG.shape[1], int(ran_RG.all(1).sum()))
  setting, groups = plan_lib.setting(arms, plan), groups[: ran_RG.shape[1]]
  ceiling = doc.ceiling.beside(setting.dtype, gb_s)
  doc = doc._replace(ceiling=ceiling, setting=setting, measured=measured)
  outputs = {name: x.outputs for name, x in runs.items()}
  texts = plan_lib.texts(groups, outputs)
  if failed := identity.failures(texts):
    return doc._replace(failed=failed)
  audits = identity.compare(arms, plan, texts)
  alphas = predict.alphas(arms, groups, outputs)
  explained = predict.improvements(arms, costs.parts, outputs)
  rows = [
    row._replace(
      alpha=alphas.get(row.drafter),
      predicted=doc.predicted.get(row.name),
      explained=explained.get(row.name),
    )
    for row in _rows(arms, runs, audits)
  ]
  plain = [x.tokens for x in texts[arms[0].name]]
  return doc._replace(
    rows=rows,
    categories=_categories(arms, costs.parts, groups, runs),
    repeated_8grams=metrics.repeated_ngrams(plain),
  )


def _rows(arms: Arms, runs, audits, level: float = 0.95) -> list[records.Row]:
  """What is measured of every arm; level: how often all intervals hold."""
  improvement = timing.improvements(runs, level=level)
  whole = timing.improvements(runs, whole=True, level=level)
  return [
    records.Row(
      *(arm.name, arm.drafter, arm.gamma),
      metrics.summary(metrics.join(mine.outputs)),
      tok_s=timing.tok_s(mine),
      improvement=improvement[arm.name],
      whole=whole[arm.name],
      time_to_first_token=timing.first_token(mine),
      audit=audits.get(arm.name),
    )
    for arm, mine in zip(arms, runs.values(), strict=True)
  ]


def _categories(arms: Arms, parts, groups, runs) -> list[records.Row]:
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
    part = {name: x.picked(chosen) for name, x in runs.items()}
    outputs = {name: x.outputs for name, x in part.items()}
    explained = predict.improvements(arms, parts, outputs)
    out += [
      row._replace(
        category=category, prompts=len(chosen), explained=explained[row.name]
      )
      for row in _rows(arms, part, {}, level)[1:]
    ]
  return out


def _cut(asked: records.Setting, ran: records.Setting):
  """Of what the time left less than was asked for: (left, asked for)."""
  # Prompts that predict nothing are judged.
  prompts = asked.judged_prompts + asked.other_prompts - ran.other_prompts
  both = {
    'test prompts': (ran.judged_prompts, prompts),
    'new tokens': (ran.max_new_tokens, asked.max_new_tokens),
    'repeats': (ran.repeats, asked.repeats),
  }
  return {name: x for name, x in both.items() if x[0] < x[1]}


# --- crossover ---------------------------------------------------------------


def _batch(arms: Arms, plan, size: int, clock) -> records.Batch:
  """Every arm in a full pool of one of the plan's batch sizes, audited too."""
  bench = dataclasses.replace(plan.bench, batch_size=size)
  queues = steady.queues(plan := plan._replace(bench=bench))
  runs = steady.measure(arms, plan, queues, clock)
  tokens_AG, seconds_AG, ended, answers = zip(*runs, strict=True)
  ran = queues[: len(seconds_AG[0])]
  prompts = len({x.id for queue in ran for x in queue})
  level = 1 - 0.05 / len(plan.batch_sizes)
  gains = intervals.speedups(tokens_AG, seconds_AG, level, prompts)
  gains = [intervals.Interval(1.0, 1.0, 1.0), *gains]
  names = [arm.name for arm in arms]
  answers = dict(zip(names, answers, strict=True))
  both = sorted(set.intersection(*map(set, answers.values())))
  texts = {name: [x[at] for at in both] for name, x in answers.items()}
  audits = identity.compare(arms, plan, texts)
  rows = [
    records.Row(
      *(arm.name, arm.drafter, arm.gamma),
      metrics.summary(metrics.join(ended[i])),
      tok_s=sum(tokens_AG[i]) / sum(seconds_AG[i]),
      improvement=gains[i],
      audit=audits.get(arm.name),
    )
    for i, arm in enumerate(arms)
  ]
  failed = identity.failures({x: [*y.values()] for x, y in answers.items()})
  return records.Batch(size, rows, _best_gammas(rows), failed, prompts)


def _best_gammas(rows: Sequence[records.Row]) -> dict[str, int]:
  """By drafter, the gamma with the largest measured win; 0 where none wins."""
  won: dict[str, dict[int, float]] = {x.drafter: {} for x in rows[1:]}
  for row in rows[1:]:
    value = row.improvement.value
    if row.improvement.outcome == 'win' and value:
      won[row.drafter][row.gamma] = value
  return {drafter: cost.best(x) for drafter, x in won.items()}
