"""Model calls over spans of tokens: slots, positions and mask; whole texts.

In a chain the token at index i of its row lives in slot i and has position i. A
row that must not write goes to slot S, where writes are dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import types

Array = jax.Array
# A slot past every cache: what is written there is dropped.
NOWHERE = 1 << 30


def open_cache(model: types.Model, params, rows: int, slots: int, source=None):
  """Makes an empty cache; an encoder reads the source: ValueError if None."""
  if model.encode is not None and source is None:
    raise ValueError('the model has an encoder: every request needs a source')
  cache = model.init_cache(rows, slots)
  return cache if model.encode is None else model.encode(params, source, cache)


def read(
  model: types.Model,
  params,
  tokens_BT: Array,
  start_B: Array,
  cache,
  *,
  slots: int,
  keep_BT: Array | None = None,
  taps: tuple[int, ...] = (),
  tree: tuple[Array, Array] | None = None,
  begin: int = 0,
  part: Mapping[str, Any] | None = None,
):
  """Reads tokens_BT as the tokens start_B ... start_B + T - 1 of their rows.

  Worked example, slots=8, T=2, start_B=[3, 7]: row 0 writes slots 3 and 4 and
  sees 0..3 and 0..4; row 1 writes slot 7, and its second token nowhere.

  start_B: the first one's index in its row; may be negative.
  slots: the cache's S; nothing is written outside 0 <= slot < slots.
  keep_BT: where false, nothing is written.
  taps: layers whose residual streams are returned.
  tree: for a window that is one, (depth_BN, sees_BTN): the depth of each of its
    N tokens, and which of them this call's tokens attend to. Number n lies in
    slot start_B + n, and has the position start_B + depth_BN[:, n].
  begin: the number of this call's first token.
  part: `layers` and `residual_BTD` (types.Model), to run a part of the model.

  Returns (hidden_BTD, taps, cache), as types.Model.apply.
  """
  T = tokens_BT.shape[1]
  at_BT = start_B[:, None] + jnp.arange(begin, begin + T)[None]
  ok_BT = (at_BT >= 0) & (at_BT < slots)
  if keep_BT is not None:
    ok_BT &= keep_BT
  slots_BT = jnp.where(ok_BT, at_BT, slots)
  positions_BT = jnp.maximum(at_BT, 0)
  mask_BTS = jnp.arange(slots)[None, None] <= positions_BT[..., None]
  # A model need not know of parts, nor of trees.
  more = dict(part or {})
  if tree is not None:
    positions_BN, more['at_BS'], mask_BTS = _of_tree(*tree, start_B, slots)
    positions_BT = positions_BN[:, begin : begin + T]
  return model.apply(
    params,
    tokens_BT,
    slots_BT,
    positions_BT,
    mask_BTS,
    cache,
    taps=taps,
    **more,
  )


def _of_tree(depth_BN: Array, sees_BTN: Array, start_B: Array, slots: int):
  """Returns (positions_BN, at_BS, mask_BTS) of a tree window; see read."""
  N = depth_BN.shape[1]
  positions_BN = start_B[:, None] + depth_BN
  slot_1S = jnp.arange(slots)[None]
  number_BS = slot_1S - start_B[:, None]
  inside_BS = (number_BS >= 0) & (number_BS < N)
  number_BS = jnp.clip(number_BS, 0, N - 1)
  of_BS = jnp.take_along_axis(positions_BN, number_BS, 1)
  sees_BTS = jnp.take_along_axis(sees_BTN, number_BS[:, None], 2)
  mask_BTS = jnp.where(
    inside_BS[:, None], sees_BTS, slot_1S[:, None] < start_B[:, None, None]
  )
  return positions_BN, jnp.where(inside_BS, of_BS, slot_1S), mask_BTS


def compact(model, cache, first_B: Array, accepted_B: Array, path_BK: Array):
  """Puts accepted nodes side by side in the cache; node 0 lies at first_B."""
  K = path_BK.shape[1]
  index_1K = jnp.arange(K)[None]
  moves_BK = index_1K < accepted_B[:, None]
  moves_BK &= path_BK != index_1K
  from_BK = first_B[:, None] + jnp.minimum(path_BK, K - 1)
  to_BK = jnp.where(moves_BK, first_B[:, None] + index_1K, NOWHERE)
  move = lambda cache: model.compact(cache, from_BK, to_BK)
  return once(jnp.any(moves_BK), move, cache)


def hidden(
  model: types.Model,
  params: types.Params,
  tokens_BT: Array,
  source: types.Source | None = None,
) -> Array:
  """Computes teacher-forced states [B, T, D]; gradients reach `source` too."""
  B, T = tokens_BT.shape
  cache = open_cache(model, params, B, T, source)
  start_B = jnp.zeros((B,), jnp.int32)
  return read(model, params, tokens_BT, start_B, cache, slots=T)[0]


class Reading(NamedTuple):
  """Prompts that a model is reading; it has passed `at` tokens of every row.

  features_BPE: what its taps saw, None without; has room for a last chunk to
    end past L, where a clamped update would shift it.
  """

  at: Array
  cache: Any
  features_BPE: Array | None = None

  def features_BLE(self, tokens_BL: Array) -> Array | None:
    """Cuts the features to these prompts."""
    found = self.features_BPE
    return None if found is None else found[:, : tokens_BL.shape[1]]


def opened(
  model, params, tokens_BL: Array, cache, chunk: int, taps: tuple[int, ...]
) -> Reading:
  """Begins a Reading; nothing is read yet. Arguments as for prefill."""
  if not taps:
    return Reading(jnp.int32(0), cache)
  B, L = tokens_BL.shape
  piece = _piece(model, params, tokens_BL, jnp.zeros(B, int), chunk, taps)
  _, tapped, _ = jax.eval_shape(piece, jnp.int32(0), cache)
  width = sum(x.shape[-1] for x in tapped)
  return Reading(jnp.int32(0), cache, jnp.zeros((B, L + chunk, width)))


def resumed(
  at: Array, cache, features_BLE: Array | None, chunk: int
) -> Reading:
  """Begins a Reading whose cache has the first `at` tokens of every row."""
  if features_BLE is None:
    return Reading(at, cache)
  return Reading(at, cache, jnp.pad(features_BLE, ((0, 0), (0, chunk), (0, 0))))


def read_on(
  model,
  params,
  tokens_BL: Array,
  count_B: Array,
  reading: Reading,
  chunk: int,
  taps: tuple[int, ...],
  most: Array | None = None,
) -> Reading:
  """Reads the chunks that are left, or `most` of them; see prefill."""
  piece = _piece(model, params, tokens_BL, count_B, chunk, taps)

  def body(start, carry):
    cache, features_BPE = carry
    _, tapped, cache = piece(start, cache)
    if features_BPE is not None:
      features_BPE = _put(features_BPE, concat(tapped), start)
    return cache, features_BPE

  end = jnp.max(count_B)
  if most is not None:
    end = jnp.minimum(end, reading.at + most * chunk)
  carry = reading.cache, reading.features_BPE
  start, carry = _by_chunks(body, carry, chunk, end, reading.at)
  return Reading(start, *carry)


def _piece(model, params, tokens_BL, count_B, chunk: int, taps):
  """Makes (start, cache) -> what `read` returns for a chunk of prompts."""
  B, L = tokens_BL.shape

  def piece(start, cache):
    index_T = start + jnp.arange(chunk)
    return read(
      model if isinstance(model, types.Model) else model(index_T),
      params,
      at(tokens_BL, index_T),
      jnp.full((B,), start),
      cache,
      slots=L,
      keep_BT=index_T[None] < count_B[:, None],
      taps=taps,
    )

  return piece


def prefill(
  model: types.Model | Callable[[Array], types.Model],
  params,
  tokens_BL: Array,
  count_B: Array,
  cache,
  *,
  chunk: int,
):
  """Reads the first count_B tokens of every row, `chunk` at a time.

  The number of chunks is traced: prompts of every length share one program.
  Never applies the head. Returns the cache.

  model: or a function that makes it from a chunk's indices [T], for one that
    reads more than tokens (models.eagle). cache: a slot for each token.
  """
  reading = Reading(jnp.int32(0), cache)
  return read_on(model, params, tokens_BL, count_B, reading, chunk, ()).cache


def score(
  readers: Sequence[tuple[types.Model, types.Params]],
  tokens_BL: Array,
  begin_B: Array,
  end_B: Array,
  columns: Callable[..., Sequence[Array]],
  *,
  chunk: int,
  source: types.Source | None = None,
) -> list[Array]:
  """Reads a text teacher-forced and computes numbers about its tokens.

  Called inside a jit, `chunk` tokens at a time: logits [B, L, V] are not held.
  Returns float32 [B, L], with garbage before begin_B and at or past end_B.

  tokens_BL: the texts, prompts included; they end at end_B.
  begin_B: the first token of each text that numbers are wanted for; a chunk
    before all of them computes no logits.
  columns: (index_T, *logits_BTV) -> arrays [B, T] about the tokens at index_T,
    from the logits with which each reader predicts them.
  """
  B, L = tokens_BL.shape

  all_B = jnp.full(B, L)
  pieces = [_piece(*x, tokens_BL, all_B, chunk, ()) for x in readers]

  def step(start, caches):
    pairs = zip(pieces, caches, strict=True)
    found = [piece(start, cache) for piece, cache in pairs]

    def made():
      pairs = zip(readers, found, strict=True)
      each = (model.head(params, x) for (model, params), (x, *_) in pairs)
      return [*columns(start + jnp.arange(1, chunk + 1), *each)]

    wanted = start + chunk >= jnp.min(begin_B)
    new = once(wanted, lambda _: made(), blank(made))
    return new, [cache for *_, cache in found]

  def body(start, carry):
    caches, out = carry
    new, caches = step(start, caches)
    pairs = zip(out, new, strict=True)
    return caches, [_put(old_BP, x_BT, start + 1) for old_BP, x_BT in pairs]

  caches = [open_cache(*reader, B, L, source) for reader in readers]
  count = len(jax.eval_shape(step, jnp.int32(0), caches)[0])
  # Room for the last chunk to end past L: a clamped update would shift it.
  out = [jnp.zeros((B, L + chunk + 1)) for _ in range(count)]
  _, (_, out) = _by_chunks(body, (caches, out), chunk, jnp.max(end_B) - 1)
  return [x_BP[:, :L] for x_BP in out]


def once(flag: Array, function, carry):
  """Returns function(carry) if flag, else carry; function keeps its structure.

  A loop with at most one turn, not lax.cond: XLA CPU copies every cache into
  and out of a conditional (3.6 ms a window for SmolLM2-135M), while loops
  update them in place.
  """
  return jax.lax.while_loop(
    lambda turn: turn[0],
    lambda turn: (jnp.zeros((), bool), function(turn[1])),
    (flag, carry),
  )[1]


def blank(function, *args):
  """Makes zeros in the shapes that function(*args) returns."""
  shapes = jax.eval_shape(function, *args)
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _by_chunks(body, carry, chunk: int, end: Array, start: Array | int = 0):
  """Runs carry = body(start, carry) by chunks below end; -> (start, carry)."""
  return jax.lax.while_loop(
    lambda started: started[0] < end,
    lambda started: (started[0] + chunk, body(*started)),
    (jnp.int32(start), carry),
  )


def _put(old_BPX: Array, new_BTX: Array, start: Array) -> Array:
  new_BTX = new_BTX.astype(old_BPX.dtype)
  return jax.lax.dynamic_update_slice_in_dim(old_BPX, new_BTX, start, 1)


def at(x_BL: Array, index_T: Array) -> Array:
  """Picks columns of x_BL, [B, T]; past its end the last one."""
  return x_BL.at[:, index_T].get(mode='clip')


def concat(tapped: tuple[Array, ...]) -> Array:
  """Joins taps, [B, T, D] each, into features [B, T, E]."""
  return jnp.concatenate(tapped, -1)
