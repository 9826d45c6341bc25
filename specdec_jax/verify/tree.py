"""Trees of draft tokens: who descends from whom, and the path that is kept.

A node is a draft token, by its index in the window; -1 is the last committed
token, the root. A child comes after its parent. A chain is a tree too, but
rules know it by Draft.parents_BK None, and have shorter forms for it.

Worked example, parents -1, -1, 1, 1, 3, after a row of length 5:

    last token        slot 4   position 4
    |- 0              slot 5   position 5
    `- 1  accepted    slot 6   position 5
       |- 2           slot 7   position 6
       `- 3  accepted slot 8   position 6
          `- 4        slot 9   position 7

Node 3 attends to slots 0 to 4, 6 and 8. With 1 and 3 accepted their keys move
to slots 5 and 6, and the length becomes 8.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import chain

Array = types.Array


def is_one(draft: types.Draft) -> bool:
  """Tells whether a rule has to treat a draft as a tree; without nodes, no."""
  return draft.parents_BK is not None and draft.tokens_BK.shape[1] > 0


class Shape(NamedTuple):
  """A tree with its root, which is number 0; node i is number i + 1. A token
  attends to itself and its ancestors (sees_BTN). The root's depth is 0."""

  depth_BN: Array
  sees_BTN: Array


def shape(parents_BK: Array) -> Shape:
  """Computes a tree's Shape, with all its N numbers as tokens."""
  N = parents_BK.shape[1] + 1
  number_11N = jnp.arange(N)[None, None]
  # The root is its own parent, which adds nothing.
  up_BN = jnp.pad(parents_BK + 1, ((0, 0), (1, 0)))
  sees_BNN = (up_BN[..., None] == number_11N) | jnp.eye(N, dtype=bool)[None]
  for _ in range((N - 1).bit_length()):  # each turn doubles how far one sees
    far_BNN = jnp.matmul(*[sees_BNN.astype(jnp.float32)] * 2)
    sees_BNN = far_BNN > 0
  return Shape(jnp.sum(sees_BNN, -1, dtype=jnp.int32) - 1, sees_BNN)


def proposed(draft: types.Draft) -> Array:
  """Tells which nodes are proposed: [B, K]."""
  own_BK = chain.proposed(draft)
  return own_BK if draft.proposed_BK is None else own_BK & draft.proposed_BK


def path_to(sees_BNN: Array, last_B: Array) -> Array:
  """Lists the nodes from the root to node `last_B`, [B, K]; K past its end."""
  K = sees_BNN.shape[1] - 1
  on_BN = jnp.take_along_axis(sees_BNN, last_B[:, None, None] + 1, 1)[:, 0]
  # A child comes after its parent: in the order of nodes, by depth.
  return jnp.sort(
    jnp.where(on_BN[:, 1:], jnp.arange(K, dtype=jnp.int32)[None], K), -1
  )


def last_of(accepted_B: Array, path_BK: Array) -> Array:
  """Returns the last accepted node, -1 if there is none."""
  at_B1 = jnp.maximum(accepted_B - 1, 0)[:, None]
  last_B = jnp.take_along_axis(path_BK, at_B1, 1)[:, 0]
  return jnp.where(accepted_B > 0, last_B, -1)


def matching(draft: types.Draft, wanted_BN: Array) -> tuple[Array, Array]:
  """Finds the longest path of proposed nodes that are the tokens wanted after
  each number in the tree. Returns (accepted_B, path_BK), as in types.Verdict.
  """
  assert draft.parents_BK is not None
  depth_BN, sees_BNN = shape(draft.parents_BK)
  after_BK = jnp.take_along_axis(wanted_BN, draft.parents_BK + 1, 1)
  ok_BK = (draft.tokens_BK == after_BK) & proposed(draft)
  ok_BN = jnp.pad(ok_BK, ((0, 0), (1, 0)), constant_values=True)
  whole_BN = ~jnp.any(sees_BNN & ~ok_BN[:, None], -1)
  reached_BN = jnp.where(whole_BN, depth_BN, -1)
  last_B = jnp.argmax(reached_BN, -1).astype(jnp.int32) - 1
  return jnp.max(reached_BN, -1), path_to(sees_BNN, last_B)


def verdict(draft: types.Draft, last_B: Array, weights_BV) -> types.Verdict:
  """Builds the types.Verdict for a path that ends at node `last_B`."""
  assert draft.parents_BK is not None
  depth_BN, sees_BNN = shape(draft.parents_BK)
  accepted_B = chain.at(depth_BN, last_B[:, None] + 1)
  return types.Verdict(accepted_B, weights_BV, path_to(sees_BNN, last_B))


class Row(NamedTuple):
  """One row's tree, for rules that are written for a row. As in types.Draft,
  with one-hots where that has no q; u_K are uniforms for the accept tests."""

  tokens_K: Array
  q_KV: Array
  parents_K: Array
  proposed_K: Array
  u_K: Array


def rows(noise: types.Noise, draft: types.Draft, p_BNV) -> Row:
  """Stacks a Row for every row; q in p's dtype."""
  q_BKV = draft.q_BKV
  if q_BKV is None:
    q_BKV = jax.nn.one_hot(draft.tokens_BK, p_BNV.shape[-1])
  return Row(
    draft.tokens_BK,
    q_BKV.astype(p_BNV.dtype),
    draft.parents_BK,
    proposed(draft),
    noise.accept_BK,
  )


def children(draft: types.Draft, accepted_B, path_BK) -> Array:
  """Tells which nodes are proposed below the last accepted one: [B, K]."""
  last_B1 = last_of(accepted_B, path_BK)[:, None]
  return (draft.parents_BK == last_B1) & proposed(draft)


def levels(draft: types.Draft, accepted_B, path_BK) -> tuple[Array, Array]:
  """Counts drafts proposed one behind another: at most; on the path, with one
  more where its last accepted node has children."""
  if not is_one(draft):
    return draft.count_B, draft.count_B
  depth_BN, _ = shape(draft.parents_BK)
  depth_BK = jnp.where(proposed(draft), depth_BN[:, 1:], 0)
  more_B = jnp.any(children(draft, accepted_B, path_BK), -1)
  return jnp.max(depth_BK, -1, initial=0), accepted_B + more_B


def refused(draft: types.Draft, accepted_B, path_BK) -> Array:
  """Lists the drafts behind the accepted ones, -1 elsewhere."""
  # By name: a user's ids may be of another type, which no loop would carry.
  tokens_BK = draft.tokens_BK.astype(jnp.int32)
  index_1K = jnp.arange(tokens_BK.shape[1])[None]
  accepted_B1 = accepted_B[:, None]
  if not is_one(draft):
    behind_BK = (index_1K >= accepted_B1) & chain.proposed(draft)
    return jnp.where(behind_BK, tokens_BK, -1)
  below_BK = children(draft, accepted_B, path_BK)
  first_B1 = jnp.argmax(below_BK, -1)[:, None]
  token_B1 = jnp.take_along_axis(tokens_BK, first_B1, 1)
  some_BK = (index_1K == accepted_B1) & jnp.any(below_BK, -1, keepdims=True)
  return jnp.where(some_BK, token_B1, -1)


def places(draft: types.Draft, path_BK: Array) -> Array:
  """Finds the largest place in a level, from 0, along a path: [B, K]. In a tree
  of the likeliest nodes, the largest place among these."""
  K = path_BK.shape[1]
  place_BK = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), path_BK.shape)
  if 'worth_BK' not in draft.marks:
    depth_BK = shape(draft.parents_BK).depth_BN[:, 1:]
    level_BKK = depth_BK[:, :, None] == depth_BK[:, None]
    place_BK = jnp.sum(jnp.tril(level_BKK, -1), -1, dtype=jnp.int32)
  on_BK = jnp.take_along_axis(place_BK, jnp.minimum(path_BK, K - 1), 1)
  return jax.lax.cummax(on_BK, axis=1)


def along(path_BK: Array, drafts_BN: Array, *columns: Array | None):
  """Reorders tokens, then columns, along a path with its root. Columns are [B,
  N, ...], by number before and by place in the path after."""
  most = path_BK.shape[1]

  def pick(x_BNX, numbers_BN):
    at = jnp.minimum(numbers_BN, most)
    at = at.reshape(*at.shape, *[1] * (x_BNX.ndim - 2))
    return jnp.take_along_axis(x_BNX, at, 1)

  with_root_BN = jnp.pad(path_BK + 1, ((0, 0), (1, 0)))
  rest = [None if x is None else pick(x, with_root_BN) for x in columns]
  return pick(drafts_BN, jnp.pad(path_BK, ((0, 0), (0, 1)))), *rest
