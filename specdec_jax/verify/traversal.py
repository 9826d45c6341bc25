"""Traversal verification: block verification for trees, from the leaves up."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import block, chain, tree

Array = types.Array


def verify(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Keeps the path to the first node that passes, children before parents.

  The root has w = 1, and r is p after it. A child x, drawn from q, is entered
  with w = min(1, w r(x) / q(x)), from its parent's w and r; its r is p after
  it. Once all its children are rejected it passes with probability w. If it
  does not, its parent goes on with r = max(w r - q, 0) / S and w =
  S / (S + 1 - w), where S is the mass of max(w r - q, 0), and so the next
  sibling is entered. The root passes. The next token is drawn from the passing
  node's r. Emitted tokens are distributed exactly as p. With one child a node,
  and on a chain, it is `block`; with one level it is `reject`. Weng et al.
  2025, Algorithm 2 (https://arxiv.org/abs/2505.12398).
  """
  if not tree.is_one(draft):
    return block.verify(noise, draft, p_BNV)
  B, K = draft.tokens_BK.shape
  rows, ones_BN = tree.rows(noise, draft, p_BNV), jnp.ones_like(p_BNV[..., 0])
  none_B, none_BK = jnp.zeros(B, jnp.int32), jnp.zeros((B, K), bool)
  end = jax.lax.while_loop(
    lambda walk: ~jnp.all(walk.done),
    lambda walk: jax.vmap(_move)(rows, walk),
    _Walk(none_B, none_B > 0, none_BK, ones_BN, ones_BN, p_BNV),
  )
  return tree.verdict(draft, end.at - 1, chain.row(end.left_NV, end.at))


class _Walk(NamedTuple):
  """How far a tree is walked: `at` is the current node's number, `done` tells
  that it has passed, seen_K which nodes were entered. w_N is each number's w;
  its w r is scale_N times left_NV."""

  at: Array
  done: Array
  seen_K: Array
  w_N: Array
  scale_N: Array
  left_NV: Array


def _move(row: tree.Row, walk: _Walk) -> _Walk:
  """Enters the current node's next child, or tests that node."""
  ready_K = (row.parents_K + 1 == walk.at) & row.proposed_K & ~walk.seen_K
  enters = jnp.any(ready_K)
  node = jnp.where(enters, jnp.argmax(ready_K), jnp.maximum(walk.at - 1, 0))
  parent, token = row.parents_K[node] + 1, row.tokens_K[node]
  q_V, wr_V = row.q_KV[node], walk.scale_N[parent] * walk.left_NV[parent]
  # To enter, without dividing by a q that may be 0.
  wr, q = chain.at(jnp.stack([wr_V, q_V]), jnp.full((2, 1), token))
  ratio = wr / jnp.where(q > 0, q, 1)
  first = jnp.where((wr >= q) & (wr > 0), 1, ratio)
  # To test: what is rejected leaves its parent with less.
  passes = (walk.at == 0) | (row.u_K[node] < walk.w_N[walk.at])
  fails = ~enters & ~passes
  rest_V = jnp.maximum(wr_V - q_V, 0)
  mass = jnp.sum(rest_V)
  below = mass + 1 - walk.w_N[parent]
  none = below == 0  # 0 / 0 is 1
  scale = 1 / jnp.where(none, 1, below)
  w = jnp.where(none, 1, mass * scale)
  at = jnp.where(enters, node + 1, jnp.where(fails, parent, walk.at))
  to = jnp.where(enters | fails, at, len(walk.w_N))  # beyond: nowhere
  put = lambda x_N, new, left: x_N.at[to].set(
    jnp.where(enters, new, left), mode='drop'
  )
  left_V = jnp.where(fails, rest_V, walk.left_NV[parent])
  return _Walk(
    at=at.astype(jnp.int32),
    done=~enters & passes,
    seen_K=walk.seen_K.at[node].set(True),
    w_N=put(walk.w_N, first, w),
    scale_N=put(walk.scale_N, first, scale),
    left_NV=walk.left_NV.at[parent].set(left_V),
  )


RULE = types.Rule(
  'traversal', verify, certain=True, trees=True, on_chains='block'
)
