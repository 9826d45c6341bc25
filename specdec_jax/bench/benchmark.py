"""The benchmark: every method against plain decoding, in one process.

Four steps, in an order that keeps the prediction honest: what the parts cost, a
prediction from the calibration prompts, runs of the test prompts, a judgement.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

from specdec_jax import build, decode, machine, metrics, printing
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
  tables.start(about, ceiling, plan_lib.setting(arms, plan), console)
  end = clock.share(0.5) if plan.batch_sizes else clock

  arms, programs, speed, parts, given = _costs(arms, plan, end, ceiling.tok_s)
  tables.calibration(parts, ceiling.tok_s, console)
  end = end.later(-speed.closing())
  plan = budget.fit(plan, speed, end)
  setting = plan_lib.setting(arms, plan)
  doc = records.Document(about, ceiling, setting, parts, given)

  doc, width = _predicted(doc, arms, programs, plan, speed, end)
  if doc.failed:
    return doc
  tables.plan(doc.setting, clock, width, console)
  if arms[1:]:
    tables.predicted(doc.predicted, doc.setting, console)
  arms = [x for x in arms if x.name not in doc.left_out]

  after = speed.alpha(plan.max_new_tokens)
  doc = _tested(doc, arms, programs, plan, read, end, after)
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


def _costs(arms: Arms, plan: plan_lib.Plan, clock: budget.Clock, tok_s: float):
  """Compiles everything and times the parts of a window.

  Returns (arms, where adaptive has its costs; programs by arm; Speed;
  Calibration; the costs that adaptive chooses by).
  """
  group = plan_lib.middle(arms, plan, budget.WINDOWS)
  check = functools.partial(budget.check, plan, clock=clock)
  programs, speed = timing.first_step(arms, group, tok_s, check)
  widths = {arm.gamma for arm in arms} | {*arms[-1].engine.options.widths}
  windows, repeats = budget.windows(speed, len(widths), clock)
  request = plan_lib.shortened(group.full, windows)
  arms, parts, given = _calibrated(arms, request, repeats)
  programs |= timing.compile_arms(arms[1:], group.full)
  factors = {x.name: predict.slowest(x, parts) for x in arms[1:]}
  speed = speed._replace(step=parts.step, factors=factors)
  return arms, programs, speed, parts, given


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
  doc: records.Document, arms: Arms, programs, plan, speed, clock: budget.Clock
) -> tuple[records.Document, float | None]:
  """The document with what the calibration prompts give, and the width of an
  interval to expect. No test prompt is run; its setting is of those that will.
  """
  groups = plan_lib.groups(arms, plan, plan.calibration)
  # Plain decoding emits one token a window but where rows share batches.
  asked = arms[1:] if plan.bench.batch_size == 1 else arms
  shown = printing.track(groups, 'acceptance')
  ran = [timing.turn(asked, programs, group) for group in shown]
  outputs = {arm.name: [x[arm.name].output for x in ran] for arm in asked}
  if failed := identity.failures(plan_lib.texts(groups, outputs)):
    return doc._replace(failed=failed), None
  gains = predict.gains(arms, doc.calibration, outputs)
  known = outputs if len(groups) >= records.FEWEST else dict.fromkeys(outputs)

  def planned(left_out):
    kept = {x.name: x.drafter for x in arms if x.name not in left_out}
    own = {name: x for name, x in gains.items() if name in kept}
    drafters = len({kept[name] for name in own})
    found, width = budget.expected(
      plan, speed._replace(drafters=drafters), own, clock
    )
    batches = -(-len(found.test) // plan.bench.batch_size)
    told = doc._replace(
      setting=plan_lib.setting(arms, found),
      predicted=predict.improvements(arms, doc.calibration, known, batches),
      left_out=left_out,
    )
    return told, width

  told, width = planned({})
  fits = told.setting == doc.setting
  out = {} if fits else budget.left_out(arms, told.predicted)
  return planned(out) if out else (told, width)


# --- the test prompts --------------------------------------------------------


def _tested(
  doc: records.Document, arms: Arms, programs, plan, read, clock, after: float
) -> records.Document:
  """The document with what test prompts give, run until the time is over.

  read: of the ceiling. after: seconds that a batch takes once all are run.
  """
  gb_s, batches = [], -(-len(plan.test) // plan.bench.batch_size)
  blocks = budget.blocks(batches, plan.bench.repeats, clock, after)
  blocks = timing.reading(blocks, read, gb_s)
  found = timing.measured(arms, plan, programs, blocks)
  setting = plan_lib.setting(arms, found.plan)
  doc = doc._replace(
    ceiling=doc.ceiling.beside(setting.dtype, gb_s),
    setting=setting,
    measured=found.seconds,
  )
  if found.failed:
    return doc._replace(failed=found.failed)
  outputs = {name: x.outputs for name, x in found.runs.items()}
  explained = predict.improvements(arms, doc.calibration, outputs)
  rows = [
    row._replace(
      predicted=doc.predicted.get(row.name), explained=explained.get(row.name)
    )
    for row in found.rows
  ]
  plain = [x.tokens for x in found.answers[arms[0].name]]
  return doc._replace(
    rows=rows,
    categories=_categories(arms, doc.calibration, found.runs),
    repeated_8grams=metrics.repeated_ngrams(plain),
  )


def _categories(arms: Arms, parts, runs) -> list[records.Row]:
  """At batch size 1 only: the time of a larger batch is of no one category."""
  named = runs[arms[0].name].kind_G.tolist()
  of = {
    name: [i for i, x in enumerate(named) if x == name]
    for name in dict.fromkeys(filter(None, named))
  }
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
      for row in timing.rows(arms, part, {}, level)[1:]
    ]
  return out


# --- crossover ---------------------------------------------------------------


def _batch(arms: Arms, plan, size: int, clock) -> records.Batch:
  """Every arm in a full pool of one of the plan's batch sizes, audited too."""
  bench = dataclasses.replace(plan.bench, batch_size=size)
  plan = plan._replace(bench=bench)
  runs, answers = steady.measure(arms, plan, clock)
  both = sorted(set.intersection(*map(set, answers.values())))
  texts = {name: [x[at] for at in both] for name, x in answers.items()}
  audits = identity.compare(arms, plan, texts)
  rows = timing.rows(arms, runs, audits, 1 - 0.05 / len(plan.batch_sizes))
  failed = identity.failures({x: [*y.values()] for x, y in answers.items()})
  return records.Batch(size, rows, failed)
