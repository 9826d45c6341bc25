"""The law of one window, by every outcome of its draws.

X counts problems, R draft paths, of which there are V ** K.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.certify import pairs


def breaks(rule: types.Rule, noise: types.Noise, draft: types.Draft, p_BNV):
  """Where the accept test of each offset flips: [B, K], the least u that fails.

  Found by bisection over the floats of [0, 1), not taken from a formula. Offset
  k is tried with all other tests passing and with all failing; 1 where it makes
  no difference in either. Assumes at most one flip a test, each at a place that
  the other uniforms do not move; outcomes_of checks that with random uniforms.
  """
  B, K = draft.tokens_BK.shape
  dtype = p_BNV.dtype
  integer = {4: jnp.int32, 8: jnp.int64}[dtype.itemsize]
  float_of = lambda bits: jax.lax.bitcast_convert_type(bits, dtype)
  one = jax.lax.bitcast_convert_type(jnp.ones((), dtype), integer)
  top = float_of(one - 1)

  def outcome(k, u_B, others):
    u_BK = jnp.full((B, K), others, dtype).at[:, k].set(u_B)
    return rule.verify(noise._replace(accept_BK=u_BK), draft, p_BNV)

  def same(x, y):
    # Two places of one program may round the same sum apart.
    size_B1 = jnp.maximum(jnp.max(x.weights_BV, -1, keepdims=True), 1)
    slack_B1 = 64 * jnp.finfo(dtype).eps * size_B1
    close_BV = jnp.abs(x.weights_BV - y.weights_BV) <= slack_B1
    close_BV |= jnp.isnan(x.weights_BV) & jnp.isnan(y.weights_BV)
    return (x.accepted_B == y.accepted_B) & jnp.all(close_BV, -1)

  cases = [(k, others) for k in range(K) for others in (0.0, top)]
  low = [outcome(k, jnp.zeros(B, dtype), others) for k, others in cases]

  def halve(_, carry):
    new = []
    for (k, others), base, (low_B, high_B) in zip(
      cases, low, carry, strict=True
    ):
      middle_B = low_B + (high_B - low_B) // 2
      still_B = same(outcome(k, float_of(middle_B), others), base)
      new.append(
        (
          jnp.where(still_B, middle_B, low_B),
          jnp.where(still_B, high_B, middle_B),
        )
      )
    return new

  # At low the outcome is that of u = 0; at high it differs, or high is 1.
  start = [(jnp.zeros(B, integer), jnp.full(B, one, integer)) for _ in cases]
  ends = jax.lax.fori_loop(0, dtype.itemsize * 8, halve, start)
  t_BC = jnp.stack([float_of(high_B) for _, high_B in ends], 1)
  t_BK2 = t_BC.reshape(B, K, 2)
  return jnp.where(t_BK2[..., 0] < 1, t_BK2[..., 0], t_BK2[..., 1])


class Windows(NamedTuple):
  """Every draft path of every problem as one batch, B = X * R."""

  draft: types.Draft
  p_BNV: jax.Array
  chance_XR: np.ndarray  # of each path, float64


def windows(p_XNVV, q_XKVV, count_X, script_XK=None) -> Windows:
  """The batch for window_law; with a script, drafts are certain (q None)."""
  X, N, V, _ = p_XNVV.shape
  K = N - 1
  paths_RK = np.array(
    list(itertools.product(range(V), repeat=K)), np.int32
  ).reshape(-1, K)
  R = len(paths_RK)
  before_RN = np.pad(paths_RK, ((0, 0), (1, 0)))
  p_XRNV = p_XNVV[:, np.arange(N)[None], before_RN]
  if script_XK is None:
    q_XRKV = q_XKVV[:, np.arange(K)[None], before_RN[:, :K]]
    taken = np.take_along_axis(
      pairs.normal(q_XRKV.astype(np.float64)), paths_RK[None, ..., None], -1
    )[..., 0]
    chance_XR = taken.prod(-1)
    q_BKV = jnp.asarray(q_XRKV.reshape(X * R, K, V))
  else:
    chance_XR = (paths_RK[None] == script_XK[:, None]).all(-1).astype(float)
    q_BKV = None
  tokens_BK = jnp.asarray(np.tile(paths_RK, (X, 1)))
  draft = types.Draft(tokens_BK, q_BKV, jnp.asarray(np.repeat(count_X, R)))
  return Windows(draft, jnp.asarray(p_XRNV.reshape(X * R, N, V)), chance_XR)


class NotEnumerable(Exception):
  """The rule is no step function of its accept uniforms."""


class Outcomes(NamedTuple):
  """What a rule does on every side of its accept tests, 2 ** K patterns.

  t_BK: breaks. passes_PK: the patterns. accepted_PB, weights_PBV: the verdicts.
  """

  t_BK: np.ndarray
  passes_PK: np.ndarray
  accepted_PB: np.ndarray
  weights_PBV: np.ndarray


def run_rule(rule: types.Rule, batch: Windows, accept_BK):
  """(accepted_B, weights_BV) of rule.verify with injected uniforms."""
  verdict = _verify(rule.verify, accept_BK, batch.draft, batch.p_BNV)
  return np.asarray(verdict.accepted_B), np.asarray(verdict.weights_BV)


def outcomes_of(rule: types.Rule, batch: Windows, seed: int = 0) -> Outcomes:
  """Runs the rule once for every pattern of passing and failing tests.

  Raises:
    NotEnumerable: the rule draws for itself, or random uniforms lead elsewhere
      than the patterns say.
  """
  t_BK = np.asarray(_breaks(rule, batch.draft, batch.p_BNV))
  K, dtype = t_BK.shape[1], t_BK.dtype
  passes_PK = np.array(
    list(itertools.product((True, False), repeat=K)), bool
  ).reshape(-1, K)
  between = lambda passes: np.where(passes, t_BK / 2, (1 + t_BK) / 2)
  # (1 + t) / 2 is 1 for the largest t below 1.
  under = lambda u: np.minimum(u, np.nextafter(dtype.type(1), dtype.type(0)))
  runs = [run_rule(rule, batch, under(between(x))) for x in passes_PK]
  accepted_PB, weights_PBV = map(np.stack, zip(*runs, strict=True))
  rng = np.random.default_rng(seed)
  row_B = np.arange(len(t_BK))
  can_B = batch.chance_XR.reshape(-1) > 0  # the other paths are never drafted
  for _ in range(3):
    u_BK = rng.random(t_BK.shape).astype(dtype)
    accepted_B, weights_BV = run_rule(rule, batch, under(u_BK))
    which_B = (u_BK >= t_BK) @ (1 << np.arange(K)[::-1])
    same_B = accepted_B == accepted_PB[which_B, row_B]
    same_B &= np.isclose(
      weights_BV, weights_PBV[which_B, row_B], rtol=0, atol=0, equal_nan=True
    ).all(-1)
    if not same_B[can_B].all():
      raise NotEnumerable('its verdict is no step function of its uniforms')
  return Outcomes(t_BK, passes_PK, accepted_PB, weights_PBV)


@functools.partial(jax.jit, static_argnums=0)
def _verify(verify, accept_BK, draft, p_BNV):
  return verify(
    types.Noise(accept_BK, draws_nothing, draws_nothing), draft, p_BNV
  )


@functools.partial(jax.jit, static_argnums=0)
def _breaks(rule, draft, p_BNV):
  empty = jnp.zeros(draft.tokens_BK.shape, p_BNV.dtype)
  return breaks(
    rule, types.Noise(empty, draws_nothing, draws_nothing), draft, p_BNV
  )


def draws_nothing(*_):
  raise NotEnumerable('it draws inside verify')


def draws(rule: types.Rule) -> bool:
  """Whether the rule draws for itself, beyond its accept uniforms."""
  p_XNVV = np.full((1, 2, 2, 2), 0.5)
  batch = windows(p_XNVV, p_XNVV[:, :1], np.ones(1, np.int32))
  try:
    jax.eval_shape(functools.partial(_breaks, rule), batch.draft, batch.p_BNV)
  except NotEnumerable:
    return True
  return False


def not_enumerable(rule: types.Rule) -> str:
  """Why walks cannot enumerate the rule; '' if they can."""
  if rule.coupled or draws(rule):
    return 'it draws inside verify'
  rng = np.random.default_rng(0)
  p_XNVV, q_XKVV = (rng.dirichlet(np.ones(3), (8, n, 3)) for n in (3, 2))
  batch = windows(p_XNVV, q_XKVV, np.full(8, 2, np.int32))
  try:
    outcomes_of(rule, batch)
  except NotEnumerable as why:
    return str(why)
  return ''


def mute(noise: types.Noise) -> types.Noise:
  return types.Noise(noise.accept_BK, draws_nothing, draws_nothing)


def window_law(rule: types.Rule, batch: Windows, p_XNVV) -> np.ndarray:
  """Exact law of N tokens: one window of the rule, then the target alone.

  Returns [X, V, ..., V] in float64.

  Raises:
    NotEnumerable: as outcomes_of.
    ValueError: a verdict that accepts more than was proposed.
  """
  X, R = batch.chance_XR.shape
  N, V = batch.p_BNV.shape[1:]
  K = N - 1
  p_XNVV = pairs.normal(p_XNVV.astype(np.float64))
  every = outcomes_of(rule, batch)
  if (
    not (0 <= every.accepted_PB).all()
    or (every.accepted_PB > np.asarray(batch.draft.count_B)).any()
  ):
    raise ValueError(f'{rule.name} accepts more tokens than were proposed')
  t_BK = every.t_BK.astype(np.float64)
  mass = np.zeros((N, X, R, V))
  for passes_K, accepted_B, weights_BV in zip(*every[1:], strict=True):
    chance_B = np.where(passes_K, t_BK, 1 - t_BK).prod(-1)
    chance_XR = chance_B.reshape(X, R) * batch.chance_XR
    law_BV = next_law(batch.p_BNV, accepted_B, weights_BV)
    for a in range(N):
      here_XR = chance_XR * (accepted_B == a).reshape(X, R)
      mass[a] += here_XR[..., None] * law_BV.reshape(X, R, V)
  law = np.zeros((X,) + (V,) * N)
  for a in range(N):
    part = mass[a].reshape((X,) + (V,) * N).sum(tuple(range(1 + a, 1 + K)))
    law += _continue(part, p_XNVV, a + 1)
  return law


def next_law(p_BNV, accepted_B, weights_BV) -> np.ndarray:
  """The law of the token after the accepted ones, as decode draws it."""
  weights_BV = weights_BV.astype(np.float64)
  p_BV = np.asarray(p_BNV)[np.arange(len(accepted_B)), accepted_B]
  empty_B1 = ~(weights_BV.sum(-1, keepdims=True) > 0)
  return pairs.normal(np.where(empty_B1, p_BV, weights_BV).astype(np.float64))


def target_law(p_XNVV) -> np.ndarray:
  """What window_law must equal."""
  p_XNVV = pairs.normal(p_XNVV.astype(np.float64))
  return _continue(p_XNVV[:, 0, 0], p_XNVV, 1)


def _continue(law, p_XNVV, start):
  """Extends [X, V, ..., V] by the target's own law, to N tokens."""
  X, N, V, _ = p_XNVV.shape
  for k in range(start, N):
    one = (1,) * (law.ndim - 2)
    law = law[..., None] * p_XNVV[:, k].reshape((X, *one, V, V))
  return law


def length_law(rule: types.Rule, p_V, q_V, gamma: int) -> np.ndarray:
  """Law of the drafts accepted in a window of independent tokens: [gamma + 1].

  In closed form for `reject` (Leviathan et al. 2023, section 3.1) and coupled
  rules (two races over the same arrivals), else by enumeration.

  Raises:
    NotEnumerable: as outcomes_of.
  """
  of_rate = lambda a: np.append((1 - a) * a ** np.arange(gamma), a**gamma)
  if rule.name == 'reject':
    return of_rate(np.minimum(p_V, q_V).sum())
  if rule.coupled:
    ratio = lambda w: w[None] / w[:, None]
    return of_rate((1 / np.maximum(ratio(p_V), ratio(q_V)).sum(1)).sum())
  V = len(p_V)
  wide = lambda x, n: np.broadcast_to(x, (1, n, V, V)).astype(np.float64)
  batch = windows(wide(p_V, gamma + 1), wide(q_V, gamma), np.array([gamma]))
  every = outcomes_of(rule, batch)
  law = np.zeros(gamma + 1)
  for passes_K, accepted_B, _ in zip(*every[1:], strict=True):
    chance_B = np.where(passes_K, every.t_BK, 1 - every.t_BK).prod(1)
    law += np.bincount(
      accepted_B, chance_B * batch.chance_XR[0], minlength=gamma + 1
    )
  return law


def first_token_law(rule: types.Rule, p_2V, q_V, kept_R) -> np.ndarray:
  """Law of a window's first token at gamma 1, over a real vocabulary: [V].

  kept_R: the tokens that the draft can draw; q is 0 elsewhere.

  Raises:
    NotEnumerable: as outcomes_of.
  """
  R, V = len(kept_R), len(q_V)
  batch = Windows(
    types.Draft(
      jnp.asarray(kept_R[:, None]),
      jnp.broadcast_to(q_V, (R, 1, V)),
      jnp.ones(R, jnp.int32),
    ),
    jnp.broadcast_to(p_2V, (R, 2, V)),
    pairs.normal(q_V[kept_R].astype(np.float64))[None],
  )
  every = outcomes_of(rule, batch)
  t_R = every.t_BK[:, 0].astype(np.float64)
  p_R2V, law = np.asarray(batch.p_BNV), np.zeros(V)
  for passes_K, accepted_R, weights_RV in zip(*every[1:], strict=True):
    chance_R = batch.chance_XR[0] * (t_R if passes_K[0] else 1 - t_R)
    yes_R = accepted_R == 1
    np.add.at(law, kept_R[yes_R], chance_R[yes_R])
    left = next_law(p_R2V[~yes_R], accepted_R[~yes_R], weights_RV[~yes_R])
    law += chance_R[~yes_R] @ left
  return law
