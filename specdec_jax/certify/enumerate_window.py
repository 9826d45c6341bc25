"""Enumerates the distribution that one window emits.

Draws every draft that may be drawn, and passes and fails its accept tests in
every way. A chain is a tree with one branch: verify.tree explains nodes and
numbers. X: problems (a pair of p and q). R: what may be drawn. B = X * R.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.certify import base
from specdec_jax.verify import tree


def normal(weights):
  """Normalises weights to probabilities over the last axis."""
  return weights / weights.sum(-1, keepdims=True)


class NotEnumerable(Exception):
  """The rule draws noise itself, or is not a step function of its uniforms."""


NO_STEPS = 'its verdict is no step function of its uniforms'


class Windows(NamedTuple):
  """All drafts that may be drawn, for every problem: a batch, B = X * R.

  p_BNV: the target's distribution after the root and each node. chance_B: the
  probability of drawing each, float64.
  """

  draft: types.Draft
  p_BNV: np.ndarray
  chance_B: np.ndarray


def parents(draft: types.Draft):
  """Returns draft.parents_BK, or a chain's."""
  if draft.parents_BK is not None:
    return draft.parents_BK
  return jnp.broadcast_to(
    jnp.arange(-1, draft.tokens_BK.shape[1] - 1), draft.tokens_BK.shape
  )


def sees(draft: types.Draft):
  """Marks each number's ancestors, and itself: [B, N, N]."""
  return tree.shape(parents(draft)).sees_BTN


# --- outcomes -----------------------------------------------------------------


def uniforms(accept_BK) -> types.Noise:
  """Makes the noise for a rule that may use nothing but these uniforms."""

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
  """Injects uniforms: (accepted_B, last accepted node, weights_BV).

  Raises base.Broken if it accepts too many, NotEnumerable if it draws noise.
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
  """Returns the largest uniform."""
  return np.nextafter(dtype.type(1), dtype.type(0))


def _flips_at(passes: Callable[[Any], Any], size: int, dtype: np.dtype):
  """Bisects for the least uniforms that fail a test: [size]; 1: none.

  Searches the floats of [0, 1), not from a formula. passes: uniforms [size] ->
  bool [size]; true at 0, assumed to flip once at most.
  """
  integer = {4: jnp.int32, 8: jnp.int64}[dtype.itemsize]
  float_of = lambda bits: jax.lax.bitcast_convert_type(bits, dtype)
  one = jax.lax.bitcast_convert_type(jnp.ones((), dtype), integer)

  def halve(_, ends):
    low_X, high_X = ends  # it passes at low; at high it fails, or high is 1
    middle_X = low_X + (high_X - low_X) // 2
    passes_X = passes(float_of(middle_X))
    low_X = jnp.where(passes_X, middle_X, low_X)
    return low_X, jnp.where(passes_X, high_X, middle_X)

  ends = jnp.zeros(size, integer), jnp.full(size, one, integer)
  return float_of(jax.lax.fori_loop(0, dtype.itemsize * 8, halve, ends)[1])


@functools.partial(jax.jit, static_argnums=0)
def thresholds(rule: types.Rule, draft: types.Draft, p_BNV):
  """Finds where each node's accept test flips, [B, K]: the least u that fails.

  0 where it never passes. Its ancestors' tests pass, all others fail. Assumes
  that its own uniform decides a test, which flips at most once, whatever the
  others are; `ends` checks this at random uniforms.
  """
  (B, K), dtype = draft.tokens_BK.shape, p_BNV.dtype
  sees_BNN, rows_B = sees(draft), jnp.arange(B)

  def of_node(i):
    above_BK = sees_BNN[:, i + 1, 1:]
    u_BK = jnp.where(above_BK, 0, below_one(dtype)).astype(dtype)

    def passes(u_B):
      _, last_B, _ = _verify(rule, u_BK.at[:, i].set(u_B), draft, p_BNV)
      return sees_BNN[rows_B, last_B + 1, i + 1]

    return _flips_at(passes, B, dtype)

  t_BK = jax.lax.map(of_node, jnp.arange(K)).T
  return jnp.where(t_BK < jnp.finfo(dtype).tiny, 0, t_BK)


@functools.partial(jax.jit, static_argnums=0)
def flips(rule: types.Rule, draft: types.Draft, p_BNV):
  """Finds the least u of each uniform that changes a chain's verdict, [B, K].

  Tries uniform i with all others at 0 or, where it changes nothing, near 1; 1
  where it changes nothing there either. Assumes that a verdict changes at most
  once, at a value independent of the others; `patterns` checks this.
  """
  (B, K), dtype = draft.tokens_BK.shape, p_BNV.dtype
  twice = lambda x: jnp.concatenate([x, x])
  draft, p_XNV = jax.tree.map(twice, draft), twice(p_BNV)
  others_2 = jnp.array([0, below_one(dtype)], dtype)
  others_XK = jnp.tile(jnp.repeat(others_2, B)[:, None], (1, K))

  def of_uniform(i):
    run = lambda u_X: _verify(rule, others_XK.at[:, i].set(u_X), draft, p_XNV)
    accepted_X, _, weights_XV = run(jnp.zeros(2 * B, dtype))
    # One program may round the same sum differently in two rows.
    size_X1 = jnp.maximum(jnp.max(weights_XV, -1, keepdims=True), 1)
    slack_X1 = 64 * jnp.finfo(dtype).eps * size_X1

    def same(u_X):
      other_X, _, other_XV = run(u_X)
      same_XV = jnp.abs(other_XV - weights_XV) <= slack_X1
      same_XV |= jnp.isnan(other_XV) & jnp.isnan(weights_XV)
      return (other_X == accepted_X) & jnp.all(same_XV, -1)

    zero_B, one_B = _flips_at(same, 2 * B, dtype).reshape(2, B)
    return jnp.where(zero_B < 1, zero_B, one_B)

  return jax.lax.map(of_uniform, jnp.arange(K)).T


class End(NamedTuple):
  """Where a window may end: at a node, or the root; or how a pattern ends.

  chance_B: how often that draft is drawn and the window ends so. accepted_B,
  path_BK: nodes accepted then, K past their end. next_BV: the next token's p.
  """

  chance_B: np.ndarray
  accepted_B: np.ndarray
  path_BK: np.ndarray
  next_BV: np.ndarray


def ends(rule: types.Rule, batch: Windows) -> list[End]:
  """Lists windows' Ends under a rule: the root's, then each node's.

  Rules may test parents first, or children: flips each test to find which
  decide that a window ends at a node. Chains whose tests other uniforms decide
  than their own go to `patterns`. Raises as run_rule does, NotEnumerable as
  `patterns`, and base.Broken if on a tree random uniforms give another verdict
  than their tests.
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
  if wrong_B.any() and draft.parents_BK is None:
    return patterns(rule, batch)
  if wrong_B.any():
    parents_K = np.asarray(draft.parents_BK)[wrong_B.argmax()].tolist()
    raise base.Broken(f'{rule.name}: {NO_STEPS}, on the tree {parents_K}')
  return out


def patterns(rule: types.Rule, batch: Windows) -> list[End]:
  """Lists chains' Ends in every pattern of uniforms before and after a flip.

  Raises base.Broken as run_rule does, NotEnumerable if random uniforms give
  another verdict than their pattern: the counted promises then judge the rule.
  """
  t_BK, p_BNV = np.asarray(flips(rule, batch.draft, batch.p_BNV)), batch.p_BNV
  (B, K), dtype, every_B = t_BK.shape, t_BK.dtype, np.arange(len(t_BK))
  run = lambda u_BK: run_rule(rule, batch, np.minimum(u_BK, below_one(dtype)))
  verdicts, out = [], []
  for before_K in itertools.product((True, False), repeat=K):
    share_BK = np.where(before_K, t_BK, 1 - t_BK.astype(np.float64))
    verdict = run(np.where(before_K, t_BK / 2, (1 + t_BK) / 2))
    accepted_B, _, weights_BV = verdict
    on_BK = np.arange(K) < accepted_B[:, None]
    path_BK = np.where(on_BK, np.arange(K), K)
    next_BV = next_distribution(p_BNV[every_B, accepted_B], weights_BV)
    chance_B = batch.chance_B * share_BK.prod(1)
    out.append(End(chance_B, accepted_B, path_BK, next_BV))
    verdicts.append(verdict)
  accepted_PB, _, weights_PBV = map(np.stack, zip(*verdicts, strict=True))
  rng = np.random.default_rng(0)
  for _ in range(3):
    u_BK = rng.random((B, K)).astype(dtype)
    accepted_B, _, weights_BV = run(u_BK)
    at = (u_BK >= t_BK) @ (1 << np.arange(K)[::-1]), every_B
    same_BV = np.isclose(weights_BV, weights_PBV[at], 0, 0, equal_nan=True)
    same_B = same_BV.all(1) & (accepted_B == accepted_PB[at])
    if not same_B[batch.chance_B > 0].all():
      raise NotEnumerable(NO_STEPS)
  return out


def check_support(rule: types.Rule, batch: Windows, what: str) -> None:
  """Refuses tokens of p = 0 accepted at u = 0: no enumeration sees those."""
  draft, tokens_BK = batch.draft, np.asarray(batch.draft.tokens_BK)
  zeros_BK = np.zeros(tokens_BK.shape, batch.p_BNV.dtype)
  accepted_B, last_B, _ = run_rule(rule, batch, zeros_BK)
  every_B = np.arange(len(tokens_BK))
  on_BK = np.asarray(sees(draft))[every_B, last_B + 1, 1:]
  above_BK = np.asarray(parents(draft)) + 1
  p_BK = batch.p_BNV[every_B[:, None], above_BK, tokens_BK]
  wrong_B = (on_BK & (p_BK == 0)).any(1)
  wrong_B &= batch.chance_B > 0  # the others are never drafted
  if wrong_B.any():
    b = int(wrong_B.argmax())
    raise base.Broken(
      f'{rule.name}, {what}: at u = 0 it accepts {accepted_B[b]} of the drafts '
      f'{tokens_BK[b].tolist()}, whose p are {p_BK[b].tolist()}'
    )


# --- distributions ------------------------------------------------------------


def distribution(found: Sequence[End], batch: Windows, target) -> np.ndarray:
  """Computes the exact joint p of N tokens: one window, then the target.

  found: the batch's `ends`. target: its joint p, [X, V, ..., V], as returned.
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
  """Continues a joint p [X] + [V] * m with target's [X] + [V] * n, n >= m."""
  m, n = part.ndim - 1, target.ndim - 1
  head = target.sum(tuple(range(1 + m, 1 + n)), keepdims=True)
  with np.errstate(invalid='ignore'):
    rest = np.where(head > 0, target / head, 0)
  return part.reshape(part.shape + (1,) * (n - m)) * rest


def next_distribution(p_BV, weights_BV) -> np.ndarray:
  """Normalises the next token's weights, or p_BV where none is left: [B, V]."""
  weights_BV = weights_BV.astype(np.float64)
  empty_B1 = ~(weights_BV.sum(-1, keepdims=True) > 0)
  return normal(np.where(empty_B1, p_BV, weights_BV))
