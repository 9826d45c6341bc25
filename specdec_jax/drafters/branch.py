"""Growing a tree of drafts, a level at a time.

X: the nodes of a level; M: those of the level before it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import forward, types
from specdec_jax import sampling as sampling_lib

Array = types.Array


def levels_of(tree: str) -> tuple[int, ...]:
  """'4,4,2' -> (4, 4, 2): how many nodes each level of a tree has; '' -> ().

  Raises:
    ValueError: something else, or a level without nodes.
  """
  if not tree:
    return ()
  try:
    levels = tuple(int(x) for x in tree.split(','))
  except ValueError:
    levels = ()
  if not levels or min(levels) < 1 or sum(levels) > 64:
    raise ValueError(
      f'tree={tree}: must be the nodes of each level, 64 at most in all, as in '
      "'4,4,2,2'"
    )
  return levels


class Level(NamedTuple):
  """The nodes of one level.

  tokens_BX, q_BXV: as in types.Draft.
  parents_BX: nodes of the window.
  of_BX: their parents, counted within the level before.
  ok_BX: which are proposed.
  joint_BX: the draft's probability of their paths, at temperature 1.
  """

  tokens_BX: Array
  q_BXV: Array
  parents_BX: Array
  of_BX: Array
  ok_BX: Array
  joint_BX: Array


def root(rows: int) -> Level:
  """The last committed token, as a level."""
  none_B1, one_B1 = jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1))
  return Level(none_B1, one_B1, none_B1, none_B1, one_B1 > 0, one_B1)


def grow(
  noise: types.Noise,
  sampling: types.Sampling,
  above: Level,
  logits_BMV: Array,
  *,
  first: int,
  depth: int,
  count: int,
) -> Level:
  """Draws the `count` children of a level.

  How many each node gets is decided before one is drawn; see _allotted.

  Args:
    noise, sampling: of the window.
    above: the level before.
    logits_BMV: the draft's, after each of its nodes.
    first: the node that is the first of `above`; -1 is the root.
    depth: of `above`; 0 is the root's.
  """
  B, M, V = logits_BMV.shape
  each = min(count, V)
  greedy_B11 = sampling_lib.is_greedy(sampling)[:, None, None]
  total_BM1 = jax.nn.logsumexp(logits_BMV, -1, keepdims=True)
  nodes_BM = jnp.broadcast_to(first + jnp.arange(M)[None], (B, M))
  top_BMX, best_BMX = sampling_lib.largest(logits_BMV, each)
  taken_BX = _allotted(above, jnp.exp(top_BMX - total_BM1), count)
  of_BX, rank_BX = taken_BX // each, taken_BX % each
  pick = lambda x_BMX: jnp.take_along_axis(
    x_BMX.reshape(B, M * each), taken_BX, 1
  )
  along = lambda x_BM: jnp.take_along_axis(x_BM, of_BX, 1)
  wide = jnp.promote_types(logits_BMV.dtype, jnp.result_type(float))
  certain = lambda x_BX: jax.nn.one_hot(x_BX, V, dtype=wide)

  def likeliest():
    return best_BMX, top_BMX > -jnp.inf, certain(pick(best_BMX))

  def drawn():
    q_BMV = sampling_lib.probabilities(logits_BMV, sampling)
    tokens_BMX, some_BMX = noise.children(nodes_BM, depth, q_BMV, each)
    best = likeliest()
    tokens_BMX = jnp.where(greedy_B11, best[0], tokens_BMX)
    some_BMX = jnp.where(greedy_B11, best[1], some_BMX)
    q_BXV = jnp.take_along_axis(q_BMV, of_BX[..., None], 1)
    if noise.siblings == 'distinct':
      family_BXX = jnp.take_along_axis(tokens_BMX, of_BX[..., None], 1)
      q_BXV = _given(q_BXV, family_BXX, rank_BX)
    return tokens_BMX, some_BMX, jnp.where(greedy_B11, best[2], q_BXV)

  tokens_BMX, some_BMX, q_BXV = sampling_lib.of_greedy(
    sampling, likeliest, drawn
  )
  own_BMX = jnp.take_along_axis(logits_BMV, tokens_BMX, -1) - total_BM1
  joint_BX = along(above.joint_BX) * jnp.exp(pick(own_BMX))
  ok_BX = pick(some_BMX) & along(above.ok_BX)
  tokens_BX = pick(tokens_BMX)
  return Level(tokens_BX, q_BXV, along(nodes_BM), of_BX, ok_BX, joint_BX)


def _allotted(above: Level, likely_BMX: Array, count: int) -> Array:
  """The children that are drawn, [B, X], as indices of (node, rank among them).

  The worthiest first, so that a level of fewer has the first of these.

  Those of the largest products of a path's probability and, for the r-th child,
  the r-th largest of what may follow: what Li et al. 2024, section 3.2
  (https://arxiv.org/abs/2406.16858), compute of drawn ones.

  likely_BMX: the largest probabilities after each node, descending.
  """
  worth_BMX = above.joint_BX[..., None] * likely_BMX
  worth_BMX = jnp.where(above.ok_BX[..., None], worth_BMX, 0)
  worth_BX = worth_BMX.reshape(len(worth_BMX), -1)
  # Elder siblings come first: worths of a node descend, and of two that are
  # equal top_k takes the first.
  return jax.lax.top_k(worth_BX, count)[1]


def _given(q_BXV: Array, family_BXY: Array, rank_BX: Array) -> Array:
  """q of the child of a rank, given its elder siblings.

  family_BXY: the children of the node's parent, in the order drawn.
  """
  ids_11V = jnp.arange(q_BXV.shape[-1])[None, None]

  def without(y, q_BXV):
    elder_BX1 = (y < rank_BX)[..., None]
    token_BX1 = jax.lax.dynamic_index_in_dim(family_BXY, y, 2)
    return jnp.where(elder_BX1 & (ids_11V == token_BX1), 0, q_BXV)

  left_BXV = jax.lax.fori_loop(0, family_BXY.shape[-1] - 1, without, q_BXV)
  total_BX1 = jnp.sum(left_BXV, -1, keepdims=True)
  # The first is drawn from q as it is: not one bit may differ.
  some_BX1 = (rank_BX[..., None] > 0) & (total_BX1 > 0)
  return left_BXV / jnp.where(some_BX1, total_BX1, 1)


def sees(parents_BX: Array, above_BMN: Array, begin: int) -> Array:
  """Which numbers the nodes of a level attend to: [B, X, N].

  parents_BX: counted within the level before, which attends to above_BMN.
  begin: the number of the level's first node.
  """
  seen_BXN = jnp.take_along_axis(above_BMN, parents_BX[..., None], 1)
  X, N = parents_BX.shape[1], above_BMN.shape[-1]
  return seen_BXN | jnp.eye(X, N, begin, dtype=bool)[None]


def draft(
  levels: tuple[int, ...],
  context: types.Context,
  noise: types.Noise,
  cache: Any,
  first: Callable[..., Any],
  read: Callable[..., Any],
  logits: Callable[[Array, int], Array],
) -> tuple[types.Draft, Any]:
  """Grows a tree; (types.Draft, cache). Levels that no row wants cost nothing.

  Args:
    levels: how many nodes each has.
    context, noise: as for types.Drafter.propose.
    cache: the draft's.
    first: cache -> (hidden_BD, cache): the draft's state after the last
      committed token.
    read: (cache, tokens_BX, hidden_BXD, tree, begin) -> (hidden_BXD, cache):
      reads the nodes of a level, after the states of their parents; tree and
      begin as of forward.read.
    logits: (hidden_BXD, depth) -> what may follow nodes of this depth.
  """
  B, N = len(context.lengths_B), sum(levels) + 1
  depths = np.repeat(np.arange(len(levels) + 1), (1, *levels))
  depth_BN = jnp.broadcast_to(jnp.asarray(depths, jnp.int32)[None], (B, N))
  sees_BXN = jnp.broadcast_to((jnp.arange(N) == 0)[None, None], (B, 1, N))
  level, made, hidden_BXD, number = root(B), [], None, 0

  def grown(depth: int, above: Level, above_BMD, turn):
    cache = turn[0]
    if not depth:
      hidden_BD, cache = first(cache)
      hidden_BXD = hidden_BD[:, None]
    else:
      parents_BXD = jnp.take_along_axis(above_BMD, above.of_BX[..., None], 1)
      tree = depth_BN, sees_BXN
      hidden_BXD, cache = read(
        cache, above.tokens_BX, parents_BXD, tree, number
      )
    logits_BXV = logits(hidden_BXD, depth)
    sizes = dict(first=number - 1, depth=depth, count=levels[depth])
    new = grow(noise, context.sampling, above, logits_BXV, **sizes)
    return cache, hidden_BXD, new

  for depth, above in enumerate([1, *levels[:-1]]):
    if depth:
      sees_BXN = sees(level.of_BX, sees_BXN, number)
    turn = functools.partial(grown, depth, level, hidden_BXD)
    # The nodes of this level come after those of the levels before.
    wanted_B = context.live_B & (context.gamma_B > number + above - 1)
    empty = forward.blank(turn, (cache,))[1:]
    cache, hidden_BXD, level = forward.once(
      jnp.any(wanted_B), turn, (cache, *empty)
    )
    made.append(level)
    number += above
  whole = jax.tree.map(lambda *x: jnp.concatenate(x, 1), *made)
  drafts = whole.tokens_BX, whole.q_BXV, context.gamma_B
  shape = dict(parents_BK=whole.parents_BX, proposed_BK=whole.ok_BX)
  return types.Draft(*drafts, **shape), cache
