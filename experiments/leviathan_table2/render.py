"""Times every draft in a row: table 2, with table 4's columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import claims as claims_lib
from experiments import empirical, papers, resampled
from experiments import loaded as loaded_lib
from experiments.page import Part
from experiments.rows import Cells, Rows
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import predict, timing
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.costs import cost

WARM = (0.0, 1.0)
REPEATS, WINDOWS = 5, 24  # of the calibration


def measure(loaded: loaded_lib.Loaded, asked: empirical.Asked):
  """Makes a cell for each draft and temperature.

  gamma: the best by the corrected prediction, from the acceptance on half of
  the prompts; everything else is from the other half, decoded alone.
  """
  cells = []
  for temperature in WARM:
    plan = loaded_lib.plan(loaded, temperature, 1)
    items = plan.test[: asked.prompts]
    plan = plan._replace(test=items[::2], calibration=items[1::2])
    cells += _cells(loaded, plan, asked)
  return cells


def _cells(loaded: loaded_lib.Loaded, plan: plan_lib.Plan, asked):
  plain = plan_lib.Arm('autoregressive', 'autoregressive', 0, loaded.plain)
  every = [
    [plan_lib.Arm(f'{name} g={g}', name, g, engine) for g in asked.gammas]
    for name, engine in loaded.engines.items()
  ]
  request = plan_lib.middle([plain, *every[0]], plan, WINDOWS).full
  first = [arms[-1] for arms in every]
  others = plan_lib.groups([plain, *first], plan, plan.calibration)
  programs = timing.compile_arms([plain, *first], others[0].full)
  decoded = (timing.turn([plain], programs, x)[plain.name] for x in others)
  known = [x.output for x in decoded]
  expected = predict.alphas([plain, *first], others, known)
  chosen, costs = [plain], {}
  for arms in every:
    # By the drafter's name two drafts of one kind would be one.
    found = calibration_lib.calibrate([plain, *arms], request, REPEATS)
    x = expected[arms[-1].name].alpha
    by_gamma = {arm.gamma: _corrected(arm, found, x or 0.0) for arm in arms}
    best = max(by_gamma, key=by_gamma.__getitem__)
    arm = next(arm for arm in arms if arm.gamma == best)
    costs[arm.drafter] = found
    programs[arm.name] = programs[arms[-1].name]
    chosen.append(arm)
  found = empirical.measured(chosen, plan, asked.repeats, programs)
  quality = _quality(loaded, chosen, plan, found.runs)
  runs, cells = found.runs, []
  for arm, row in zip(chosen[1:], found.rows[1:], strict=True):
    name, mine, alpha = arm.drafter, runs[arm.name], row.alpha
    cells.append(
      {
        'draft': name,
        'temperature': plan.sampling.temperature,
        'gamma': arm.gamma,
        **predicted(arm, costs[name], alpha.alpha or 0.0),
        'block_efficiency': row.counts.block_efficiency,
        'measured': empirical.improvement(mine, runs[plain.name]),
        'whole': empirical.improvement(mine, runs[plain.name], whole=True),
        **compared(quality, plain.name, arm.name, len(loaded.references)),
        'texts': len(plan.test),
        'differ': len(row.audit.findings),
        'bugs': row.audit.bugs,
        'promised': row.audit.promised,
      }
    )
  return cells


def _quality(loaded: loaded_lib.Loaded, arms, plan: plan_lib.Plan, runs):
  """Scores each arm; if sampled, also on resampled prompts."""
  if not loaded.references:
    return {}
  if warm := plan.sampling.temperature:
    # The few texts that are timed would say nothing.
    return loaded_lib.qualities(loaded, arms, warm)
  return {
    name: [loaded_lib.quality(loaded, loaded_lib.texts_of(loaded, x.answers))]
    for name, x in runs.items()
  }


def compared(quality, plain: str, name: str, texts: int) -> dict[str, Any]:
  """Compares both arms' quality; change: an Interval over texts if sampled."""
  if not quality:
    return {'quality': [None, None], 'change': None}
  before, after = (np.array(quality[x]) for x in (plain, name))
  change = resampled.interval(after - before, texts) if len(after) > 1 else None
  both = [float(before[0]), float(after[0])]
  return {'quality': both, 'change': change and change._asdict()}


def predicted(
  arm: plan_lib.Arm, costs: calibration_lib.Calibration, alpha: float
) -> Mapping[str, Any]:
  """Predicts alpha, c, v(gamma + 1), theorem 3.8, corrected improvement."""
  propose = costs.propose[arm.engine.drafter.name]
  c = float(calibration_lib.interpolated(propose, arm.gamma)) / arm.gamma
  return {
    'alpha': alpha,
    'c': c,
    'v': float(calibration_lib.at_width(costs.verify, arm.gamma + 1)),
    'step': costs.step,
    'theorem': cost.improvement(alpha, arm.gamma, c),
    'corrected': _corrected(arm, costs, alpha),
  }


def _corrected(arm: plan_lib.Arm, costs, alpha: float) -> float:
  """Divides equation 1 by a window's measured cost, with room for gamma."""
  full_N = np.eye(arm.engine.drafter.gamma + 1)[arm.gamma]
  window = float(predict.window_cost(arm, costs, full_N, full_N))
  return cost.expected_tokens(min(alpha, 1.0), arm.gamma) / window


# --- the page -----------------------------------------------------------------


def _over(x: Mapping[str, Any]) -> str | None:
  """Divides measured by corrected: a window's tokens times the rest."""
  if (speed := x['measured']['value']) is None:
    return None
  expected = cost.expected_tokens(min(x['alpha'], 1.0), x['gamma'])
  over, accepted = speed / x['corrected'], x['block_efficiency'] / expected
  return f'{over:.2f} = {accepted:.2f} x {over / accepted:.2f}'


def _differ(x: Mapping[str, Any]) -> str:
  if x['promised'] != 'tokens':
    return 'same distribution'
  bugs = f', {x["bugs"]} BUG' if x['bugs'] else ''
  return f'{x["differ"]} of {x["texts"]}{bugs}'


SPEED = (
  'target, draft, T=temperature:g, gamma, alpha:.2f, c:.2f, v:.2f, '
  'theorem 3.8=theorem:.2fx, corrected:.2fx, measured:.2fx, '
  'with encoding=whole.value:.2fx, over corrected=over'
)
FACTORS = (
  'task, draft, T=temperature, ours=place, alpha:.2f, ours=ours.alpha:.2f, '
  'factor=by.alpha:.2f, c:.2f, ours=ours.c:.2f, factor=by.c:.2f, '
  'v=ours.v:.2f, factor=by.v:.2f'
)
QUALITY = (
  'target, draft, T=temperature:g, plain=quality.0:.1f, '
  'speculated=quality.1:.1f, change:+.1f, differ=texts'
)
THEIRS = (
  'task, draft, T=temperature, gamma, alpha:.2f, c:.2f, EXP=exp:.1fx, '
  'SPEED=emp:.1fx'
)


def parts(cells: Cells, every: Rows) -> list[Part]:
  ours = [
    x | {'over': _over(x), 'texts': _differ(x)}
    for x in empirical.lines(cells, every)
  ]
  factors = [
    theirs._asdict() | {'place': place, 'ours': x, 'by': _factors(theirs, x)}
    for theirs, place, x in _beside(cells, every)
  ]
  return [
    Part(
      "What each input of ours, alone, does to the paper's prediction at its "
      'gamma. v(gamma + 1) is 1 in the paper.',
      FACTORS,
      factors,
    ),
    Part(
      'Speed of ours. gamma is the best by the corrected prediction on other '
      'prompts; corrected is equation 1 over gamma c + v; measured is decoding '
      'at batch 1 over plain decoding, with its 95 % interval, with encoding '
      'whole requests; over corrected is split into tokens a window and time.',
      SPEED,
      ours,
    ),
    Part(
      'Texts of ours: quality of those that are timed, at T = 1 of all that '
      'have references, with the 95 % interval of the change; differ: those '
      "that are not plain decoding's.",
      QUALITY,
      ours,
    ),
    Part(
      'Theirs, T5-XXL: SPEED of table 2, c and EXP of table 4.',
      THEIRS,
      papers.TABLE4,
    ),
  ]


def _beside(cells: Cells, every: Rows):
  """Lists (the paper's row, ours in words, our cell) by task and draft."""
  return [
    (theirs, f'{every[name].name}, {draft.name}', x)
    for theirs in papers.TABLE4
    for name, draft in empirical.beside(every, cells, theirs.task, theirs.draft)
    for x in cells[name]
    if (x['draft'], x['temperature']) == (draft.name, theirs.temperature)
  ]


def claims(cells: Cells, every: Rows) -> list[claims_lib.Claim]:
  """Claims SPEED in the rows of the paper's task."""
  out = []
  for theirs, place, x in _beside(cells, every):
    cell = f'{theirs.task}, {theirs.draft}, T = {theirs.temperature}'
    given = cell, theirs.emp, 1, place, x['measured'], _reason(theirs, x)
    out.append(claims_lib.speed(*given))
  return out


def _reason(theirs: papers.Row, x: Mapping[str, Any]) -> str:
  """Finds the input that alone takes the prediction furthest to our side."""
  factors = _factors(theirs, x)
  worst = min if x['measured']['value'] < theirs.emp else max
  name = worst(factors, key=factors.__getitem__)
  return f'{name} {x[name]:.2f} for {_inputs(theirs)[name]:g}'


def _inputs(theirs: papers.Row) -> dict[str, float]:
  """Returns the paper's prediction's inputs, in which v(gamma + 1) is 1."""
  return {'alpha': theirs.alpha, 'c': theirs.c, 'v': 1.0}


def _factors(theirs: papers.Row, x: Mapping[str, Any]) -> dict[str, float]:
  """Computes by what each input of ours, alone, changes their prediction."""
  base = _inputs(theirs)
  mine = {'alpha': min(x['alpha'], 1.0), 'c': x['c'], 'v': x['v']}
  expect = lambda given: cost.improvement(gamma=theirs.gamma, **given)
  return {
    name: expect(base | {name: mine[name]}) / expect(base) for name in base
  }


WHY = 'small drafts are accepted less; a CPU pays for every token verified'
TABLE = empirical.Table('leviathan_table2', measure, parts, claims, WHY)
