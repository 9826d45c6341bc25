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
from specdec_jax import sampling as sampling_lib
from specdec_jax.eval import (
  audit,
  calibrate,
  cost,
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

  Returns the document: machine, ceiling, calibration, rows, crossover.
  """
  doc: dict[str, Any] = {'machine': machine.describe()}
  doc['ceiling'] = _bandwidths(arms, plan)
  show('machine', doc)
  doc['setting'] = _setting(arms, plan)
  show('setting', doc)

  make = timing.grouper(arms, plan)
  judged, others = make(plan.judged), make(plan.others)
  programs = _compiled(arms, judged[0].full, track(arms, 'compiling'))
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
  seen = {
    arm.name: [
      jax.device_get(programs[arm.name][0](arm.engine.weights, group.full))
      for group in track(others, f'acceptance of {arm.name}')
    ]
    for arm in arms
  }
  alphas = predict.alphas(arms, others, seen, track)
  doc['predicted'] = predict.improvements(arms, calibration, seen, alphas)
  show('predicted', doc)

  runs = timing.measure(arms, judged, programs, plan.repeats, track)
  gaps = timing.stream(arms, judged[: plan.stream_prompts], track)
  outputs = {name: r.outputs for name, r in runs.items()}
  findings = _audit(arms, plan, judged + others, outputs, seen, track)
  doc['rows'] = _rows(arms, calibration, judged, runs, gaps, track)
  for row in doc['rows']:
    row['predicted'] = doc['predicted'].get(row['name'])
    row['audit'] = findings.get(row['name'])
  doc['categories'] = _categories(arms, judged, runs, calibration)
  doc['repeated_8grams'] = _repeated(judged, outputs[arms[0].name])
  doc['best_gamma'] = _best_gammas(arms, {r['name']: r for r in doc['rows']})
  show('rows', doc)
  return doc | _crossovers(arms, plan, track)


def _compiled(arms, request: decode.Request, tracked) -> dict[str, Any]:
  """By arm: its executable at the request's shapes, and the seconds it took."""
  return {
    arm.name: calibrate.compiled(
      arm.engine.programs.generate, arm.engine.weights, request
    )
    for arm in tracked
  }


def _setting(arms, plan: timing.Plan) -> dict[str, Any]:
  target = arms[0].engine.target
  drafts = {a.drafter: a.engine.draft for a in arms if a.engine.draft}
  host = timing.grouper(arms, plan)(plan.judged[:1])[0].host
  return {
    'target': target.label,
    'draft': next((d.label for d in drafts.values()), None),
    'dtype': target.config.dtype,
    'rule': arms[0].engine.rule.name,
    'lossless': arms[0].engine.rule.lossless,
    'sampling': dataclasses.asdict(plan.sampling),
    'batch_size': plan.batch_size,
    'max_new_tokens': plan.max_new_tokens,
    'buffer': int(host.tokens_BL.shape[1]),
    'chunk': arms[0].engine.options.chunk,
    'narrow': arms[0].engine.options.narrow,
    'repeats': plan.repeats,
    'judged_prompts': len(plan.judged),
    'other_prompts': len(plan.others),
  }


# --- ceiling ---------------------------------------------------------------


def _bandwidths(arms, plan: timing.Plan) -> dict[str, Any]:
  models = [a.engine.target for a in arms[:1]]
  models += [a.engine.draft for a in arms if a.engine.draft]
  dtypes = sorted({m.config.dtype for m in models})
  return {
    'gb_s': {d: machine.ceiling(d, small=plan.small) for d in dtypes},
    'devices': 1 if models[0].layout is None else models[0].layout.mesh.size,
  }


def _ceiling(arm: timing.Arm, plan: timing.Plan, ceiling) -> float:
  """tok/s that the target could reach if only reading its bytes took time."""
  target = arm.engine.target
  items = plan.judged
  mean = plan.max_new_tokens / 2 + np.mean([len(i.tokens) for i in items])
  best = ceiling['gb_s'][target.config.dtype]['best'] * 1e9
  return plan.batch_size * metrics.ceiling_tokens_per_second(
    best * ceiling['devices'],
    metrics.step_bytes(target.params),
    _cache_bytes(arm.model, plan.batch_size, 1) * float(mean),
  )


def _cache_bytes(model: types.Model | None, rows: int, slots: int) -> int:
  if model is None:
    return 0
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
  engine, draft = arm.engine, arm.engine.draft
  B, L = groups[0].host.tokens_BL.shape
  size = lambda f, model: 0 if model is None else f(model.params)
  caches = {
    'target_cache': _cache_bytes(arm.model, B, L),
    'draft_cache': _cache_bytes(arm.draft, B, L),
  }
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
      draft=size(metrics.step_parameters, draft),
    ),
    'bytes_per_token': metrics.bytes_per_token(
      info,
      target=metrics.step_bytes(engine.target.params),
      draft=size(metrics.step_bytes, draft),
      **caches,
    ),
    'memory': {
      'target': metrics.tree_bytes(engine.target.params),
      'draft': size(metrics.tree_bytes, draft),
      **caches,
    },
    'compile_seconds': mine.compile_seconds,
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


# --- identity --------------------------------------------------------------


def _audit(
  arms, plan: timing.Plan, groups, judged, others, track: timing.Track
):
  """Every request's tokens against plain decoding's, where promised."""
  s = plan.sampling
  out: dict[str, Any] = {}
  promised = (
    s.temperature < sampling_lib.GREEDY_BELOW or arms[0].engine.rule.coupled
  )
  items = [item for group in groups for item in group.items]
  text = {
    a.name: timing.texts(groups, judged[a.name] + others[a.name]) for a in arms
  }
  for arm in arms[1:]:
    if not promised:
      out[arm.name] = {'promised': 'in law', 'requests': len(items)}
      continue
    found = []
    pairs = zip(items, text[arms[0].name], text[arm.name], strict=True)
    for item, plain, other in track(list(pairs), f'audit of {arm.name}'):
      case = audit.Case(
        item.tokens,
        plain,
        other,
        temperature=s.temperature,
        top_k=s.top_k,
        top_p=s.top_p,
        seed=s.seed,
        request=item.number,
      )
      finding = audit.audit(
        arm.model,
        arm.engine.target.params,
        case,
        gamma=arm.gamma,
        chunk=arm.engine.options.chunk,
        length=groups[0].host.tokens_BL.shape[1],
        relative_limit=audit.NOISE_LIMIT
        if arm.engine.target.config.dtype == 'float32'
        else None,
      )
      if finding.verdict != 'identical':
        found.append({'id': item.id} | dataclasses.asdict(finding))
    count = lambda verdict, found=found: sum(
      x['verdict'] == verdict for x in found
    )
    out[arm.name] = {
      'promised': 'tokens',
      'requests': len(items),
      'differing': len(found),
      'ties': count('tie'),
      'bugs': count('BUG'),
      'findings': found,
    }
  return out


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
  """Improvement of every arm at one batch size, prompts repeated to fill it."""
  items = list(plan.judged)
  need = -(-len(items) // size) * size
  filled = [
    dataclasses.replace(items[i % len(items)], number=i, category='')
    for i in range(need)
  ]
  groups = timing.grouper(arms, plan, rows=size)(filled)
  tracked = track(arms, f'compiling batch {size}')
  programs = _compiled(arms, groups[0].full, tracked)
  runs = timing.measure(arms, groups, programs, plan.repeats, track)
  plain = timing.speeds(runs[arms[0].name])
  rows = {
    arm.name: {
      'tok_s': metrics.spread(timing.speeds(runs[arm.name])),
      'improvement': metrics.walltime_improvement(
        timing.speeds(runs[arm.name]), plain
      ),
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
