"""The distribution that one window emits, by enumerating its accept tests.

X: problems (a pair of p and q). R: draft paths, V ** K. B = X * R.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.certify import base

# --- problems -----------------------------------------------------------------


def normal(weights):
  """Weights as probabilities over the last axis."""
  return weights / weights.sum(-1, keepdims=True)


def _softmax(rng, shape, sigma):
  z = sigma * rng.normal(size=shape)
  return normal(np.exp(z - z.max(-1, keepdims=True)))


def _one_hot(rng, shape):
  return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]


def _one_ulp(rng, shape, dtype):
  """q is p with every entry moved by -1, 0 or 1 units in the last place."""
  p = _softmax(rng, shape, 1).astype(dtype)
  to = np.array([0, np.nan, 1], dtype)[rng.integers(0, 3, p.shape)]
  return p, np.where(np.isnan(to), p, np.nextafter(p, to, dtype=dtype))


def _truncated(rng, shape):
  """Random top-k, so that supports differ."""
  p = _softmax(rng, shape, 1)
  k = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
  rank = np.argsort(np.argsort(-p, -1), -1)
  return normal(np.where(rank < k, p, 0))


def _disjoint(rng, shape):
  in_p = rng.random(shape) < 0.5
  in_p[..., 0], in_p[..., 1] = True, False
  in_p ^= rng.random((*shape[:-1], 1)) < 0.5
  p, q = _softmax(rng, shape, 1), _softmax(rng, shape, 1)
  return normal(p * in_p), normal(q * ~in_p)


def _tails(rng, shape):
  """Zero mass from a random index of each row on."""
  end = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
  return normal(_softmax(rng, shape, 1) * (np.arange(shape[-1]) < end))


def _subnormal(rng, shape):
  """One peak; all other probabilities near the smallest float32 number."""
  w = 10.0 ** rng.uniform(-44, -30, shape)
  return np.maximum(w, _one_hot(rng, shape))


# name -> f(rng, shape, dtype) -> (p, q), normalised over the last axis. Simple
# ones first: a failing rule is reported on the first family that it fails on.
FAMILIES: dict[str, Callable[..., Any]] = {
  'sigma 1': lambda r, s, d: (_softmax(r, s, 1), _softmax(r, s, 1)),
  'sigma 3': lambda r, s, d: (_softmax(r, s, 3), _softmax(r, s, 3)),
  'flat': lambda r, s, d: (_softmax(r, s, 0.1), _softmax(r, s, 0.1)),
  'sigma 10': lambda r, s, d: (_softmax(r, s, 10), _softmax(r, s, 10)),
  'equal': lambda r, s, d: (_softmax(r, s, 1),) * 2,
  'truncated': lambda r, s, d: (_truncated(r, s), _truncated(r, s)),
  'zero tails': lambda r, s, d: (_tails(r, s), _tails(r, s)),
  'disjoint': lambda r, s, d: _disjoint(r, s),
  'one-hot q': lambda r, s, d: (_softmax(r, s, 1), _one_hot(r, s)),
  'one-hot p': lambda r, s, d: (_one_hot(r, s), _softmax(r, s, 1)),
  'one ulp': _one_ulp,
  'subnormal': lambda r, s, d: (_subnormal(r, s), _subnormal(r, s)),
}


def problems(
  family: str, seed: int | list[int], *, count: int, gamma: int, vocab: int
):
  """`count` random (p_XNVV, q_XKVV): of token k, given each token k - 1."""
  dtype = np.dtype(jnp.result_type(float))
  p, q = FAMILIES[family](
    np.random.default_rng(seed), (count, gamma + 1, vocab, vocab), dtype
  )
  return p.astype(dtype), q.astype(dtype)[:, :gamma]


def of_all_families(seed: int, *, each: int, gamma: int, vocab: int):
  """`problems` of every family, in their order, `each` of one."""
  parts = [
    problems(
      name, [seed, gamma, vocab, i], count=each, gamma=gamma, vocab=vocab
    )
    for i, name in enumerate(FAMILIES)
  ]
  return tuple(np.concatenate(x) for x in zip(*parts, strict=True))


# --- windows ------------------------------------------------------------------


class NotEnumerable(Exception):
  """The rule draws noise itself, or is not a step function of its uniforms."""


class Windows(NamedTuple):
  """Every draft path of every problem as one batch, B = X * R.

  draft: the paths.
  p_BNV: the target's distributions along them.
  chance_XR: probability that each path is drafted, float64.
  """

  draft: types.Draft
  p_BNV: jax.Array
  chance_XR: np.ndarray


def paths(vocab: int, gamma: int) -> np.ndarray:
  """Every draft path of a window: [R, K]."""
  return np.indices((vocab,) * gamma, np.int32).reshape(gamma, -1).T


def windows(p_XNVV, q_XKVV, count_X, script_XK=None) -> Windows:
  """The batch of problems; with script_XK, drafts are certain (q None)."""
  X, N, V, _ = p_XNVV.shape
  K = N - 1
  paths_RK = paths(V, K)
  R = len(paths_RK)
  before_RN = np.pad(paths_RK, ((0, 0), (1, 0)))
  p_XRNV = p_XNVV[:, np.arange(N)[None], before_RN]
  if script_XK is None:
    q_XRKV = q_XKVV[:, np.arange(K)[None], before_RN[:, :K]]
    q_taken_XRK = np.take_along_axis(
      normal(q_XRKV.astype(np.float64)), paths_RK[None, ..., None], -1
    )[..., 0]
    chance_XR = q_taken_XRK.prod(-1)
    q_BKV = jnp.asarray(q_XRKV.reshape(X * R, K, V))
  else:
    chance_XR = (paths_RK[None] == script_XK[:, None]).all(-1).astype(float)
    q_BKV = None
  tokens_BK = jnp.asarray(np.tile(paths_RK, (X, 1)))
  draft = types.Draft(tokens_BK, q_BKV, jnp.asarray(np.repeat(count_X, R)))
  return Windows(draft, jnp.asarray(p_XRNV.reshape(X * R, N, V)), chance_XR)


def uniforms(accept_BK) -> types.Noise:
  """The noise of a rule that may use nothing but these uniforms."""

  def no_draw(*_):
    raise NotEnumerable('it draws inside verify')

  return types.Noise(accept_BK, no_draw, no_draw)


def run_rule(rule: types.Rule, batch: Windows, accept_BK):
  """(accepted_B, weights_BV) of rule.verify with injected uniforms.

  Raises:
    base.Broken: it accepts more than was proposed.
    NotEnumerable: it draws noise itself.
  """
  verdict = _verify(rule.verify, accept_BK, batch.draft, batch.p_BNV)
  accepted_B, weights_BV = map(np.asarray, verdict[:2])
  count_B = np.asarray(batch.draft.count_B)
  wrong_B = (accepted_B > count_B) | (accepted_B < 0)
  if wrong_B.any():
    b = int(wrong_B.argmax())
    raise base.Broken(
      f'{rule.name}: it accepts {accepted_B[b]} of {count_B[b]} proposed tokens'
    )
  return accepted_B, weights_BV


@functools.partial(jax.jit, static_argnums=0)
def _verify(verify, accept_BK, draft, p_BNV):
  return verify(uniforms(accept_BK), draft, p_BNV)


# --- outcomes -----------------------------------------------------------------


def below_one(dtype: np.dtype) -> Any:
  """The largest uniform."""
  return np.nextafter(dtype.type(1), dtype.type(0))


def flips_at(passes: Callable[[Any], Any], size: int, dtype: np.dtype):
  """The least uniforms that fail a test which passes at 0: [size]; 1: none.

  By bisection over the floats of [0, 1).

  passes: uniforms [size] -> bool [size]; assumed to flip at most once.
  """
  integer = {4: jnp.int32, 8: jnp.int64}[dtype.itemsize]
  float_of = lambda bits: jax.lax.bitcast_convert_type(bits, dtype)
  one = jax.lax.bitcast_convert_type(jnp.ones((), dtype), integer)

  def halve(_, ends):
    low_X, high_X = ends  # it passes at low; at high it fails, or high is 1
    middle_X = low_X + (high_X - low_X) // 2
    still_X = passes(float_of(middle_X))
    low_X = jnp.where(still_X, middle_X, low_X)
    return low_X, jnp.where(still_X, high_X, middle_X)

  ends = jnp.zeros(size, integer), jnp.full(size, one, integer)
  return float_of(jax.lax.fori_loop(0, dtype.itemsize * 8, halve, ends)[1])


@functools.partial(jax.jit, static_argnums=0)
def thresholds(rule: types.Rule, draft: types.Draft, p_BNV):
  """Where the accept test of each offset flips: [B, K], the least u that fails.

  Found by bisection over the floats of [0, 1), not from a formula. Offset k is
  tried with all other tests passing and with all failing; its threshold is 1
  where it changes neither. Assumes that a test flips at most once, at a value
  independent of the other uniforms; outcomes_of checks this at random uniforms.
  """
  B, K = draft.tokens_BK.shape
  dtype = p_BNV.dtype
  # X = K * 2 * B rows: the batch for every offset and for both other outcomes.
  tile = lambda x: jnp.tile(x, (2 * K,) + (1,) * (x.ndim - 1))
  draft, p_XNV = jax.tree.map(tile, draft), tile(p_BNV)
  own_XK = jnp.repeat(jnp.eye(K, dtype=bool), 2 * B, 0)
  others_2 = jnp.array([0, below_one(dtype)], dtype)
  others_X1 = jnp.tile(jnp.repeat(others_2, B), K)[:, None]

  def outcome(u_X):
    u_XK = jnp.where(own_XK, u_X[:, None], others_X1)
    return rule.verify(uniforms(u_XK), draft, p_XNV)

  def same(x, y):
    # One program may round the same sum differently in two rows.
    size_X1 = jnp.maximum(jnp.max(x.weights_BV, -1, keepdims=True), 1)
    slack_X1 = 64 * jnp.finfo(dtype).eps * size_X1
    close_XV = jnp.abs(x.weights_BV - y.weights_BV) <= slack_X1
    close_XV |= jnp.isnan(x.weights_BV) & jnp.isnan(y.weights_BV)
    return (x.accepted_B == y.accepted_B) & jnp.all(close_XV, -1)

  size = 2 * K * B
  at_zero = outcome(jnp.zeros(size, dtype))
  t_X = flips_at(lambda u_X: same(outcome(u_X), at_zero), size, dtype)
  t_K2B = t_X.reshape(K, 2, B)
  return jnp.where(t_K2B[:, 0] < 1, t_K2B[:, 0], t_K2B[:, 1]).T


def outcomes_of(rule: types.Rule, batch: Windows) -> list[tuple]:
  """Runs the rule once for every pattern of passing and failing tests.

  Returns (chance_B, accepted_B, weights_BV) of each: the probability of the
  pattern, float64, and what the rule returns.

  Raises:
    NotEnumerable: random uniforms give another verdict than their pattern does.
    base.Broken: see run_rule.
  """
  t_BK = np.asarray(thresholds(rule, batch.draft, batch.p_BNV))
  K, dtype = t_BK.shape[1], t_BK.dtype
  run = lambda u_BK: run_rule(rule, batch, np.minimum(u_BK, below_one(dtype)))
  out = []
  for passes_K in itertools.product((True, False), repeat=K):
    chance_BK = np.where(passes_K, t_BK, 1 - t_BK.astype(np.float64))
    verdict = run(np.where(passes_K, t_BK / 2, (1 + t_BK) / 2))
    out.append((chance_BK.prod(1), *verdict))
  rng, every_B = np.random.default_rng(0), np.arange(len(t_BK))
  can_B = batch.chance_XR.reshape(-1) > 0  # the other paths are never drafted
  _, accepted_PB, weights_PBV = map(np.stack, zip(*out, strict=True))
  for _ in range(3):
    u_BK = rng.random(t_BK.shape).astype(dtype)
    accepted_B, weights_BV = run(u_BK)
    at = (u_BK >= t_BK) @ (1 << np.arange(K)[::-1]), every_B
    same_BV = np.isclose(weights_BV, weights_PBV[at], 0, 0, equal_nan=True)
    same_B = same_BV.all(-1) & (accepted_B == accepted_PB[at])
    if not same_B[can_B].all():
      raise NotEnumerable('its verdict is no step function of its uniforms')
  return out


def not_enumerable(rule: types.Rule) -> str:
  """Why the rule's outcomes cannot be enumerated; '' if they can."""
  rng = np.random.default_rng(0)
  p_XNVV, q_XKVV = (rng.dirichlet(np.ones(3), (8, n, 3)) for n in (3, 2))
  try:
    outcomes_of(rule, windows(p_XNVV, q_XKVV, np.full(8, 2, np.int32)))
  except NotEnumerable as why:
    return str(why)
  return ''


# --- distributions ------------------------------------------------------------


def window_distribution(rule, batch: Windows, target) -> np.ndarray:
  """Exact distribution of N tokens: one window of the rule, then the target.

  target: the target's joint distribution of N tokens, [X, V, ..., V]; the shape
  of what is returned, too. Raises as outcomes_of does.
  """
  X, R = batch.chance_XR.shape
  N, V = batch.p_BNV.shape[1:]
  mass = np.zeros((N, X, V ** (N - 1), V))  # accepted drafts, path, next token
  # A drafter need not propose the tokens that were drawn, or propose all.
  tokens_KB = np.clip(np.asarray(batch.draft.tokens_BK), 0, V - 1).T
  path_B = np.ravel_multi_index(tuple(tokens_KB), (V,) * (N - 1))
  problem_B = np.repeat(np.arange(X), R)
  for chance_B, accepted_B, weights_BV in outcomes_of(rule, batch):
    chance_B1 = (chance_B * batch.chance_XR.reshape(-1))[:, None]
    next_BV = next_distribution(batch.p_BNV, accepted_B, weights_BV)
    np.add.at(mass, (accepted_B, problem_B, path_B), chance_B1 * next_BV)
  out = np.zeros((X,) + (V,) * N)
  for a in range(N):
    part = mass[a].reshape((X,) + (V,) * N).sum(tuple(range(1 + a, N)))
    out += continued(part, target)
  return out


def continued(part, target) -> np.ndarray:
  """A distribution of m tokens, [X] + [V] * m, that `target` continues.

  target: of n >= m tokens, [X] + [V] * n; so is what is returned.
  """
  m, n = part.ndim - 1, target.ndim - 1
  head = target.sum(tuple(range(1 + m, 1 + n)), keepdims=True)
  with np.errstate(invalid='ignore'):
    rest = np.where(head > 0, target / head, 0)
  return part.reshape(part.shape + (1,) * (n - m)) * rest


def next_distribution(p_BNV, accepted_B, weights_BV) -> np.ndarray:
  """Distribution of the token after the accepted ones, as in decode: [B, V]."""
  weights_BV = weights_BV.astype(np.float64)
  p_BV = np.asarray(p_BNV)[np.arange(len(accepted_B)), accepted_B]
  empty_B1 = ~(weights_BV.sum(-1, keepdims=True) > 0)
  return normal(np.where(empty_B1, p_BV, weights_BV).astype(np.float64))


def target_distribution(p_XNVV) -> np.ndarray:
  """The target's joint distribution, which window_distribution must equal."""
  p_XNVV = normal(p_XNVV.astype(np.float64))
  out = p_XNVV[:, 0, 0]
  X, N, V, _ = p_XNVV.shape
  for k in range(1, N):
    one = (1,) * (out.ndim - 2)
    out = out[..., None] * p_XNVV[:, k].reshape((X, *one, V, V))
  return out
