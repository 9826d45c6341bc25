"""Predicts improvements from calibrated costs and measured acceptance.

Once from other prompts, before the judged ones run; afterwards from the judged
ones, which separates errors of cost from errors of acceptance. Acceptance is
teacher-forced: models read the text that plain decoding emitted, so alpha does
not depend on gamma, the rule or the draws of a run.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, forward, hosts, metrics, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import intervals
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.costs import cost, parts
from specdec_jax.models import work

Array = jax.Array


class Overlap(NamedTuple):
  """Acceptance of the token at each index of a text; garbage outside the text.

  alpha_BL: sum_x of types.Rule.kept, min(p(x), q(x)) if that is None.
  distance_BL: total variation between p and types.Rule.emitted; 0 if None.
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
    scores = types.Scores(logits[0], request.sampling)
    kept = rule.kept or (lambda p, q, _: jnp.minimum(p, q))
    alpha_BT = jnp.sum(kept(p_BTV, q_BTV, scores), -1)
    distance_BT = jnp.zeros(alpha_BT.shape)
    if rule.emitted is not None:
      off_BTV = jnp.abs(rule.emitted(p_BTV, q_BTV, scores) - p_BTV)
      distance_BT = jnp.sum(off_BTV, -1) / 2
    return alpha_BT, distance_BT

  readers = [(target, weights.target)]
  readers += [] if draft is None else [(draft, weights.draft)]
  return Overlap(
    *forward.score(
      readers,
      request.tokens_BL,
      request.lengths_B,
      request.limit_B,
      columns,
      chunk=chunk,
      source=request.source,
    )
  )


class Alpha(NamedTuple):
  """Acceptance of a drafter, teacher-forced; means over positions of a text.

  None is not known: of a lossy rule that does not say what it keeps or emits.

  alpha: sum_x of types.Rule.kept; 0 where nothing is proposed.
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
  """The Alpha of every drafter, at all gammas, on plain decoding's text.

  One whose q is not known (parts.has_q) has none.

  outputs: by arm, one for each group.
  """
  texts = list(zip(groups, outputs[arms[0].name], strict=True))
  known = (x for x in arms[1:] if texts and parts.has_q(x.engine, groups[0]))
  out = {}
  for name, arm in {arm.drafter: arm for arm in known}.items():
    rule = arm.engine.rule
    columns = [
      _overlap(arm, group, plain)
      for group, plain in track(texts, f'alpha of {name}')
    ]
    text, proposed, alpha, distance = (
      np.concatenate(x) for x in zip(*columns, strict=True)
    )

    mean = lambda x, where: metrics.ratio(x[where].sum(), where.sum())
    keeps = rule.lossless or rule.kept is not None
    emits = rule.lossless or rule.emitted is not None
    out[name] = Alpha(
      mean(alpha, text) if keeps else None,
      mean(alpha, text & proposed) if keeps else None,
      mean(distance, text) if emits else None,
      int(text.sum()),
    )
  return out


def _overlap(arm: plan_lib.Arm, group: plan_lib.Group, plain: decode.Output):
  """(text_BL, proposed_BL, alpha_BL, distance_BL) of a group.

  Whether plain decoding emitted the token at an index, and one is proposed.
  """
  engine, (B, L) = arm.engine, plain.tokens_BL.shape
  text = dict(tokens_BL=plain.tokens_BL, limit_B=plain.lengths_B)
  request = group.full._replace(**text)
  proposals_BL = None
  if engine.q is None:
    proposals_BL, _ = parts.propose_along(
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
  begin_B1, end_B1 = group.host.lengths_B[:, None], plain.lengths_B[:, None]
  text_BL = (index_1L >= begin_B1) & (index_1L < end_B1)
  # Past its context a model drafts nothing.
  most = L if engine.q is None else engine.q.context
  proposed_BL = np.broadcast_to(index_1L <= most, (B, L))
  if proposals_BL is not None:
    proposed_BL = hosts.fetch(proposals_BL) >= 0
  found = [x * proposed_BL for x in hosts.fetch(found)]
  return text_BL, proposed_BL, *(x.astype(np.float64) for x in found)


# --- what acceptance is worth ------------------------------------------------


class Prediction(NamedTuple):
  """Improvement over plain decoding by the cost model.

  tokens: emitted by a window, over those of a plain window of the batch.
  window_cost: in plain steps.
  improvement: tokens / window_cost.
  low, high: its 90 % interval for other prompts; None if not known.
  by_gamma: improvement at this and, estimated, at smaller gammas.
  best_gamma: the best of by_gamma, 0 where none is above 1.
  error: standard deviation of log improvement, from how much the prompts that
    it is predicted from differ; 0 if not known.
  """

  tokens: float
  window_cost: float
  improvement: float
  low: float | None
  high: float | None
  by_gamma: dict[int, float]
  best_gamma: int
  error: float = 0.0


def improvements(
  arms, calibration, outputs, judged: int = 0
) -> dict[str, Prediction]:
  """By arm, the Prediction from calibrated costs and these outputs.

  Args:
    arms: plain decoding first.
    calibration: a calibration.Calibration.
    outputs: by arm, one for each batch of prompts; plain decoding's may be
      missing at batch size 1, where its windows emit one token. Without
      outputs nothing is predicted.
    judged: batches of prompts to predict for; 0 gives no intervals.
  """
  base = outputs.get(arms[0].name)
  return {
    arm.name: improvement(arm, calibration, outputs[arm.name], base, judged)
    for arm in arms[1:]
    if outputs[arm.name]
  }


def improvement(
  arm: plan_lib.Arm,
  calibration: calibration_lib.Calibration,
  outputs: Sequence[decode.Output],
  plain: Sequence[decode.Output] | None,
  judged: int = 0,
) -> Prediction:
  """The Prediction of one arm.

  Args:
    arm: of improvements' arms, not plain decoding.
    calibration: times of the parts.
    outputs: of this arm, one a batch.
    plain: of plain decoding on the same batches; None: one token a window.
    judged: batches that the interval is for; 0 gives none.
  """
  hist = metrics.summary(metrics.join(outputs)).accepted_histogram
  exact = cost.histogram_tokens(hist)
  # Of each batch: emitted tokens, windows, and those by room for drafts.
  counts = lambda outputs: np.array([_counts(x.info) for x in outputs], float)
  mine, base = counts(outputs), counts(plain) if plain else None

  def tokens_and_widths(times_SG):
    sums_SX = times_SG @ mine
    tokens_S = sums_SX[..., 0] / sums_SX[..., 1]
    if base is not None:
      base_SX = times_SG @ base
      tokens_S = tokens_S / (base_SX[..., 0] / base_SX[..., 1])
    return tokens_S, sums_SX[..., 2:] / sums_SX[..., 1:2]

  count = len(outputs)
  tokens, widths_N = tokens_and_widths(np.ones(count))
  by_gamma = {}
  for gamma in range(1, arm.gamma + 1):
    share = cost.histogram_tokens(cost.truncated(hist, gamma)) / exact
    needed = window(arm, calibration, gamma, widths_N)
    by_gamma[gamma] = float(tokens * share / needed)
  value = by_gamma[arm.gamma]
  out, error = intervals.Interval(value), 0.0
  if judged and calibration.repeats:
    tokens_S, widths_SN = tokens_and_widths(intervals.resamples(count))
    apart = lambda cost_S: float(np.std(np.log(tokens_S / cost_S)))
    error = apart(window(arm, calibration, arm.gamma, widths_SN))
    # What is predicted is a sample of prompts too.
    sd = apart(_repeated(arm, calibration, widths_SN))
    sd *= (1 + count / judged) ** 0.5
    out = intervals.around(value, sd, count, 0.9)
  return Prediction(
    tokens=float(tokens),
    window_cost=float(tokens / value),
    improvement=value,
    low=out.low,
    high=out.high,
    by_gamma=by_gamma,
    best_gamma=cost.best(by_gamma),
    error=error * (count / max(count - 1, 1)) ** 0.5,
  )


def _repeated(arm, calibration, widths_SN):
  """Costs of windows, [S], each by one repeat of the calibration in turn: their
  error is that of one repeat."""
  each, cost_S = calibration.repeats, np.ones(len(widths_SN))
  for i, x in enumerate(each):
    some = slice(i, None, len(each))
    cost_S[some] = window(arm, x, arm.gamma, widths_SN[some])
  return cost_S


def by_category(
  arms, calibration, outputs, whole, known, judged
) -> dict[tuple[str, str], Prediction]:
  """By category and arm, the Prediction from the category's other prompts.

  It is drawn towards that of all other prompts; see `drawn`.

  Args:
    arms: plain decoding first; batch size 1.
    calibration: a calibration.Calibration.
    outputs: by arm, one for each other prompt.
    whole: by arm, the Prediction from all of them; see `improvements`.
    known: by category, the indices of its other prompts.
    judged: by category, the prompts to predict for.
  """
  out = {}
  for arm in arms[1:]:
    own = {}
    for name, some in known.items():
      if some and name in judged:
        seen = [outputs[arm.name][g] for g in some]
        count = len(judged[name])
        own[name] = improvement(arm, calibration, seen, None, count)
    if own:
      found = drawn([*own.values()], whole[arm.name])
      out |= {(x, arm.name): y for x, y in zip(own, found, strict=True)}
  return out


def drawn(found: Sequence[Prediction], whole: Prediction) -> list[Prediction]:
  """Predictions of categories, each drawn towards that of all prompts.

  A category is predicted from few prompts. By how much categories differ beyond
  their own errors is estimated by moments (random effects: DerSimonian and
  Laird 1986, https://doi.org/10.1016/0197-2456(86)90046-2), and a category
  keeps that share of its distance from all prompts, in logarithms.
  """
  known = [x.error**2 for x in found if x.error]
  if not known:
    return list(found)
  noise = sum(known) / len(known)
  apart = np.log([x.improvement / whole.improvement for x in found])
  real = max(float(np.mean(apart**2)) - noise, 0.0)
  scales = np.exp(-apart * noise / (real + noise))
  return [_scaled(x, float(y)) for x, y in zip(found, scales, strict=True)]


def _scaled(x: Prediction, by: float) -> Prediction:
  """The Prediction of that many times the emitted tokens."""
  by_gamma = {gamma: by * value for gamma, value in x.by_gamma.items()}
  return x._replace(
    tokens=by * x.tokens,
    improvement=by * x.improvement,
    low=None if x.low is None else by * x.low,
    high=None if x.high is None else by * x.high,
    by_gamma=by_gamma,
    best_gamma=cost.best(by_gamma),
  )


def each(arms, calibration, outputs) -> list[dict[str, float]]:
  """By arm, the improvement predicted from each batch of prompts alone."""
  count = min((len(x) for x in outputs.values()), default=0)
  of = lambda i: improvements(
    arms, calibration, {name: [x[i]] for name, x in outputs.items()}
  )
  return [{k: v.improvement for k, v in of(i).items()} for i in range(count)]


def slowest(arm: plan_lib.Arm, calibration) -> float:
  """Time of a token over plain decoding's, if a window emits 1.2 of them."""
  full_N = np.eye(arm.engine.drafter.gamma + 1)[arm.gamma]
  return float(window(arm, calibration, arm.gamma, full_N)) / 1.2


def _counts(info: types.Info) -> list[int]:
  emitted = metrics.summary(metrics.rows(info)).emitted_tokens
  return [emitted, max(int(info.calls), 1), *info.widths_N.tolist()]


def window(arm: plan_lib.Arm, calibration, gamma: int, widths_SN):
  """Mean cost of a window of at most gamma drafts, in plain steps.

  widths_SN: shares of windows by the drafts that they have room for.
  """
  engine, at_count = arm.engine, calibration_lib.interpolated
  # Early exit has already run part of the verify pass.
  rest = 1 - work.layers_share(engine.target.params, engine.drafter.exit)
  # Windows with more room than gamma would be of gamma.
  room_N = np.minimum(np.arange(widths_SN.shape[-1]), gamma)
  # No pass takes less time than a plain step: where one seems to, it was noise.
  passes_N = calibration_lib.at_width(calibration.verify, room_N + 1)
  cost_N = rest * np.maximum(passes_N, 1)
  cost_N[0] = max(calibration.idle, 1)
  # Which of several drafted is not counted: as if the dearest always did.
  drafters = [x.drafter for x in engine.parts] or [engine.drafter]
  each = [at_count(calibration.propose[x.name], room_N) for x in drafters]
  return widths_SN @ (cost_N + np.max(each, 0))
