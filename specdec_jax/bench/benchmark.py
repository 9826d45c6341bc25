"""The benchmark: every method against plain decoding, in one process.

The order of the work is the argument: ceiling, calibration of the parts, a
prediction from other prompts, then the judged prompts. What a number means is
in metrics, cost, predict and audit; how a call is timed in timing; printing in
report.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import decode, types
from specdec_jax.bench import (
  calibrate,
  cost,
  identity,
  machine,
  metrics,
  predict,
  timing,
)


def run(
  arms: Sequence[timing.Arm],
  plan: timing.Plan,
  *,
  track: timing.Track,
  show: Callable,
) -> dict[str, Any]:
  """Runs everything; arms[0] is plain decoding. show(stage, doc) prints.

  Returns the document: machine, ceiling, calibration, rows, crossover. It ends
  where a request fails.
  """
  doc = _begun(arms, plan, show)
  make = timing.grouper(arms, plan)
  judged, others = make(plan.judged), make(plan.others)
  programs = compiled(arms, judged[0].full, track(arms, 'compiling'))
  calibration = calibrate.measure(
    arms,
    timing.calibration_request(arms, plan),
    plain=programs[arms[0].name][0],
    repeats=max(3, plan.repeats),
    track=track,
  )
  doc['calibration'] = dataclasses.asdict(calibration)
  doc['ceiling']['tok_s'] = _ceiling(arms[0], plan, doc['ceiling'])
  show('calibration', doc)

  # The prediction: calibration, and acceptance on the other prompts, before
  # any of the judged ones is run.
  seen = _outputs(arms, programs, others, track)
  if failed := _failed(arms, others, seen):
    show('failed', failed)
    return doc | failed
  alphas = predict.alphas(arms, others, seen, track)
  doc['predicted'] = predict.improvements(arms, calibration, seen, alphas)
  show('predicted', doc)

  runs = timing.measure(arms, judged, programs, plan.repeats, track)
  outputs = {name: r.outputs for name, r in runs.items()}
  if failed := _failed(arms, judged, outputs):
    show('failed', failed)
    return doc | failed
  gaps = timing.stream(arms, judged[: plan.stream_prompts], track)
  every = {name: outputs[name] + seen[name] for name in outputs}
  audits = identity.compare(arms, plan, judged + others, every, track)
  doc['rows'] = _rows(arms, calibration, judged, runs, gaps, track)
  for row in doc['rows']:
    row['predicted'] = doc['predicted'].get(row['name'])
    row['audit'] = audits.get(row['name'])
    row['broken'] = []
  doc['categories'] = _categories(arms, judged, runs, calibration)
  doc['repeated_8grams'] = _repeated(judged, outputs[arms[0].name])
  doc['best_gamma'] = _best_gammas(arms, {r['name']: r for r in doc['rows']})
  show('rows', doc)
  return doc | _crossovers(arms, plan, track)


def _begun(arms, plan: timing.Plan, show: Callable) -> dict[str, Any]:
  """What is known before anything is compiled."""
  doc: dict[str, Any] = {'machine': machine.describe()}
  doc['ceiling'] = _bandwidths(arms, plan)
  show('machine', doc)
  doc['setting'] = timing.setting(arms, plan)
  show('setting', doc)
  return doc


def _outputs(arms, programs, groups, track: timing.Track):
  return {
    arm.name: [
      jax.device_get(programs[arm.name][0](arm.engine.weights, group.full))
      for group in track(groups, f'acceptance of {arm.name}')
    ]
    for arm in arms
  }


def _failed(arms, groups, outputs) -> dict[str, Any] | None:
  """What is left of the document if a request failed; None if none did.

  Its texts are cut short, so that no figure would mean anything.
  """
  rows = [
    {
      'name': arm.name,
      'gamma': arm.gamma,
      'audit': None,
      'broken': identity.broken(groups, outputs[arm.name]),
    }
    for arm in arms
  ]
  failed = {'rows': rows, 'categories': [], 'crossover': []}
  return failed if any(row['broken'] for row in rows) else None


def compiled(arms, request: decode.Request, tracked) -> dict[str, Any]:
  """By arm: its executable at the request's shapes, and the seconds it took."""
  return {
    arm.name: calibrate.compiled(
      arm.engine.programs.generate, arm.engine.weights, request
    )
    for arm in tracked
  }


# --- ceiling ---------------------------------------------------------------


def _bandwidths(arms, plan: timing.Plan) -> dict[str, Any]:
  models = [a.engine.target for a in arms[:1]]
  models += [a.engine.draft for a in arms if a.engine.draft]
  dtypes = sorted({m.dtype for m in models})
  return {
    'gb_s': {d: machine.ceiling(d, small=plan.small) for d in dtypes},
    'devices': 1 if models[0].layout is None else models[0].layout.mesh.size,
  }


def _ceiling(arm: timing.Arm, plan: timing.Plan, ceiling) -> float:
  """tok/s that the target could reach if only reading its bytes took time."""
  target = arm.engine.target
  items = plan.judged
  mean = plan.max_new_tokens / 2 + np.mean([len(i.tokens) for i in items])
  best = ceiling['gb_s'][target.dtype]['best'] * 1e9
  return plan.batch_size * metrics.ceiling_tokens_per_second(
    best * ceiling['devices'],
    metrics.step_bytes(target.params),
    _cache_bytes(arm.model, plan.batch_size, 1) * float(mean),
  )


def _cache_bytes(model: types.Model, rows: int, slots: int) -> int:
  return metrics.tree_bytes(
    jax.eval_shape(lambda: model.init_cache(rows, slots))
  )


# --- rows ------------------------------------------------------------------


def _rows(arms, calibration, groups, runs, gaps, track: timing.Track):
  outputs = {name: r.outputs for name, r in runs.items()}
  alphas = predict.alphas(arms, groups, outputs, track)
  explained = predict.improvements(arms, calibration, outputs, alphas)
  row = lambda arm: _row(
    arm, runs[arms[0].name], calibration, groups, runs[arm.name]
  )
  return [
    row(arm)
    | {
      'alpha': alphas.get(arm.drafter),
      'explained': explained.get(arm.name),
      'inter_token': metrics.inter_token(gaps[arm.name]),
    }
    for arm in arms
  ]


def _row(arm, plain: timing.Runs, calibration, groups, mine: timing.Runs):
  info, base = timing.join(mine.outputs), timing.join(plain.outputs)
  engine = arm.engine
  state, _ = jax.eval_shape(
    engine.programs.start, engine.weights, groups[0].full
  )
  caches = {
    'target_cache': metrics.tree_bytes(state.cache),
    'draft_cache': metrics.tree_bytes(state.drafter),
  }
  drafting = _drafting(arm, state.drafter, info)
  first = np.median(np.asarray(mine.first), 0)
  return {
    'name': arm.name,
    'drafter': arm.drafter,
    'gamma': arm.gamma,
    'tok_s': metrics.spread(timing.speeds(mine)),
    'improvement': metrics.walltime_improvement(
      timing.speeds(mine), timing.speeds(plain)
    ),
    **metrics.summary(info),
    'wide_share': metrics.wide_share(info),
    'cost_coefficient': calibration.c.get(arm.name),
    'verify': calibration.verify[arm.gamma + 1],
    'time_to_first_token': {
      'median': float(np.median(first)),
      'max': float(first.max()),
    },
    'arithmetic_factor': metrics.arithmetic_factor(
      info,
      base,
      narrow=engine.options.narrow,
      target=metrics.step_parameters(engine.target.params),
      drafting=drafting['parameters'],
    ),
    'bytes_per_token': metrics.bytes_per_token(
      info,
      target=metrics.step_bytes(engine.target.params),
      target_cache=caches['target_cache'],
      drafting=drafting['bytes'],
    ),
    'memory': {
      'target': metrics.tree_bytes(engine.target.params),
      'draft': drafting['held'],
      **caches,
    },
    'compile_seconds': mine.compile_seconds,
  }


def _drafting(arm, state: Any, info: types.Info) -> dict[str, int]:
  """What a window does beyond the target's pass, and what is held for it.

  A draft model reads gamma + 1 tokens in gamma passes, or fewer if it stops
  early: the last two committed ones first, then its own. Layers of the target
  run token by token instead of once, and the head once a draft; they are the
  target's own, so none is held. state: the drafter's, for its size.
  """
  engine, params = arm.engine, arm.engine.weights.draft
  passes = metrics.draft_passes(info) if engine.drafter.stops else arm.gamma
  if engine.drafter.exit:
    whole = metrics.step_bytes(params)
    layers = metrics.layers_share(params, engine.drafter.exit) * whole
    head = params['head']
    return {
      'parameters': round(passes * head.size),
      'bytes': round(passes * (layers + head.nbytes)),
      'held': 0,
    }
  # A draft of some ids only is held beside the whole one.
  whole = engine.draft.params if engine.draft else ()
  held = metrics.own_bytes((params, whole), engine.target.params)
  if engine.work is not None:
    parameters, read = engine.work(params, state, passes)
    return {'parameters': parameters, 'bytes': read, 'held': held}
  if engine.draft is None:
    return {'parameters': 0, 'bytes': 0, 'held': held}
  return {
    'parameters': round((passes + 1) * metrics.step_parameters(params)),
    'bytes': round(
      passes * (metrics.step_bytes(params) + metrics.tree_bytes(state))
    ),
    'held': held,
  }


def _categories(arms, groups, runs, calibration) -> list[dict[str, Any]]:
  by: dict[str, list[int]] = {}
  for g, group in enumerate(groups):
    by.setdefault(group.items[0].category, []).append(g)
  plain = runs[arms[0].name]
  out = []
  for category, chosen in by.items():
    if not category:
      continue
    base = timing.join([plain.outputs[g] for g in chosen])
    repeated = _repeated(
      [groups[g] for g in chosen], [plain.outputs[g] for g in chosen]
    )
    for arm in arms[1:]:
      mine = runs[arm.name]
      info = timing.join([mine.outputs[g] for g in chosen])
      summary = metrics.summary(info)
      model = predict.improvement(
        arm, calibration, info, metrics.tokens_per_window(base), None
      )
      out.append(
        {
          'category': category,
          'name': arm.name,
          'prompts': sum(len(groups[g].items) for g in chosen),
          'improvement': metrics.walltime_improvement(
            timing.speeds(mine, chosen), timing.speeds(plain, chosen)
          ),
          'explained': model['improvement'],
          'window_cost': model['window_cost'],
          'block_efficiency': summary['block_efficiency'],
          'proposal_rate': summary['proposal_rate'],
          'draft_acceptance_rate': summary['draft_acceptance_rate'],
          'repeated_8grams': repeated,
        }
      )
  return out


def _repeated(groups, outputs) -> float | None:
  """Share of repeated 8-grams in plain decoding's texts, over all of them."""
  return metrics.repeated_share(timing.texts(groups, outputs))


# --- crossover -------------------------------------------------------------


def _crossovers(arms, plan: timing.Plan, track: timing.Track):
  """crossover: one entry a batch size; largest_batch that helps, by drafter."""
  found = [_crossover(arms, plan, size, track) for size in plan.batch_sizes]
  largest = lambda drafter: max(
    (x['batch_size'] for x in found if x['best_gamma'][drafter]), default=None
  )
  drafters = dict.fromkeys(arm.drafter for arm in arms[1:])
  return {
    'crossover': found,
    'largest_batch': {drafter: largest(drafter) for drafter in drafters},
  }


def _crossover(
  arms, plan: timing.Plan, size: int, track: timing.Track
) -> dict[str, Any]:
  """Every arm at one batch size, prompts repeated to fill it; audited too."""
  items = list(plan.judged)
  need = -(-len(items) // size) * size
  filled = [
    items[i % len(items)]._replace(number=i, category='') for i in range(need)
  ]
  groups = timing.grouper(arms, plan, rows=size)(filled)
  tracked = track(arms, f'compiling batch {size}')
  programs = compiled(arms, groups[0].full, tracked)
  runs = timing.measure(arms, groups, programs, plan.repeats, track)
  plain = timing.speeds(runs[arms[0].name])
  outputs = {name: r.outputs for name, r in runs.items()}
  audits = identity.compare(arms, plan, groups, outputs, track)
  rows = {
    arm.name: {
      'tok_s': metrics.spread(timing.speeds(runs[arm.name])),
      'improvement': metrics.walltime_improvement(
        timing.speeds(runs[arm.name]), plain
      ),
      'audit': audits.get(arm.name),
      'broken': identity.broken(groups, outputs[arm.name]),
    }
    for arm in arms
  }
  return {
    'batch_size': size,
    'rows': rows,
    'best_gamma': _best_gammas(arms, rows),
  }


def _best_gammas(arms, rows: dict[str, dict]) -> dict[str, int]:
  """Per drafter, the measured gamma that wins by most; 0 where none wins."""
  best: dict[str, int] = {}
  for drafter in dict.fromkeys(arm.drafter for arm in arms[1:]):
    found = {
      arm.gamma: rows[arm.name]['improvement']['median']
      for arm in arms[1:]
      if arm.drafter == drafter
      and metrics.outcome(rows[arm.name]['improvement']) == 'win'
    }
    best[drafter] = cost.best(found)
  return best
