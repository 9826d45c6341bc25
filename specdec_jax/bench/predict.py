"""Predicts improvements from calibrated costs and measured acceptance.

First from the calibration prompts, before the test prompts run; then from the
test prompts, which separates errors of cost from errors of acceptance. Alpha is
teacher-forced: models read plain decoding's text, which does not depend on
gamma, the rule or a run's draws.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specdec_jax import along, decode, forward, hosts, metrics, printing, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import intervals, records
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.drafters import branch
from specdec_jax.models import work

Array = jax.Array


def under(
  rule: types.Rule, p_BTV: Array, q_BTV: Array, scores: types.Scores
) -> tuple[Array, Array]:
  """Computes a rule's (alpha_BT, distance_BT) at every token.

  alpha: sum_x of types.Rule.kept, min(p(x), q(x)) if that is None.
  distance: total variation between p and types.Rule.emitted; 0 if None.
  """
  kept = rule.kept or (lambda p, q, _: jnp.minimum(p, q))
  alpha_BT = jnp.sum(kept(p_BTV, q_BTV, scores), -1)
  if rule.emitted is None:
    return alpha_BT, jnp.zeros(alpha_BT.shape)
  off_BTV = jnp.abs(rule.emitted(p_BTV, q_BTV, scores) - p_BTV)
  return alpha_BT, jnp.sum(off_BTV, -1) / 2


@functools.partial(jax.jit, static_argnames=('loop', 'q'))
def overlap(
  weights: types.Weights,
  request: decode.Request,
  *,
  loop: decode.Loop,
  q: types.Model | types.Drafter | None = None,
) -> Sequence[Array]:
  """Computes `under` along a text: [alpha_BL, distance_BL], garbage outside it.
  At every token q is that of a window's first draft.

  request: the prompts with the text after them; limit_B is where it ends.
  q: as in drafters.method.Method. A model reads the text as the target does.
  """
  target, sampling = (loop.target, weights.target), request.sampling
  text = request.tokens_BL, request.lengths_B, request.limit_B

  def columns(logits_BTV, q_BTV):
    p_BTV = sampling_lib.probabilities(logits_BTV, sampling)
    scores = types.Scores(logits_BTV, sampling)
    return under(loop.rule, p_BTV, q_BTV, scores)

  if isinstance(q, types.Model):
    return forward.score(
      [target, (q, weights.draft)],
      *text,
      lambda _, p, q: columns(p, sampling_lib.probabilities(q, sampling)),
      chunk=loop.options.chunk,
      source=request.source,
    )

  loop = loop._replace(drafter=q or loop.drafter)
  return along.score(loop, weights, request, columns)


def alphas(
  arms: Sequence[plan_lib.Arm], groups, plain: Sequence[decode.Output]
) -> dict[str, records.Alpha]:
  """Measures Alpha on plain decoding's text, for every arm but the first.

  Arms with one engine share it. One around others has none: which of them
  proposes depends on what was accepted before. plain: one output a group, of
  which the first few are read.
  """
  texts = list(zip(groups, plain, strict=True))[: records.READ]
  found = {}
  for arm in {id(arm.engine): arm for arm in arms[1:]}.values():
    if not texts or arm.engine.parts:
      continue
    rule = arm.engine.rule
    shown = printing.track(texts, f'alpha of {arm.drafter}')
    columns = zip(*(_overlap(arm, *text) for text in shown), strict=True)
    alpha_X, distance_X = map(np.concatenate, columns)
    mean = lambda x_X: metrics.ratio(x_X.sum(), len(x_X))
    keeps = rule.lossless or rule.kept is not None
    emits = rule.lossless or rule.emitted is not None
    found[id(arm.engine)] = records.Alpha(
      mean(alpha_X) if keeps else None, mean(distance_X) if emits else None
    )
  known = [arm for arm in arms[1:] if id(arm.engine) in found]
  return {arm.name: found[id(arm.engine)] for arm in known}


def _overlap(arm: plan_lib.Arm, group: plan_lib.Group, plain: decode.Output):
  """Returns (alpha_X, distance_X) at the tokens that plain decoding emitted."""
  engine, index_BL = arm.engine, np.indices(plain.tokens_BL.shape)[1]
  begin_B = np.array([len(x.tokens) for x in group.items])
  text = dict(tokens_BL=plain.tokens_BL, limit_B=plain.lengths_B)
  given = engine.weights, group.full._replace(**text)
  found = hosts.fetch(overlap(*given, loop=engine.loop, q=engine.q))
  text_BL = index_BL >= begin_B[:, None]
  text_BL &= index_BL < plain.lengths_B[:, None]
  if isinstance(engine.q, types.Model):  # past its context it drafts nothing
    found = [x * (index_BL <= engine.q.context) for x in found]
  return [x[text_BL].astype(np.float64) for x in found]


# --- what acceptance is worth ------------------------------------------------


class Counts(NamedTuple):
  """What a method and plain decoding did on each batch G.

  emitted_G, plain_G: tokens. windows_G, steps_G: the target's passes.
  widths_GN: windows by the number of drafts that they had room for.
  second_GN: those for which the second of two drafters drafted.
  """

  emitted_G: np.ndarray
  windows_G: np.ndarray
  widths_GN: np.ndarray
  second_GN: np.ndarray
  plain_G: np.ndarray
  steps_G: np.ndarray


def counted(
  outputs: Sequence[decode.Output], plain: Sequence[decode.Output] | None
) -> Counts:
  """Counts outputs by batch; plain=None: plain windows emit one token."""
  widths, second = zip(*(metrics.windows(x.info) for x in outputs), strict=True)
  emitted = [metrics.emitted(x.info) for x in outputs]
  windows = [max(x.sum(), 1) for x in widths]
  usual = counted(plain, None)[:2] if plain else [[1.0] * len(outputs)] * 2
  found = emitted, windows, widths, second, *usual
  return Counts(*(np.array(x, float) for x in found))


def gain(arm: plan_lib.Arm, calibration, found: Counts, times_SG):
  """Returns improvements [S] by the cost model, each batch so many times."""
  total = lambda x_G: times_SG @ x_G
  widths = total(found.widths_GN), total(found.second_GN)
  own = total(found.emitted_G) / window_cost(arm, calibration, *widths)
  return own * total(found.steps_G) / total(found.plain_G)


def window_cost(
  arm: plan_lib.Arm,
  calibration: calibration_lib.Calibration,
  widths_SN,
  second_SN,
):
  """Returns what the arm's windows cost, in plain steps; widths_SN, second_SN:
  how many there are, or their shares, as Counts has them."""
  engine = arm.engine
  # Early exit has already run part of the verify pass.
  rest = 1 - work.layers_share(engine.target.params, engine.drafter.exit)
  # No window has more room than gamma, whatever its program holds.
  room_N = np.minimum(np.arange(widths_SN.shape[-1]), arm.gamma)
  cost_N = rest * calibration_lib.at_width(calibration.verify, room_N + 1)
  cost_N[0] = calibration.idle
  # Of two the first is asked in every window.
  first, *others = [x.drafter for x in engine.parts] or [engine.drafter]
  cost_N = cost_N + _drafting(calibration, first, room_N)
  cost_S = widths_SN @ cost_N
  for second in others:
    drafting_N = _drafting(calibration, second, room_N)
    cost_S += (widths_SN - second_SN).sum(-1) * drafting_N[0]
    cost_S += second_SN @ drafting_N
  return cost_S


def _drafting(calibration, drafter: types.Drafter, room_N) -> np.ndarray:
  """Returns what drafting costs, by a window's room; all likeliest nodes are
  drafted before it is known how many pay."""
  timed = calibration.propose[drafter.name]
  if branch.is_ranked(drafter):
    room_N = np.where(room_N > 0, drafter.gamma, 0)
  return calibration_lib.interpolated(timed, room_N)


def likely(arm: plan_lib.Arm, calibration) -> float:
  """Guesses a token's time over plain decoding's: full windows, of whose drafts
  0.4 are accepted; at least 1, for drafters that seldom propose."""
  full_N = np.eye(arm.engine.drafter.gamma + 1)[arm.gamma]
  cost = float(window_cost(arm, calibration, full_N, full_N))
  return max(1.0, cost / (1 + 0.4 * arm.gamma))


def interval(
  value: float,
  arm: plan_lib.Arm,
  calibration: calibration_lib.Calibration,
  found: Counts,
  batches: int,
) -> intervals.Interval:
  """Returns an improvement's 90 % interval on so many other batches.

  Adds how its logarithm varies without each batch seen (a jackknife), between
  repeats of the calibration, and between runs, which neither shows. batches=0:
  the least and the most by the repeats.
  """
  count = len(found.windows_G)
  every_G, less_GG = np.ones(count), 1 - np.eye(count)
  costs = [float(gain(arm, x, found, every_G)) for x in calibration.repeats]
  if costs and not batches:
    return intervals.Interval(value, min(costs), max(costs))
  if count < 2 or not costs:
    return intervals.Interval(value)
  left_G = np.log(gain(arm, calibration, found, less_GG))
  error, runs = calibration_lib.between_runs()
  # What is predicted is a sample of prompts too.
  prompts = (count - 1) * np.var(left_G) * (1 + count / batches)
  parts = np.array([prompts, np.var(np.log(costs)), error**2])
  known = np.array([count - 1, max(len(costs) - 1, 1), runs])
  # The degrees of freedom of a sum of variances (Satterthwaite 1946).
  freedom = parts.sum() ** 2 / (parts**2 / known).sum()
  factor = float(np.exp(stats.t.ppf(0.95, freedom) * parts.sum() ** 0.5))
  return intervals.Interval(value, value / factor, value * factor)


def improvement(
  arm: plan_lib.Arm,
  calibration: calibration_lib.Calibration,
  outputs: Sequence[decode.Output],
  plain: Sequence[decode.Output] | None = None,
  batches: int = 0,
) -> records.Prediction:
  """Predicts one arm, not plain decoding; see improvements."""
  found = counted(outputs, plain)
  value = float(gain(arm, calibration, found, np.ones(len(outputs))))
  widths = found.widths_GN.sum(0), found.second_GN.sum(0)
  cost = float(window_cost(arm, calibration, *widths) / found.windows_G.sum())
  _, low, high = interval(value, arm, calibration, found, batches)
  summary = metrics.summary(metrics.join(outputs))
  sizes = by_size(arm, calibration, summary, widths, value)
  return records.Prediction(value * cost, cost, value, low, high, sizes)


def by_size(arm, calibration, counts: metrics.Summary, widths, value: float):
  """Estimates the improvement by an arm's windows and by smaller ones.

  A chain, by its gamma: cuts off what was accepted beyond a smaller one. A
  tree, by its levels, '4,2': the first ones, each with at most so many nodes,
  would have accepted what it did, except what hangs on other nodes. Likeliest
  nodes: fewer of them. The arm's own is last; {} for a tree around others.

  widths: as window_cost takes them. value: the arm's own.
  """
  engine, timed, found = arm.engine, calibration_lib.interpolated, {}
  for name, deep, wide, nodes, drafted in _smaller(engine):
    kept = sum(x[wide - 1] for x in counts.accepted_by_width[:deep])
    needed = float(timed(calibration.verify, nodes + 1))
    needed += float(timed(calibration.propose[engine.drafter.name], drafted))
    found[name] = (counts.target_calls + kept) / needed
  if not engine.drafter.tree:
    windows_N = np.array(counts.accepted_histogram)
    emitted_N = 1 + np.arange(len(windows_N))
    for gamma in range(1, 1 + arm.gamma):
      tokens = windows_N @ np.minimum(emitted_N, 1 + gamma)
      needed = window_cost(arm._replace(gamma=gamma), calibration, *widths)
      found[str(gamma)] = float(np.sum(tokens / needed))
  own = [*found.values()][-1:]
  return {name: value * x / own[0] for name, x in found.items()}


def _smaller(engine):
  """Yields a tree's (name, levels, nodes a level, nodes, nodes drafted), the
  drafter's own last; among likeliest nodes no levels count."""
  levels, gamma = engine.drafter.tree, engine.drafter.gamma
  if engine.parts:
    return
  if branch.is_ranked(engine.drafter):
    for count in range(1, 1 + gamma):
      name = f'best:{count}'
      drafted = gamma * len(branch.levels_of(name)) / len(levels)
      yield name, gamma, count, count, drafted
    return
  sizes = range(1, 1 + len(levels)), range(1, 1 + max(levels, default=0))
  for deep, wide in itertools.product(*sizes):
    part = [min(x, wide) for x in levels[:deep]]
    name = ','.join(map(str, part))
    yield name, deep, max(part), sum(part), sum(levels[:deep])


def improvements(
  arms, calibration, outputs, batches: int = 0
) -> dict[str, records.Prediction]:
  """Predicts every arm from calibrated costs and these outputs.

  outputs: by arm, one a batch; none predict nothing. Plain decoding's may be
    missing at batch size 1, where its windows emit one token.
  batches: how many to predict for; 0: see `interval`.
  """
  plain = outputs.get(arms[0].name)
  return {
    x.name: improvement(x, calibration, outputs[x.name], plain, batches)
    for x in arms[1:]
    if outputs[x.name]
  }


def gains(arms, calibration, outputs) -> dict[str, np.ndarray]:
  """Returns [G] by arm: the improvement predicted from each batch alone."""
  plain = outputs.get(arms[0].name)
  return {
    x.name: gain(x, calibration, counted(mine, plain), np.eye(len(mine)))
    for x in arms[1:]
    if (mine := outputs[x.name])
  }
