"""Is a rule exact? Laws by enumeration, and by counting.

Drives the production rule, or the whole production step, with injected noise:
every draft path, every side of every accept test and every next token is taken
once, with its probability, so nothing is estimated. Knows no model.

    X  problems        R  draft paths, V ** K of them
"""

import functools
import itertools
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, sampling, types
from specdec_jax.eval import pairs

# --- the law of one window ----------------------------------------------------


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


def _mute(noise: types.Noise) -> types.Noise:
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


# --- the joint law of consecutive windows -------------------------------------


class Choice(NamedTuple):
  """One outcome of every draw of a window."""

  draft_BK: Any
  passes_BK: Any
  next_B: Any


def step_with(target, drafter, rule: types.Rule):
  """The production decode.step with chosen outcomes instead of noise.

  Returns jitted (weights, request, state, info, choice) -> (state, info,
  chance_B): chance_B is the probability of the choice given the state.
  """

  def run(weights, request, state, info, choice: Choice):
    seen = {}

    def verify(noise, draft, p_BNV):
      t_BK = breaks(rule, _mute(noise), draft, p_BNV)
      seen.update(draft=draft, t_BK=t_BK)
      accept_BK = jnp.where(choice.passes_BK, t_BK / 2, (1 + t_BK) / 2)
      # A rule that draws for itself raises NotEnumerable.
      own = _mute(noise)._replace(accept_BK=accept_BK)
      return rule.verify(own, draft, p_BNV)

    def next_token(offset_B, weights_BV):
      seen.update(weights_BV=weights_BV)
      return choice.next_B

    noise = types.Noise(
      jnp.zeros(choice.draft_BK.shape),
      lambda offset, q_BV: jnp.take(choice.draft_BK, offset, axis=1),
      next_token,
    )
    with mock.patch.object(sampling, 'noise', lambda *_, **__: noise):
      state, info = decode.step(
        target,
        drafter,
        rule._replace(verify=verify),
        decode.Options(narrow=False),
        weights,
        request,
        state,
        info,
      )
    draft, t_BK = seen['draft'], seen['t_BK']
    of = lambda w, at: (
      jnp.take_along_axis(w, at[..., None], -1)[..., 0] / jnp.sum(w, -1)
    )
    if draft.q_BKV is None:
      drawn_BK = draft.tokens_BK == choice.draft_BK
    else:
      drawn_BK = of(draft.q_BKV, choice.draft_BK)
    sides_BK = jnp.where(choice.passes_BK, t_BK, 1 - t_BK)
    chance_B = of(seen['weights_BV'], choice.next_B)
    return state, info, jnp.prod(drawn_BK * sides_BK, 1) * chance_B

  return jax.jit(run)


def outcomes(vocab: int, gamma: int) -> Choice:
  """Every Choice of one window, as a batch."""
  every = itertools.product(
    itertools.product(range(vocab), repeat=gamma),
    itertools.product((True, False), repeat=gamma),
    range(vocab),
  )
  draft, passes, following = zip(*every, strict=True)
  return Choice(
    np.array(draft, np.int32).reshape(len(draft), gamma),
    np.array(passes, bool).reshape(len(draft), gamma),
    np.array(following, np.int32),
  )


def walk(step, weights, request, state, info, choices: Choice, *, windows):
  """All texts of some consecutive windows, with their probabilities.

  step is step_with's. request, state and info have any number of equal rows:
  the size of the batches that are run. Returns (tokens_RL, lengths_R,
  chance_R).
  """
  size, O = state.lengths_B.shape[0], len(choices.next_B)
  # A drafter may keep its rows on any axis, or something without rows.
  axes, tree = jax.tree.flatten(state)
  axes = [x.shape.index(size) if size in x.shape else None for x in axes]
  take = lambda leaves, index: [
    x if axis is None else np.take(x, index, axis)
    for x, axis in zip(leaves, axes, strict=True)
  ]
  host = lambda state: [np.asarray(x) for x in jax.tree.leaves(state)]
  rows, chance_R = take(host(state), [0]), np.ones(1)
  for _ in range(windows):
    R = len(chance_R)
    parts, chances = [], []
    for at in range(0, R * O, size):
      index = np.arange(at, at + size)
      live = index < R * O
      index = np.where(live, index, 0)
      new, _, chance_B = step(
        weights,
        request,
        jax.tree.unflatten(tree, take(rows, index // O)),
        info,
        jax.tree.map(lambda x, i=index: x[i % O], choices),
      )
      chance_B = np.asarray(chance_B, np.float64) * chance_R[index // O] * live
      parts.append(take(host(new), np.flatnonzero(chance_B > 0)))
      chances.append(chance_B[chance_B > 0])
    rows = [
      x[0] if axis is None else np.concatenate(x, axis)
      for x, axis in zip(zip(*parts, strict=True), axes, strict=True)
    ]
    chance_R = np.concatenate(chances)
  end = jax.tree.unflatten(tree, rows)
  return end.tokens_BL, end.lengths_B, chance_R


def completed(tokens_RL, lengths_R, chance_R, law, start: int) -> np.ndarray:
  """Law of n tokens from texts of m <= n tokens, extended by the target's law.

  law: the target's own, [V] * n. start: length of the prompt.
  """
  n, V = law.ndim, law.shape[0]
  out = np.zeros_like(law)
  for m in range(1, n + 1):
    rows = lengths_R == start + m
    if not rows.any():
      continue
    flat = np.ravel_multi_index(tokens_RL[rows, start : start + m].T, (V,) * m)
    mass = np.bincount(flat, chance_R[rows], V**m).reshape((V,) * m)
    head = law.sum(tuple(range(m, n)), keepdims=True)
    with np.errstate(invalid='ignore'):
      rest = np.where(head > 0, law / head, 0)
    out += mass.reshape(mass.shape + (1,) * (n - m)) * rest
  return out


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
