"""Drafts a window: a chain, or a tree that grows a level at a time. X counts
nodes in a level, M those in the level before it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.models import eagle

Array = types.Array


# The most levels of a tree of the best nodes.
DEEP = 5
_BEST = 'best:'


def levels_of(tree: str) -> tuple[int, ...]:
  """Counts the nodes drafted in each level: '4,4,2' -> (4, 4, 2); '' -> ().
  'best:8' -> (5, 3, 3, 2, 2), of which the best 8 are proposed (best_of).
  Raises ValueError for anything else, or a level without nodes."""
  if not tree:
    return ()
  best, levels = 0, ()
  try:
    if best := best_of(tree):
      shares = range(2, 2 + min(best, DEEP))  # a half, a third, ...
      levels = tuple(max(4 - i, -(-(best + 1) // i)) for i in shares)
    else:
      levels = tuple(int(x) for x in tree.split(','))
  except ValueError:
    pass
  if not levels or min(levels) < 1 or (best or sum(levels)) > 64:
    raise ValueError(
      f"tree={tree}: must be the nodes of each level, as in '4,4,2,2', or how "
      "many of the likeliest, as in 'best:8'; 64 at most in all"
    )
  return levels


def settings_of(tree: str) -> dict[str, Any]:
  """Returns arguments for `draft`."""
  return dict(levels=levels_of(tree), best=best_of(tree))


def best_of(tree: str) -> int:
  """Reads 'best:8' as 8, and any other tree as 0."""
  return int(tree.removeprefix(_BEST)) if tree.startswith(_BEST) else 0


def is_ranked(drafter: types.Drafter) -> bool:
  """Tells whether it proposes only the likeliest nodes that it drafts."""
  return sum(drafter.tree) > drafter.gamma


def size_of(tree: str) -> int:
  """Counts the nodes proposed; 0 for '', a chain."""
  return best_of(tree) or sum(levels_of(tree))


class Level(NamedTuple):
  """The nodes in one level.

  tokens_BX, q_BXV: as in types.Draft; q_BXV None where all rows are greedy.
  parents_BX, of_BX: their parents, as nodes of the window, and counted within
    the level before.
  ok_BX: which are proposed.
  joint_BX: the draft's probability for their paths, at temperature 1.
  """

  tokens_BX: Array
  q_BXV: Array | None
  parents_BX: Array
  of_BX: Array
  ok_BX: Array
  joint_BX: Array


def root(rows: int) -> Level:
  """Returns the last committed token, as a level."""
  none_B1, one_B1 = jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1))
  return Level(none_B1, None, none_B1, none_B1, one_B1 > 0, one_B1)


def grow(
  noise, sampling, above: Level, logits, *, first, depth, count, certain=False
) -> Level:
  """Draws `count` children for the level `above`. How many each node gets is
  decided before one is drawn; see _allotted.

  noise, sampling: the window's, as in types.Drafter and types.Context.
  logits: the draft's after each node above; eagle.Logits, or [B, M, V].
  first, depth: above's first node (-1 is the root) and depth (0).
  certain: take the likeliest, whatever the sampling: q_BXV is None.
  """
  logits = eagle.every(logits)
  each = min(count, logits.vocab)
  if logits.some.shape[-1] < each:
    logits = eagle.every(logits.whole())
  B, M, _ = logits.some.shape
  greedy_B11 = sampling_lib.is_greedy(sampling)[:, None, None]
  fixed = certain or sampling.temperature_B is None
  total_BM1 = jax.nn.logsumexp(logits.some, -1, keepdims=True)
  nodes_BM = jnp.broadcast_to(first + jnp.arange(M)[None], (B, M))
  top_BMX, place_BMX = sampling_lib.largest(logits.some, each)
  taken_BX = _allotted(above, jnp.exp(top_BMX - total_BM1), count)
  of_BX, rank_BX = taken_BX // each, taken_BX % each
  along = lambda x_BM, at_BX=of_BX: jnp.take_along_axis(x_BM, at_BX, 1)
  pick = lambda x_BMX: along(x_BMX.reshape(B, M * each), taken_BX)

  def likeliest():
    best_BMX = logits.id_of(place_BMX)
    q_BXV = None if fixed else _certain(pick(best_BMX), logits)
    return best_BMX, top_BMX > -jnp.inf, top_BMX, q_BXV

  def drawn():
    logits_BMV = logits.whole()
    q_BMV = sampling_lib.probabilities(logits_BMV, sampling)
    tokens_BMX, some_BMX = noise.children(nodes_BM, depth, q_BMV, each)
    best_BMX, is_BMX, _, one_hot_BXV = likeliest()
    either = functools.partial(jnp.where, greedy_B11)
    tokens_BMX = either(best_BMX, tokens_BMX)
    q_BXV = along(q_BMV, of_BX[..., None])
    family_BXX = along(tokens_BMX, of_BX[..., None])
    q_BXV = _given(q_BXV, family_BXX, rank_BX)
    own_BMX = jnp.take_along_axis(logits_BMV, tokens_BMX, -1)
    chosen = tokens_BMX, either(is_BMX, some_BMX), own_BMX
    return *chosen, either(jnp.asarray(one_hot_BXV), q_BXV)

  of_both = functools.partial(sampling_lib.of_greedy, sampling)
  found = likeliest() if fixed else of_both(likeliest, drawn)
  tokens_BMX, some_BMX, own_BMX, q_BXV = found
  # Rounding may not make a child likelier than its parent.
  own_BX = jnp.minimum(jnp.exp(pick(own_BMX - total_BM1)), 1)
  joint_BX, ok_BX = along(above.joint_BX) * own_BX, along(above.ok_BX)
  parents = along(nodes_BM), of_BX, ok_BX & pick(some_BMX)
  return Level(pick(tokens_BMX), q_BXV, *parents, joint_BX)


def _certain(tokens_BX: Array, logits: eagle.Logits) -> Array:
  """Returns a one-hot q for tokens that are certain: [B, X, V]."""
  wide = jnp.promote_types(logits.some.dtype, jnp.result_type(float))
  return jax.nn.one_hot(tokens_BX, logits.vocab, dtype=wide)


def _allotted(above: Level, likely_BMX: Array, count: int) -> Array:
  """Chooses children to draw, [B, X], as indices of (node, rank among them).

  The worthiest come first, so that a level with fewer has the first of these. A
  child's worth is its path's probability times, for the r-th child,
  likely_BMX's r-th (descending): what Li et al. 2024, section 3.2
  (https://arxiv.org/abs/2406.16858), compute for drawn ones.
  """
  worth_BMX = above.joint_BX[..., None] * likely_BMX
  worth_BMX = jnp.where(above.ok_BX[..., None], worth_BMX, 0)
  worth_BX = worth_BMX.reshape(len(worth_BMX), -1)
  # Elder siblings come first: worths of a node descend, and of two that are
  # equal top_k takes the first.
  return jax.lax.top_k(worth_BX, count)[1]


def _given(q_BXV: Array, family_BXY: Array, rank_BX: Array) -> Array:
  """Returns a child's q by its rank, given its elder siblings. family_BXY has
  all children of the node's parent, in the order drawn."""
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
  """Tells which numbers a level's nodes attend to: [B, X, N]. parents_BX counts
  within the level before, which attends to above_BMN; `begin` is the number of
  the level's first node."""
  seen_BXN = jnp.take_along_axis(above_BMN, parents_BX[..., None], 1)
  X, N = parents_BX.shape[1], above_BMN.shape[-1]
  return seen_BXN | jnp.eye(X, N, begin, dtype=bool)[None]


# --- windows ------------------------------------------------------------------


def draft(
  context: types.Context,
  noise: types.Noise,
  cache: Any,
  first: Callable[..., Any],
  read: Callable[..., Any],
  logits: Callable[..., Any],
  *,
  gamma: int,
  levels: tuple[int, ...] = (),
  best: int = 0,
  least: float = 0.0,
) -> tuple[types.Draft, Any]:
  """Drafts a chain, or a tree if it has levels; returns (types.Draft, cache).

  What no row wants costs nothing.

  context, noise: as for types.Drafter.propose. cache: the draft's.
  first: cache -> (hidden_BXD, cache): the draft's state after the last
    committed token, X = 1.
  read: (cache, tokens_BX, hidden_BXD, start_B, **tree) -> (hidden_BXD, cache):
    reads tokens at one depth after the states of those before them; start_B,
    and for a tree `tree` and `begin`, as in forward.read.
  logits: (hidden_BXD, depth) -> what may follow tokens at this depth;
    eagle.Logits, or [B, X, V]. In a chain depth is traced.
  gamma: drafts in a window. levels: the nodes in each level.
  best: how many nodes a tree proposes, the likeliest; 0: all.
  least: the confidence below which a row stops its chain; see lm.make.
  """
  how = context, noise, cache, first, read, logits
  return _tree(*how, levels, best) if levels else _chain(*how, gamma, least)


def draw(noise, context, logits: eagle.Logits, offset) -> tuple[Array, Any]:
  """Draws a draft token from logits [B, 1, R], at its offset in the window;
  returns (token_B, q_BV). q_BV is None where all rows are greedy."""
  sampling = context.sampling
  best_B11 = jnp.max(logits.some, -1, keepdims=True)
  if sampling.temperature_B is None:
    first_B11 = sampling_lib.first_of(logits.some, best_B11)
    return logits.id_of(first_B11[:, 0, 0]), None
  q_BV = sampling_lib.probabilities(logits.whole(), sampling, best_B11)[:, 0]
  return noise.draft(offset, q_BV), q_BV


def _chain(context, noise, cache, first, read, logits, gamma: int, least):
  """Loops in the program: compile time does not grow with gamma."""
  wants = lambda offset: context.live_B & (offset < context.gamma_B)

  def drawn(memory, going_B, offset):
    after = eagle.every(logits(memory[0], offset))
    going_B &= wants(offset)
    if least:
      going_B &= _confidence(after.some[:, 0]) >= least
    return memory, going_B, draw(noise, context, after, offset)

  begin = lambda cache: drawn(first(cache), wants(0), 0)
  (hidden_BXD, _), *rest = forward.blank(begin, cache)
  memory, going_B, made = forward.once(
    jnp.any(wants(0)),
    lambda turn: begin(turn[0][1]),
    ((hidden_BXD, cache), *rest),
  )
  # None, of certain drafts, stays.
  room = lambda x: jnp.zeros((gamma, *x.shape), x.dtype).at[0].set(x)
  made = jax.tree.map(room, made)

  def body(carry):
    offset, (hidden_BXD, cache), going_B, made, count_B = carry
    last_B1 = made[0][offset - 1][:, None]
    at_B = context.lengths_B + offset - 1
    memory = read(cache, last_B1, hidden_BXD, at_B)
    memory, going_B, new = drawn(memory, going_B, offset)
    put = lambda all_KB, x_B: all_KB.at[offset].set(x_B)
    made = jax.tree.map(put, made, new)
    return offset + 1, memory, going_B, made, count_B + going_B

  carry = jnp.int32(1), memory, going_B, made, going_B.astype(jnp.int32)
  going = lambda carry: jnp.any(carry[2] & wants(carry[0]))
  _, memory, _, made, count_B = jax.lax.while_loop(going, body, carry)
  tokens_BK, q_BKV = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), made)
  return types.Draft(tokens_BK, q_BKV, count_B), memory[1]


def _confidence(logits_BV: Array) -> Array:
  """Returns the largest probability at temperature 1: [B]."""
  best_B1 = jnp.max(logits_BV, -1, keepdims=True)
  return 1 / jnp.sum(jnp.exp(logits_BV - best_B1), -1)


def _tree(context, noise, cache, first, read, logits, levels, best: int):
  N, B = sum(levels) + 1, len(context.lengths_B)
  depths = np.repeat(np.arange(len(levels) + 1), (1, *levels))
  depth_BN = jnp.broadcast_to(jnp.asarray(depths, jnp.int32)[None], (B, N))
  sees_BXN = jnp.broadcast_to((jnp.arange(N) == 0)[None, None], (B, 1, N))
  level, made, hidden_BXD, number = root(B), [], None, 0

  def grown(depth: int, above: Level, above_BMD, turn):
    cache = turn[0]
    if not depth:
      hidden_BXD, cache = first(cache)
    else:
      parents_BXD = jnp.take_along_axis(above_BMD, above.of_BX[..., None], 1)
      nodes = above.tokens_BX, parents_BXD, context.lengths_B - 1
      hidden_BXD, cache = read(
        cache, *nodes, tree=(depth_BN, sees_BXN), begin=number
      )
    given = noise, context.sampling, above, logits(hidden_BXD, depth)
    sizes = dict(first=number - 1, depth=depth, count=levels[depth])
    return cache, hidden_BXD, grow(*given, **sizes, certain=best > 0)

  for depth, above in enumerate([1, *levels[:-1]]):
    if depth:
      sees_BXN = sees(level.of_BX, sees_BXN, number)
    turn = functools.partial(grown, depth, level, hidden_BXD)
    # The nodes of this level come after those of the levels before.
    room_B = context.gamma_B > number + above - 1
    if best:
      room_B = _enters(context.gamma_B, level, made)
    empty = forward.blank(turn, (cache,))[1:]
    cache, hidden_BXD, level = forward.once(
      jnp.any(context.live_B & room_B), turn, (cache, *empty)
    )
    made.append(level)
    number += above
  whole = jax.tree.map(lambda *x: jnp.concatenate(x, 1), *made)
  shape = dict(parents_BK=whole.parents_BX, proposed_BK=whole.ok_BX)
  if best:
    whole, shape = _best(whole, best)
  drafts = whole.tokens_BX, whole.q_BXV, context.gamma_B
  return types.Draft(*drafts, **shape), cache


def _enters(gamma_B: Array, last: Level, made: list[Level]) -> Array:
  """Tells whether a child of the last level may join the best gamma_B nodes."""
  if not made:
    return gamma_B > 0
  joint_BX = jnp.concatenate([_worth(x) for x in made], 1)
  sorted_BX = jnp.sort(joint_BX, -1, descending=True)
  at_B1 = jnp.maximum(gamma_B, 1)[:, None] - 1
  least_B1 = jnp.take_along_axis(sorted_BX, at_B1, 1, mode='fill', fill_value=0)
  return (gamma_B > 0) & (jnp.max(_worth(last), -1) > least_B1[:, 0])


def _worth(level: Level) -> Array:
  """Returns the probability of each node's path; 0 if it is not proposed."""
  joint_BX = level.joint_BX
  return jnp.where(level.ok_BX & (joint_BX > 0), joint_BX, 0)


def _best(whole: Level, count: int) -> tuple[Level, dict[str, Array]]:
  """Picks the likeliest nodes, in descending order, so that fewer are the best
  of fewer; returns (nodes, their parents_BK, proposed_BK and marks). EAGLE-2
  (Li et al. 2024, section 3.3, https://arxiv.org/abs/2406.16858). A parent is
  no less likely than its child, and among equals top_k takes the first."""
  worth_BK, order_BK = jax.lax.top_k(_worth(whole), count)
  pick = lambda x_BX: jnp.take_along_axis(x_BX, order_BK, 1)
  best = Level(*(None if x is None else pick(x) for x in whole))
  is_BKK = best.parents_BX[..., None] == order_BK[:, None]
  place_BK = jnp.argmax(is_BKK, -1).astype(jnp.int32)
  parents_BK = jnp.where(best.parents_BX < 0, -1, place_BK)
  ok_BK = worth_BK > 0
  # Those that are not proposed may have no parent here.
  parents_BK = jnp.where(ok_BK, parents_BK, -1)
  marks = {'worth_BK': worth_BK}
  return best, dict(parents_BK=parents_BK, proposed_BK=ok_BK, marks=marks)
