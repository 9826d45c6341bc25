"""What the benchmark predicts: acceptance on a text, and what it is worth.

From the calibrated parts and from outputs of other prompts before the judged
ones run; afterwards from their own, which tells cost from acceptance apart.
"""

from typing import Any

import numpy as np

from specdec_jax import decode
from specdec_jax.bench import acceptance, cost, metrics, timing


def alphas(
  arms, groups, outputs, track: timing.Track
) -> dict[str, dict[str, Any]]:
  """Teacher-forced on plain decoding's text; one value per drafter."""
  last = {arm.drafter: arm for arm in arms[1:]}  # any gamma gives the same
  out = {}
  for name, arm in last.items():
    sums, kept, off, asked, text = [], [], [], [], []
    for group, plain in track(
      list(zip(groups, outputs[arms[0].name], strict=True)), f'alpha of {name}'
    ):
      request = group.full._replace(
        tokens_BL=plain.tokens_BL, limit_B=plain.lengths_B
      )
      overlap, proposed_BL = _overlap(arm, request)
      index_1L = np.arange(plain.tokens_BL.shape[1])[None]
      text_BL = (index_1L >= group.host.lengths_B[:, None]) & (
        index_1L < plain.lengths_B[:, None]
      )
      sums.append(np.asarray(overlap.alpha_BL))
      kept.append(np.asarray(overlap.kept_BL))
      off.append(np.asarray(overlap.distance_BL))
      asked.append(np.asarray(proposed_BL) & text_BL)
      text.append(text_BL)
    if not sums:
      continue
    sums, kept, off, asked, text = map(
      np.concatenate, (sums, kept, off, asked, text)
    )
    out[name] = {
      'alpha': metrics.alpha(sums, text),
      'alpha_where_proposed': metrics.alpha(sums, asked),
      'kept_where_proposed': metrics.alpha(kept, asked),
      'total_variation': metrics.alpha(off, text),
      'positions': int(text.sum()),
    }
  return out


def _overlap(arm: timing.Arm, request: decode.Request):
  weights, options = arm.engine.weights, arm.engine.options
  B, L = request.tokens_BL.shape
  tokens_BL = np.zeros((B, L), np.int32)
  proposed_BL = np.ones((B, L), bool)
  if arm.draft is None:
    tokens_BL, proposed_BL, _ = acceptance.walk(
      weights,
      request,
      np.int32(np.max(request.limit_B - request.lengths_B)),
      target=arm.model,
      drafter=arm.engine.drafter,
      coupled=arm.engine.rule.coupled,
    )
  overlap = acceptance.overlap(
    weights,
    request,
    tokens_BL,
    proposed_BL,
    target=arm.model,
    draft=arm.draft,
    rule=arm.engine.rule,
    chunk=options.chunk,
  )
  return overlap, proposed_BL


def improvements(
  arms, calibration, outputs, alphas
) -> dict[str, dict[str, Any]]:
  """Improvement of every arm from the parts and from these acceptances."""
  if not outputs[arms[0].name]:
    return {}
  infos = {a.name: timing.join(outputs[a.name]) for a in arms}
  plain = infos[arms[0].name]
  base = metrics.tokens_per_window(plain)
  return {
    a.name: improvement(
      a, calibration, infos[a.name], base, alphas.get(a.drafter)
    )
    for a in arms[1:]
  }


def improvement(arm: timing.Arm, calibration, info, base: float, alpha) -> dict:
  """base: tokens that a plain window of the batch emits, 1 at batch size 1."""
  narrow = arm.engine.options.narrow
  hist = metrics.summary(info)['accepted_histogram']
  tokens = metrics.tokens_per_window(info) / base
  wide = metrics.wide_share(info) if narrow else 1.0
  propose = calibration.propose[arm.name] / calibration.step
  # A drafter in the target's first layers has done part of the verify pass.
  rest = 1 - metrics.layers_share(
    arm.engine.target.params, arm.engine.drafter.exit
  )
  widths = cost.interpolated(calibration.verify)
  v = lambda n: rest * widths(n)
  idle = calibration.idle[arm.gamma + 1]
  exact = cost.histogram_tokens(hist)
  gammas = {}
  for g in range(1, arm.gamma + 1):
    # Drafting a shorter window costs in proportion; a lookup costs the same.
    draft = propose * (g / arm.gamma if arm.draft else 1)
    share = cost.histogram_tokens(cost.truncated(hist, g)) / exact
    gammas[g] = tokens * share / cost.window(draft, wide, v(g + 1), idle)
  window = cost.window(propose, wide, v(arm.gamma + 1), idle)
  independent = None
  # Equation 1 knows no window that stops where the draft is not sure.
  if alpha and alpha['alpha'] is not None and not arm.engine.drafter.stops:
    rate = metrics.summary(info)['proposal_rate'] or 0.0
    each = alpha['kept_where_proposed'] or 0.0
    independent = cost.sparse_tokens(min(each, 1.0), arm.gamma, rate) / window
  return {
    'tokens': tokens,
    'wide': wide,
    'window_cost': window,
    'improvement': tokens / window,
    'improvement_from_alpha': independent,
    'by_gamma': gammas,
    'best_gamma': cost.best(gammas),
  }
