"""The distribution that one window of a tree emits, by enumeration.

Every order of the children is drawn, and the accept tests pass and fail in
every way. Rules may test parents first, or children.
X: problems (a pair of p and q). R: what may be drawn. B = X * R.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.certify import base, enumerate_window
from specdec_jax.verify import tree

# Of siblings: drawn one after another without those before; all drawn from one
# q; certain.
KINDS = 'distinct', 'independent', 'deterministic'


class Windows(NamedTuple):
  """Every tree that may be drawn, of every problem, as one batch.

  draft: the trees.
  p_BNV: the target's distribution after the root and each node.
  chance_B: probability that each is drawn, float64.
  """

  draft: types.Draft
  p_BNV: np.ndarray
  chance_B: np.ndarray


def parents_of(levels: str) -> tuple[int, ...]:
  """Parents of '3,2', three children of the root and two of each of them."""
  parents, level = [], [-1]
  for count in map(int, levels.split(',')):
    first = len(parents)
    parents += [node for node in level for _ in range(count)]
    level = range(first, len(parents))
  return tuple(parents)


def windows(p_XNVV, q_XKVV, parents: tuple[int, ...], kind: str) -> Windows:
  """The batch of problems: as enumerate_window.problems has them.

  parents: of the tree, of as many levels as p and q have.
  kind: of KINDS. Certain siblings are the likeliest tokens under q.
  """
  X, N, V, _ = p_XNVV.shape
  K, depths = len(parents), []
  for parent in parents:
    depths.append(0 if parent < 0 else depths[parent] + 1)
  tokens = np.zeros((X, 1, 0), np.int32)
  chance, qs = np.ones((X, 1)), []
  rows_X1 = np.arange(X)[:, None]
  for i, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
    R = tokens.shape[1]
    before = tokens[..., parent] if parent >= 0 else np.zeros((X, R), int)
    elders = [j for j in range(i) if parents[j] == parent]
    q = q_XKVV[rows_X1, depth, before].astype(np.float64)
    q, total = _given(q, tokens[..., elders], kind)
    # A row for each token; where q has no mass, one that is not proposed.
    drawn = np.where(total > 0, q, np.eye(V)[0])
    chance = (chance[..., None] * drawn).reshape(X, R * V)
    spread = lambda x: np.repeat(x, V, 1)
    tokens = np.concatenate(
      [
        spread(tokens),
        np.tile(np.arange(V, dtype=np.int32), (X, R))[..., None],
      ],
      -1,
    )
    qs = [*map(spread, qs), spread(q)]
    keep = (chance > 0).any(0)  # no problem draws the others
    chance, tokens, qs = (
      chance[:, keep],
      tokens[:, keep],
      [x[:, keep] for x in qs],
    )
  R = tokens.shape[1]
  flat = lambda x: x.reshape(X * R, *x.shape[2:])
  numbers = [np.zeros((X, R), int), *np.moveaxis(tokens, -1, 0)]
  of = [0, *(d + 1 for d in depths)]
  p = [p_XNVV[rows_X1, d, x] for d, x in zip(of, numbers, strict=True)]
  q = np.stack(qs, 2).astype(q_XKVV.dtype)
  proposed = q.sum(-1) > 0
  for i, parent in enumerate(parents):
    if parent >= 0:
      proposed[..., i] &= proposed[..., parent]
  draft = types.Draft(
    jnp.asarray(flat(tokens)),
    None if kind == 'deterministic' else jnp.asarray(flat(q)),
    jnp.full(X * R, K, jnp.int32),
    parents_BK=jnp.tile(jnp.asarray(parents, jnp.int32), (X * R, 1)),
    proposed_BK=jnp.asarray(flat(proposed)),
  )
  return Windows(draft, flat(np.stack(p, 2)), chance.reshape(-1))


def _given(q, elders, kind: str):
  """(law of a child given its elder siblings, what q has left for it).

  q: [X, R, V]. elders: their tokens, [X, R, siblings].
  """
  left = q
  if kind == 'independent':
    elders = elders[..., :0]
  if kind == 'deterministic':
    # The order of q, and of ids where q has no more.
    V = q.shape[-1]
    left = np.where(q > 0, q + 1, 1 - np.arange(V) / V)
  left = left.copy()
  np.put_along_axis(left, elders, 0, -1)
  if kind == 'deterministic':
    left = np.eye(q.shape[-1])[left.argmax(-1)]
  total = left.sum(-1, keepdims=True)
  return np.where(total > 0, left / np.where(total > 0, total, 1), 0), total


@functools.partial(jax.jit, static_argnums=0)
def _verify(rule: types.Rule, u_BK, draft: types.Draft, p_BNV):
  noise = enumerate_window.uniforms(u_BK)
  verdict = rule.verify(noise, draft, p_BNV)
  return verdict, tree.last_of(verdict.accepted_B, verdict.path_BK)


@functools.partial(jax.jit, static_argnums=0)
def thresholds(rule: types.Rule, draft: types.Draft, p_BNV, sees_NN):
  """Where the accept test of each node flips, [B, K]: the least u that fails.

  With the tests of its ancestors passing and all others failing. The least
  float where it never passes.
  """
  B, K = draft.tokens_BK.shape
  dtype = p_BNV.dtype

  def of_node(i):
    above_K = sees_NN[i + 1, 1:].at[i].set(False)
    others_K = jnp.where(above_K, 0, enumerate_window.below_one(dtype))
    others_BK = jnp.tile(others_K.astype(dtype), (B, 1))

    def passes(u_B):
      _, last_B = _verify(rule, others_BK.at[:, i].set(u_B), draft, p_BNV)
      return sees_NN[last_B + 1, i + 1]

    return enumerate_window.flips_at(passes, B, dtype)

  return jax.lax.map(of_node, jnp.arange(K)).T


class End(NamedTuple):
  """Where a window may end.

  path: the nodes that are accepted.
  chance_B: how often that tree is drawn and these are.
  next_BV: the distribution of the token after them.
  """

  path: np.ndarray
  chance_B: np.ndarray
  next_BV: np.ndarray


def ends(rule: types.Rule, batch: Windows) -> list[End]:
  """Every End of windows under a rule: the root, then each node.

  Rules may test parents first, or children: which tests decide that a path ends
  at a node is found by flipping each.

  Raises:
    base.Broken: uniforms give another path than their tests do.
  """
  draft, p_BNV = batch.draft, batch.p_BNV
  dtype, (B, K) = p_BNV.dtype, draft.tokens_BK.shape
  parents_BK: Any = draft.parents_BK  # all rows are alike
  sees_NN = np.asarray(tree.shape(parents_BK[:1]).sees_BTN[0])
  t_BK = np.asarray(thresholds(rule, draft, p_BNV, sees_NN), np.float64)
  can_BK = np.asarray(draft.proposed_BK) & (t_BK >= np.finfo(dtype).tiny)
  t_BK = np.where(can_BK, t_BK, 0)
  run = lambda u_BK: jax.device_get(_verify(rule, u_BK, draft, p_BNV))
  fails, ends_at, out = enumerate_window.below_one(dtype), [], []
  for number, sees_N in enumerate(sees_NN):
    u_BK = np.tile(np.where(sees_N[1:], 0, fails).astype(dtype), (B, 1))
    flip_K = lambda i, u_BK=u_BK: abs(np.eye(K, dtype=dtype)[i] * fails - u_BK)
    decides_BK = np.stack(
      [run(flip_K(i))[1] + 1 != number for i in range(K)], 1
    )
    ends_at.append((sees_N[1:], decides_BK))
    sides_BK = np.where(sees_N[1:], t_BK, 1 - t_BK)
    chance_B = batch.chance_B * np.where(decides_BK, sides_BK, 1).prod(1)
    verdict, last_B = run(u_BK)
    # A node that cannot be accepted has no chance, whatever is left there.
    right_B = last_B + 1 == number
    if (chance_B * ~right_B).max() > 0:
      raise base.Broken(f'{rule.name}: its path is not that of its tests')
    next_BV = enumerate_window.next_distribution(
      p_BNV, np.full(B, number), verdict.weights_BV
    )
    out.append(End(np.flatnonzero(sees_N[1:]), chance_B * right_B, next_BV))
  _check_paths(rule, batch, t_BK, ends_at, run)
  return out


def distribution(found: Sequence[End], batch: Windows, target) -> np.ndarray:
  """Exact distribution of N tokens: one window, then the target.

  found: as `ends` has them.
  target: the target's own, [X, V, ..., V]; the shape of what is returned.
  """
  X, V, tokens = *target.shape[:2], np.asarray(batch.draft.tokens_BK)
  problem_B = np.repeat(np.arange(X), len(tokens) // X)
  out = np.zeros_like(target)
  for path, chance_B, next_BV in found:
    mass = np.zeros((X,) + (V,) * (len(path) + 1))
    where = (problem_B, *(tokens[:, i] for i in path))
    np.add.at(mass, where, chance_B[:, None] * next_BV)
    out = out + enumerate_window.continued(mass, target)
  return out


def _check_paths(rule, batch: Windows, t_BK, ends_at, run):
  """Raises base.Broken if random uniforms take another path."""
  rng = np.random.default_rng(0)
  for _ in range(3):
    u_BK = rng.random(t_BK.shape).astype(batch.p_BNV.dtype)
    _, last_B = run(u_BK)
    ends_NB = np.stack(
      [(((u_BK < t_BK) == on_K) | ~need_BK).all(1) for on_K, need_BK in ends_at]
    )
    right_B = np.take_along_axis(ends_NB, last_B[None] + 1, 0)[0]
    wrong_B = ~(right_B & (ends_NB.sum(0) == 1)) & (batch.chance_B > 0)
    if wrong_B.any():
      b, parents_BK = int(wrong_B.argmax()), np.asarray(batch.draft.parents_BK)
      raise base.Broken(
        f'{rule.name}: it ends at node {int(last_B[b])} of the tree with '
        f'parents {parents_BK[b].tolist()}, and its tests pass to '
        f'{(np.flatnonzero(ends_NB[:, b]) - 1).tolist()}'
      )


# (levels, kind) of the trees that are enumerated. The quick tier has the first
# three of a rule's.
CASES = (
  ('3', 'distinct'),
  ('2,2', 'deterministic'),
  ('2,1', 'distinct'),
  ('3', 'deterministic'),
  ('2,2', 'distinct'),
  ('3,1', 'distinct'),
  ('3,3', 'distinct'),
  ('3', 'independent'),
  ('1,2', 'independent'),
  ('2,1', 'independent'),
  ('2,2', 'independent'),
  ('3,1', 'independent'),
)


def cases(rule: types.Rule) -> list[tuple[str, str]]:
  """Of CASES, those with siblings that the rule takes."""
  takes = ('independent',)
  if rule.siblings == 'distinct':
    takes = 'distinct', 'deterministic'
  return [x for x in CASES if rule.trees and x[1] in takes]


def error(rule: types.Rule, seed: int, levels: str, kind: str, each: int):
  """The largest error of the law of a window, over `each` of all families.

  Raises:
    base.Broken: an error above the bound; names the simplest family.
  """
  gamma, families = len(levels.split(',')), [*enumerate_window.FAMILIES]
  p, q = enumerate_window.of_all_families(seed, each=each, gamma=gamma, vocab=3)
  wanted = enumerate_window.target_distribution(p)
  batch = windows(p, q, parents_of(levels), kind)
  got = distribution(ends(rule, batch), batch, wanted)
  off_X = np.abs(got - wanted).reshape(len(p), -1).max(1)
  if not off_X.max() <= base.bound():
    x = int((~(off_X <= base.bound())).argmax())
    raise base.Broken(
      f'{rule.name}, a tree of {levels} {kind} siblings: wrong first in '
      f'{families[x // each]!r}; p of the first token {base.show(p[x, 0, 0])}, '
      f'q {base.show(q[x, 0, 0])}; off by {off_X[x]:.1e}, allowed '
      f'{base.bound():.0e}'
    )
  return float(off_X.max())


# --- windows of production steps ----------------------------------------------


def chance_of_children(window, choice, siblings: str) -> np.ndarray:
  """Probability of the chosen children of a tree: [B].

  What is chosen and not drawn, or has no mass left, is uniform.

  window, choice: of steps. siblings: the rule's.
  """
  B, N, _ = choice.children_BNX.shape
  V, chance_B = window.p_BNV.shape[-1], np.ones(B)
  for number in range(N):
    none = np.zeros((B, V)), np.zeros((B, 0))
    q_BV, drawn_BX = window.draws.get(number - 1, none)
    left_BV, free_BV = q_BV.astype(np.float64), np.ones((B, V))
    for x, token_B in enumerate(choice.children_BNX[:, number].T):
      left_BV *= x < drawn_BX.shape[1]
      some_B1 = left_BV.sum(1, keepdims=True) > 0
      share_BV = enumerate_window.normal(np.where(some_B1, left_BV, free_BV))
      chance_B *= share_BV[np.arange(B), token_B]
      if siblings == 'distinct':
        for each_BV in (left_BV, free_BV):
          np.put_along_axis(each_BV, token_B[:, None], 0, 1)
  return chance_B


def check_reported(name: str, state, window, siblings: str) -> int:
  """Every child must report what it was drawn from: q without its elders, or,
  of independent siblings, q.

  window: a steps.Window. siblings: the rule's. Returns how many reported
  distributions were compared.

  Raises:
    base.Broken: the first child with another q.
  """
  compared, draft = 0, window.draft
  if draft.q_BKV is None:
    return 0
  proposed_BK = np.asarray(tree.proposed(draft))
  for b, i in np.argwhere(proposed_BK & state.live_B[:, None]):
    parent = draft.parents_BK[b, i]
    if int(parent) not in window.draws:
      continue  # all rows are greedy
    q_BV, tokens_BX = window.draws[int(parent)]
    elders = draft.tokens_BK[b, :i][draft.parents_BK[b, :i] == parent]
    reported_V = draft.q_BKV[b, i].astype(np.float64)
    if (
      reported_V[draft.tokens_BK[b, i]] == 1 and np.isin(q_BV[b], (0, 1)).all()
    ):
      continue  # greedy rows draw nothing
    wanted_V = q_BV[b].astype(np.float64)
    if siblings == 'distinct':
      wanted_V[elders] = 0
      wanted_V /= wanted_V.sum()
    compared += 1
    family = [*elders, draft.tokens_BK[b, i]]
    off = np.abs(reported_V - wanted_V).max()
    if (
      tokens_BX[b, : len(family)].tolist() != family or not off <= base.bound()
    ):
      raise base.Broken(
        f'{name} drew the children {tokens_BX[b].tolist()} of node {parent} '
        f'from {base.show(q_BV[b])}, and reports child {family[-1]} after '
        f'{family[:-1]} with q {base.show(reported_V)}'
      )
  return compared


def paths(draft: types.Draft, b: int):
  """(index in p_BNV, the drafts before it) of every p that a rule reads."""
  if draft.parents_BK is None:
    return [(k, list(range(k))) for k in range(draft.count_B[b] + 1)]
  sees_NN = np.asarray(tree.shape(draft.parents_BK).sees_BTN[b])
  some = np.flatnonzero(np.asarray(tree.proposed(draft))[b]) + 1
  above = lambda number: np.flatnonzero(sees_NN[number, 1:]).tolist()
  return [(0, [])] + [(number, above(number)) for number in some]
