"""Benchmarks every method against plain decoding, in one process.

Times the parts, predicts from the calibration prompts, runs the test prompts,
and judges: in this order the prediction is honest.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

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
from specdec_jax.costs import distance as distance_lib

Arms = Sequence[plan_lib.Arm]


def run(
  arms: Arms,
  plan: plan_lib.Plan,
  clock: budget.Clock = budget.UNLIMITED,
  away: distance_lib.Distance | None = None,
) -> records.Document:
  """Runs as much of the plan as the clock allows, and prints as it goes.
  arms[0] decodes plainly; `away` goes into the document. Raises ValueError if
  the clock has too little time for one prompt."""
  about, (ceiling, read) = machine.describe(), timing.ceiling(arms, plan)
  console, setting = printing.console(), plan_lib.setting(arms, plan)
  tables.start(about, ceiling, setting, console)
  end = clock.share(0.5) if plan.batch_sizes else clock
  arms, programs, speed, parts, costs = _costs(arms, plan, end, ceiling.tok_s)
  tables.calibration(parts, ceiling.tok_s, console)
  doc = records.Document(about, ceiling, setting, parts, costs, distance=away)

  end = end.later(-speed.closing())
  speed, slow = budget.afford(arms, plan, speed, end)
  arms = [x for x in arms if x.name not in slow]
  plan = budget.fit(plan, speed, end)
  fits, width, predicted, left_out, failed = _expectations(
    arms, programs, plan, parts, speed, end
  )
  setting = plan_lib.setting(arms, fits)
  if failed:
    return doc._replace(setting=setting, failed=failed)
  tables.plan(setting, clock, width, console)
  if arms[1:]:
    tables.predicted(predicted, setting, console)

  arms, gb_s = [x for x in arms if x.name not in left_out], []
  after = speed.alpha(plan.max_new_tokens)
  blocks = budget.blocks(plan.batches, plan.bench.repeats, end, after)
  blocks = timing.reading(blocks, read, gb_s)
  found = timing.measured(arms, plan, programs, blocks, parts)
  setting = plan_lib.setting(arms, found.plan)
  doc = doc._replace(
    ceiling=ceiling.beside(setting.dtype, gb_s),
    setting=setting,
    predicted=predicted,
    measured=found.seconds,
    left_out=slow | left_out,
    failed=found.failed,
  )
  if doc.failed:  # no figure would be valid
    return doc
  plain = found.runs[arms[0].name].answers.values()
  doc = doc._replace(
    rows=[x._replace(predicted=predicted.get(x.name)) for x in found.rows],
    categories=_categories(arms, parts, found.runs),
    repeated_8grams=metrics.repeated_ngrams([x.tokens for x in plain]),
  )
  tables.rows(doc, console)
  if plan.batch_sizes:
    doc = doc._replace(crossover=_crossover(arms, plan, clock))
    tables.crossover(doc, console)
  return doc


def distance(
  e: settings_lib.Setup, arms: Arms, plan: plan_lib.Plan, asked: str
) -> distance_lib.Distance:
  """Measures, over all prompts, how far the target is from `asked`; raises
  ValueError if that cannot be read, or compared (settings.reference)."""
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
  """Prints verdict and document, which has the ConfigDict; returns whether it
  is sound. folder: gets results/bench.json; None saves nothing."""
  console, phases = printing.console(), dict(printing.spent)
  phases['the rest'] = program.elapsed() - sum(phases.values())
  tables.line(console, 'Time', tables.phases(phases))
  sentences = verdict.sentences(doc)
  out = {'config': config.to_dict(), **doc._asdict(), 'phases': phases}
  out['verdict'] = sentences
  path = folder and folder / 'results/bench.json'
  tables.close(sentences, out, console, path)
  return verdict.sound(doc)


# --- costs -------------------------------------------------------------------


def _costs(arms: Arms, plan: plan_lib.Plan, clock: budget.Clock, tok_s: float):
  """Compiles everything and times a window's parts; returns (arms, where
  adaptive has its costs; programs by arm; Speed; Calibration; those costs)."""
  group = plan_lib.middle(arms, plan, budget.WINDOWS)
  check = functools.partial(budget.check, plan, clock=clock)
  programs, speed = timing.first_step(arms, group, tok_s, check)
  widths = {arm.gamma for arm in arms} | {*arms[-1].engine.options.widths}
  windows, repeats = budget.windows(speed, len(widths), clock)
  request = plan_lib.shortened(group.full, windows)
  arms, parts, given = _calibration(arms, request, repeats)
  programs |= timing.compile_arms(arms[1:], group.full)
  factors = {x.name: predict.likely(x, parts) for x in arms[1:]}
  speed = speed._replace(step=parts.step, factors=factors)
  return arms, programs, speed, parts, given


def _calibration(arms: Arms, request: decode.Request, repeats: int):
  """Returns (arms, Calibration, costs); adaptive chooses by these costs."""
  parts = calibration_lib.calibrate(arms, request, repeats)
  costs = calibration_lib.costs(parts, max(arm.gamma for arm in arms))
  engines = [arm.engine for arm in arms]
  made = {id(x): build.with_costs(x, costs) for x in engines if x.costs == {}}
  arms = [x._replace(engine=made.get(id(x.engine), x.engine)) for x in arms]
  return arms, parts, next((x.costs for x in engines if x.costs), costs)


# --- prompts -----------------------------------------------------------------


def _expectations(
  arms: Arms, programs, plan: plan_lib.Plan, parts, speed: budget.Speed, clock
):
  """Runs the calibration prompts, to predict the test prompts.

  Returns (a plan with the prompts that fit; the width from budget.expected;
  Predictions by arm; the arms that cannot win, and why; failed requests, which
  leave the others empty).
  """
  groups = plan_lib.groups(arms, plan, plan.calibration)
  # Plain decoding emits one token a window but where rows share batches.
  asked = arms[1:] if plan.bench.batch_size == 1 else arms
  shown = printing.track(groups, 'acceptance')
  ran = [timing.turn(asked, programs, group) for group in shown]
  outputs = {arm.name: [x[arm.name].output for x in ran] for arm in asked}
  answers = {x: plan_lib.answers(groups, y) for x, y in outputs.items()}
  if failed := identity.failures(answers):
    return plan, None, {}, {}, failed
  gains = predict.gains(arms, parts, outputs)
  known = outputs if len(groups) >= records.FEWEST else dict.fromkeys(outputs)
  foretell = functools.partial(predict.improvements, arms, parts, known)
  fits, width = budget.expected(arms, plan, speed, gains, clock)
  predicted = foretell(fits.batches)
  left_out = {} if fits == plan else budget.left_out(arms, predicted)
  if left_out:
    kept = [x for x in arms if x.name not in left_out]
    fits, width = budget.expected(kept, plan, speed, gains, clock)
    predicted = foretell(fits.batches)
  return fits, width, predicted, left_out, []


def _categories(arms: Arms, parts, runs) -> list[records.Row]:
  """Returns rows by category; none where a batch has several prompts."""
  of: dict[str, list[int]] = {}
  for g, category in enumerate(runs[arms[0].name].kind_G.tolist()):
    if category:
      of.setdefault(category, []).append(g)
  # Those with an interval share the chance of an error.
  tested = sum(len(x) >= intervals.FEWEST for x in of.values())
  out, level = [], 1 - 0.05 / max(tested, 1)
  for category, chosen in of.items():
    part = {name: x.picked(chosen) for name, x in runs.items()}
    rows = timing.rows(arms, part, {}, parts, level)[1:]
    of_it = dict(category=category, prompts=len(chosen))
    out += [row._replace(**of_it) for row in rows]
  return out


def _crossover(arms: Arms, plan, clock: budget.Clock) -> list[records.Batch]:
  """Runs every arm in full pools at each batch size in the plan."""
  sizes, out = plan.batch_sizes, []
  for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
    bench = dataclasses.replace(plan.bench, batch_size=size)
    own = plan._replace(bench=bench)
    runs = steady.measure(arms, own, clock.share(1 / left))
    answers = {name: x.answers for name, x in runs.items()}
    audits = identity.compare(arms, own, answers)
    rows = timing.rows(arms, runs, audits, level=1 - 0.05 / len(sizes))
    out.append(records.Batch(size, rows, identity.failures(answers)))
  return out
