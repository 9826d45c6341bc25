"""Predicts improvements from calibrated costs and measured acceptance.

Once from other prompts, before the judged ones run; afterwards from the judged
ones, which separates errors of cost from errors of acceptance. Acceptance is
teacher-forced: models read the text that plain decoding emitted, so alpha does
not depend on gamma, the rule or the draws of a run.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import cost, metrics
from specdec_jax.bench import plan as plan_lib

Array = jax.Array


class Overlap(NamedTuple):
  """Acceptance of the token at each index of a text; garbage outside the text.

  alpha_BL: sum_x min(p(x), q(x)).
  distance_BL: total variation between p and what a lossy rule emits there; 0
    for a lossless one.
  """

  alpha_BL: Array
  distance_BL: Array


@functools.partial(
  jax.jit, static_argnames=('target', 'draft', 'rule', 'chunk')
)
def overlap(
  weights: types.Weights,
  request: decode.Request,
  proposals_BL: Array | None,
  *,
  target: types.Model,
  draft: types.Model | None,
  rule: types.Rule,
  chunk: int,
) -> Overlap:
  """The Overlap of p and q along a text.

  Args:
    weights: of the target and of the draft.
    request: the prompts with the text after them; limit_B is where it ends.
    proposals_BL: for drafters without a draft model, the token proposed at each
      index; -1 where there is none, and alpha is 0.
    target, draft: the models; draft None for drafters without one.
    rule: gives the distribution that is emitted.
    chunk: tokens read at a time.
  """

  def columns(index_T, *logits):
    p_BTV, *q = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    if proposals_BL is None:
      (q_BTV,) = q
    else:
      token_BT = forward.at(proposals_BL, index_T)
      q_BTV = jax.nn.one_hot(token_BT, target.vocab)
    alpha_BT = jnp.sum(jnp.minimum(p_BTV, q_BTV), -1)
    distance_BT = jnp.zeros(alpha_BT.shape)
    if rule.emitted is not None:
      scores = types.Scores(logits[0], request.sampling)
      off_BTV = jnp.abs(rule.emitted(p_BTV, q_BTV, scores) - p_BTV)
      distance_BT = jnp.sum(off_BTV, -1) / 2
    return alpha_BT, distance_BT

  readers = [(target, weights.target)]
  readers += [] if draft is None else [(draft, weights.draft)]
  return Overlap(
    *forward.score(
      readers, request.tokens_BL, request.limit_B, columns, chunk=chunk
    )
  )


@functools.partial(jax.jit, static_argnames=('target', 'drafter', 'coupled'))
def propose_along(
  weights: types.Weights,
  request: decode.Request,
  steps: Array,
  *,
  target: types.Model,
  drafter: types.Drafter,
  coupled: bool,
):
  """Runs only the drafter, at `steps` consecutive prefixes of a fixed text.

  It starts again where the text ends. The target is not run; a drafter in its
  cache finds there what it wrote.

  Args:
    weights: of the target and of the draft.
    request: the prompts with the text after them; limit_B is where it ends.
    coupled: whether the rule couples the drafter's noise.

  Returns:
    (proposals_BL, check): the first token proposed for each index, -1 where
    none was, and a number that uses all the work.
  """
  B, L = request.tokens_BL.shape
  live_B = request.lengths_B < request.limit_B
  span_B = jnp.maximum(request.limit_B - request.lengths_B, 1)
  at = lambda i: types.Context(
    request.tokens_BL, request.lengths_B + i % span_B, live_B, request.sampling
  )
  zeros_B = jnp.zeros((B,), jnp.int32)
  zeros_BV = jnp.zeros((B, target.vocab))
  nothing = types.Outcome(zeros_B, zeros_B, zeros_B, zeros_BV)

  def body(i, carry):
    state, cache, proposals_BL, check = carry
    context = at(i)
    noise = sampling_lib.noise(
      request.seed_B,
      request.request_B,
      context.lengths_B,
      request.sampling,
      gamma=drafter.gamma,
      coupled=coupled,
    )
    draft, state, cache = drafter.propose(weights, state, context, noise, cache)
    state = drafter.commit(state, at(i + 1), nothing, None)
    index_B = jnp.where(live_B, context.lengths_B, L)
    token_B = jnp.where(draft.count_B > 0, draft.tokens_BK[:, 0], -1)
    proposals_BL = proposals_BL.at[jnp.arange(B), index_B].set(
      token_B, mode='drop'
    )
    return state, cache, proposals_BL, check + _sum(draft)

  carry = (
    drafter.init(weights, at(0), None),
    target.init_cache(B, L),
    jnp.full((B, L), -1, jnp.int32),
    jnp.int32(0),
  )
  return jax.lax.fori_loop(0, steps, body, carry)[2:]


def _sum(draft: types.Draft) -> Array:
  """A sum of all of a draft: XLA can leave out nothing that makes it."""
  total = jnp.sum(draft.tokens_BK) + jnp.sum(draft.count_B)
  if draft.q_BKV is not None:  # A real window reads what is written here.
    total += jnp.sum(draft.q_BKV[..., 0]).astype(total.dtype)
  return total


class Alpha(NamedTuple):
  """Acceptance of a drafter, teacher-forced; means over positions of a text.

  alpha: sum_x min(p(x), q(x)), 0 where nothing is proposed.
  alpha_where_proposed: alpha over positions with a proposal.
  total_variation: between p and the distribution that the rule emits.
  positions: number of positions.
  """

  alpha: float | None
  alpha_where_proposed: float | None
  total_variation: float | None
  positions: int


def alphas(
  arms: Sequence[plan_lib.Arm], groups, outputs, track: plan_lib.Track
) -> dict[str, Alpha]:
  """The Alpha of every drafter on plain decoding's text.

  outputs: by arm, one for each group.
  """
  drafters = {arm.drafter: arm for arm in arms[1:]}  # alpha is equal at all
  texts = list(zip(groups, outputs[arms[0].name], strict=True))
  out = {}
  for name, arm in drafters.items() if texts else ():
    columns = [
      _overlap(arm, group, plain)
      for group, plain in track(texts, f'alpha of {name}')
    ]
    text, proposed, alpha, distance = (
      np.concatenate(x) for x in zip(*columns, strict=True)
    )
    mean = lambda x, where: metrics.ratio(x[where].sum(), where.sum())
    out[name] = Alpha(
      mean(alpha, text),
      mean(alpha, text & proposed),
      mean(distance, text),
      int(text.sum()),
    )
  return out


def _overlap(arm: plan_lib.Arm, group: plan_lib.Group, plain: decode.Output):
  """(text_BL, proposed_BL, alpha_BL, distance_BL) of a group.

  text_BL: whether plain decoding emitted the token at an index. proposed_BL:
  whether the drafter proposes something there.
  """
  engine, (B, L) = arm.engine, plain.tokens_BL.shape
  request = group.full._replace(
    tokens_BL=plain.tokens_BL, limit_B=plain.lengths_B
  )
  proposals_BL = None
  if engine.q is None:
    proposals_BL, _ = propose_along(
      engine.weights,
      request,
      np.int32(np.max(plain.lengths_B - group.host.lengths_B)),
      target=engine.target.model,
      drafter=engine.drafter,
      coupled=engine.rule.coupled,
    )
  found = overlap(
    engine.weights,
    request,
    proposals_BL,
    target=engine.target.model,
    draft=engine.q,
    rule=engine.rule,
    chunk=engine.options.chunk,
  )
  index_1L = np.arange(L)[None]
  text_BL = (index_1L >= group.host.lengths_B[:, None]) & (
    index_1L < plain.lengths_B[:, None]
  )
  every_BL = np.ones((B, L), bool)
  proposed_BL = every_BL if proposals_BL is None else proposals_BL >= 0
  return text_BL, proposed_BL, *(np.asarray(x, np.float64) for x in found)


# --- what acceptance is worth ------------------------------------------------


class Prediction(NamedTuple):
  """Improvement over plain decoding by the cost model.

  tokens: emitted by a window, over those of a plain window of the batch.
  wide: share of windows verified at width gamma + 1.
  window_cost: in plain steps.
  improvement: tokens / window_cost.
  by_gamma: improvement at this and, estimated, at smaller gammas.
  best_gamma: the best of by_gamma, 0 where none is above 1.
  """

  tokens: float
  wide: float
  window_cost: float
  improvement: float
  by_gamma: dict[int, float]
  best_gamma: int


def improvements(arms, calibration, outputs) -> dict[str, Prediction]:
  """By arm, the Prediction from calibrated costs and these outputs.

  Without outputs nothing is predicted.
  """
  if not outputs[arms[0].name]:
    return {}
  infos = {arm.name: metrics.join(outputs[arm.name]) for arm in arms}
  base = metrics.tokens_per_window(infos[arms[0].name])
  return {
    arm.name: improvement(arm, calibration, infos[arm.name], base)
    for arm in arms[1:]
  }


def improvement(
  arm: plan_lib.Arm,
  calibration: Any,
  info: types.Info,
  base: float,
) -> Prediction:
  """The Prediction of one arm.

  Args:
    calibration: timing.Calibration.
    info: of the arm's outputs.
    base: tokens that a plain window of the batch emits, 1 at batch size 1.
  """
  tokens = metrics.tokens_per_window(info) / base
  wide = metrics.wide_share(info) if arm.engine.options.narrow else 1.0
  propose = calibration.propose[arm.name]
  # Early exit has already run part of the verify pass.
  rest = 1 - metrics.layers_share(
    arm.engine.target.params, arm.engine.drafter.exit
  )
  widths, costs = zip(*sorted(calibration.verify.items()), strict=True)
  idle = calibration.idle[arm.gamma + 1]
  hist = metrics.summary(info).accepted_histogram
  exact = cost.histogram_tokens(hist)

  def window(gamma):
    # Drafting time is proportional to gamma, but for a lookup.
    draft = propose * (gamma / arm.gamma if arm.engine.q else 1)
    verify = rest * float(np.interp(gamma + 1, widths, costs))
    return cost.window(draft, wide, verify, idle)

  by_gamma = {}
  for gamma in range(1, arm.gamma + 1):
    share = cost.histogram_tokens(cost.truncated(hist, gamma)) / exact
    by_gamma[gamma] = tokens * share / window(gamma)
  return Prediction(
    tokens=tokens,
    wide=wide,
    window_cost=window(arm.gamma),
    improvement=tokens / window(arm.gamma),
    by_gamma=by_gamma,
    best_gamma=cost.best(by_gamma),
  )
