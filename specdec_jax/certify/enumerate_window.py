"""The distribution that one window emits, by enumeration.

Every draft that may be drawn is, and the accept tests pass and fail in every
way. A chain is a tree of one branch: see verify.tree for nodes and numbers.
X: problems (a pair of p and q). R: what may be drawn. B = X * R.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.certify import base
from specdec_jax.verify import tree


def normal(weights):
  """Weights as probabilities over the last axis."""
  return weights / weights.sum(-1, keepdims=True)


class NotEnumerable(Exception):
  """The rule draws noise itself, or is not a step function of its uniforms."""


class Windows(NamedTuple):
  """Every draft that may be drawn, of every problem, as one batch, B = X * R.

  draft: chains, or trees.
  p_BNV: the target's distribution after the root and each node.
  chance_B: probability that each is drawn, float64.
  """

  draft: types.Draft
  p_BNV: np.ndarray
  chance_B: np.ndarray


def parents(draft: types.Draft):
  """draft.parents_BK, or that of a chain."""
  if draft.parents_BK is not None:
    return draft.parents_BK
  return jnp.broadcast_to(
    jnp.arange(-1, draft.tokens_BK.shape[1] - 1), draft.tokens_BK.shape
  )


def sees(draft: types.Draft):
  """What each number descends from, and itself: [B, N, N]."""
  return tree.shape(parents(draft)).sees_BTN


# --- outcomes -----------------------------------------------------------------


def uniforms(accept_BK) -> types.Noise:
  """The noise of a rule that may use nothing but these uniforms."""

  def no_draw(*_):
    raise NotEnumerable('it draws inside verify')

  return types.Noise(accept_BK, no_draw, no_draw)


@functools.partial(jax.jit, static_argnums=0)
def _verify(rule: types.Rule, accept_BK, draft: types.Draft, p_BNV):
  verdict = rule.verify(uniforms(accept_BK), draft, p_BNV)
  last_B = verdict.accepted_B - 1
  if draft.parents_BK is not None:
    last_B = tree.last_of(verdict.accepted_B, verdict.path_BK)
  return verdict.accepted_B, last_B, verdict.weights_BV


def run_rule(rule: types.Rule, batch: Windows, accept_BK):
  """(accepted_B, last accepted node, weights_BV) with injected uniforms.

  Raises:
    base.Broken: it accepts more than was proposed.
    NotEnumerable: it draws noise itself.
  """
  got = jax.device_get(_verify(rule, accept_BK, batch.draft, batch.p_BNV))
  accepted_B, count_B = got[0], np.asarray(batch.draft.count_B)
  wrong_B = (accepted_B > count_B) | (accepted_B < 0)
  if wrong_B.any():
    b = int(wrong_B.argmax())
    raise base.Broken(
      f'{rule.name}: it accepts {accepted_B[b]} of {count_B[b]} proposed tokens'
    )
  return got


def below_one(dtype: np.dtype) -> Any:
  """The largest uniform."""
  return np.nextafter(dtype.type(1), dtype.type(0))


@functools.partial(jax.jit, static_argnums=0)
def thresholds(rule: types.Rule, draft: types.Draft, p_BNV):
  """Where the accept test of each node flips, [B, K]: the least u that fails.

  0 where it never passes. Found by bisection over the floats of [0, 1), not
  from a formula, with the tests of its ancestors passing and all others
  failing. Assumes that a test flips at most once, at a value independent of the
  other uniforms; `ends` checks this at random uniforms.
  """
  (B, K), dtype = draft.tokens_BK.shape, p_BNV.dtype
  sees_BNN, rows_B = sees(draft), jnp.arange(B)
  integer = {4: jnp.int32, 8: jnp.int64}[dtype.itemsize]
  float_of = lambda bits: jax.lax.bitcast_convert_type(bits, dtype)
  one = jax.lax.bitcast_convert_type(jnp.ones((), dtype), integer)

  def of_node(i):
    above_BK = sees_BNN[:, i + 1, 1:]
    u_BK = jnp.where(above_BK, 0, below_one(dtype)).astype(dtype)

    def halve(_, ends):
      low_B, high_B = ends  # it passes at low; at high it fails, or high is 1
      middle_B = low_B + (high_B - low_B) // 2
      own_BK = u_BK.at[:, i].set(float_of(middle_B))
      _, last_B, _ = _verify(rule, own_BK, draft, p_BNV)
      passes_B = sees_BNN[rows_B, last_B + 1, i + 1]
      low_B = jnp.where(passes_B, middle_B, low_B)
      return low_B, jnp.where(passes_B, high_B, middle_B)

    ends = jnp.zeros(B, integer), jnp.full(B, one, integer)
    return float_of(jax.lax.fori_loop(0, dtype.itemsize * 8, halve, ends)[1])

  t_BK = jax.lax.map(of_node, jnp.arange(K)).T
  return jnp.where(t_BK < jnp.finfo(dtype).tiny, 0, t_BK)


class End(NamedTuple):
  """One node where a window may end, or the root.

  chance_B: how often that draft is drawn and the window ends there.
  accepted_B, path_BK: the nodes that are accepted then, K past their end.
  next_BV: the distribution of the token after them.
  """

  chance_B: np.ndarray
  accepted_B: np.ndarray
  path_BK: np.ndarray
  next_BV: np.ndarray


def ends(rule: types.Rule, batch: Windows) -> list[End]:
  """Every End of windows under a rule: the root's, then each node's.

  Rules may test parents first, or children: which tests decide that a window
  ends at a node is found by flipping each.

  Raises:
    base.Broken: see run_rule; of trees also where a chain is NotEnumerable.
    NotEnumerable: random uniforms give another verdict than their tests do.
  """
  draft, p_BNV = batch.draft, batch.p_BNV
  (B, K), dtype = draft.tokens_BK.shape, p_BNV.dtype
  t_BK = np.asarray(thresholds(rule, draft, p_BNV), np.float64)
  sees_BNN, fails = np.asarray(sees(draft)), below_one(dtype)
  run = functools.partial(run_rule, rule, batch)
  number_K, every_B = np.arange(K), np.arange(B)
  tests, weights, wrong_B, out = [], [], np.zeros(B, bool), []
  for number in range(K + 1):
    on_BK = sees_BNN[:, number, 1:]
    u_BK = np.where(on_BK, 0, fails).astype(dtype)
    _, last_B, weights_BV = run(u_BK)
    flipped = [np.where(number_K == i, fails - u_BK, u_BK) for i in range(K)]
    decides_BK = np.stack([run(x)[1] + 1 != number for x in flipped], 1)
    sides_BK = np.where(on_BK, t_BK, 1 - t_BK)
    chance_B = batch.chance_B * np.where(decides_BK, sides_BK, 1).prod(1)
    wrong_B |= (chance_B > 0) & (last_B + 1 != number)
    path_BK = np.sort(np.where(on_BK, number_K, K), 1)
    next_BV = next_distribution(p_BNV[:, number], weights_BV)
    out.append(End(chance_B, on_BK.sum(1), path_BK, next_BV))
    tests.append((on_BK, decides_BK))
    weights.append(weights_BV)
  rng = np.random.default_rng(0)
  for _ in range(3):
    u_BK = rng.random(t_BK.shape).astype(dtype)
    _, last_B, weights_BV = run(u_BK)
    met_NB = [
      (((u_BK < t_BK) == on) | ~decides).all(1) for on, decides in tests
    ]
    at = last_B + 1, every_B
    same_BV = np.isclose(
      weights_BV, np.stack(weights)[at], 0, 0, equal_nan=True
    )
    right_B = np.stack(met_NB)[at] & (np.sum(met_NB, 0) == 1) & same_BV.all(1)
    wrong_B |= ~right_B & (batch.chance_B > 0)
  if wrong_B.any():
    # What a rule of chains does is for the counted promises to say then.
    kind = NotEnumerable if draft.parents_BK is None else base.Broken
    raise kind('its verdict is no step function of its uniforms')
  return out


# --- distributions ------------------------------------------------------------


def distribution(found: Sequence[End], batch: Windows, target) -> np.ndarray:
  """Exact distribution of N tokens: one window, then the target.

  found: the `ends` of the batch.
  target: the target's joint distribution of N tokens, [X, V, ..., V]; the shape
    of what is returned, too.
  """
  (X, V), N = target.shape[:2], target.ndim - 1
  # A drafter need not propose the tokens that were drawn, or propose all.
  tokens_BK = np.clip(np.asarray(batch.draft.tokens_BK), 0, V - 1)
  problem_B = np.repeat(np.arange(X), len(tokens_BK) // X)
  mass = [np.zeros((X,) + (V,) * (a + 1)) for a in range(N)]
  for chance_B, accepted_B, path_BK, next_BV in found:
    for a in np.unique(accepted_B):
      rows = np.flatnonzero(accepted_B == a)
      path = np.take_along_axis(tokens_BK[rows], path_BK[rows, :a], 1)
      share = chance_B[rows, None] * next_BV[rows]
      np.add.at(mass[a], (problem_B[rows], *path.T), share)
  return np.sum([continued(x, target) for x in mass], 0)


def continued(part, target) -> np.ndarray:
  """A distribution of m tokens, [X] + [V] * m, that `target` continues.

  target: of n >= m tokens, [X] + [V] * n; so is what is returned.
  """
  m, n = part.ndim - 1, target.ndim - 1
  head = target.sum(tuple(range(1 + m, 1 + n)), keepdims=True)
  with np.errstate(invalid='ignore'):
    rest = np.where(head > 0, target / head, 0)
  return part.reshape(part.shape + (1,) * (n - m)) * rest


def next_distribution(p_BV, weights_BV) -> np.ndarray:
  """Distribution of the token after the accepted ones, as in decode: [B, V].

  p_BV: the target's there.
  """
  weights_BV = weights_BV.astype(np.float64)
  empty_B1 = ~(weights_BV.sum(-1, keepdims=True) > 0)
  return normal(np.where(empty_B1, p_BV, weights_BV))
