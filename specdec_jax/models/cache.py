"""Key/value caches with S slots, which do not know how many are in use.

The caller chooses slots (the index in memory) and positions (the input to
RoPE). Writing a slot again overwrites it, so rejected tokens need no rollback.
Writes to a slot >= S are dropped. Negative slots wrap: never use one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.kernels import calls

Array = jax.Array


class KVCache(NamedTuple):
  """Keys and values of one layer. Heads come before slots: with slots first,
  XLA CPU transposes the whole cache in every layer and step (2.0 ms a step, not
  0.6, for SmolLM2-135M)."""

  k_BGSC: Array
  v_BGSC: Array


class Panels(NamedTuple):
  """One packed layer's keys, [B, G, S / W, C, W], and values, [B, G, C / W, S,
  W], in panels of W = kernels.calls.WIDE, to which S and C are rounded up."""

  k: Array
  v: Array


def empty(config, rows: int, slots: int) -> KVCache | Panels:
  """Returns zeros for one layer's keys and values."""
  shape = rows, config.kv_heads, slots, config.head_dim
  kind, shapes = KVCache, (shape, shape)
  if config.run.packed:
    kind, shapes = Panels, calls.cache_shapes(*shape)
  # Two arrays: a shared one could not be donated twice.
  return kind(*(jnp.zeros(x, config.activations) for x in shapes))


def of_layers(config, rows: int, slots: int, constrain=None):
  """Returns zeros for all layers: a tuple of `empty`, or Stacked, sharded by
  `constrain` as in models.lm.make."""
  axes = ('batch', 'kv_heads', 'slots', None)
  cache: Any = tuple(empty(config, rows, slots) for _ in range(config.depth))
  if config.run.scan_layers:
    shape = (rows, config.depth, slots, config.kv_heads * config.head_dim)
    cache = Stacked(*(jnp.zeros(shape, config.dtype) for _ in 'kv'))
    axes = ('batch', None, 'slots', 'kv_heads')
  if constrain is None or config.run.packed:  # which is on one device
    return cache
  return jax.tree.map(lambda x: constrain(x, *axes), cache)


def by_slot(tree):
  """Replaces every Panels in a pytree by a KVCache, to look at single slots."""

  def plain(x):
    if not isinstance(x, Panels):
      return x
    B, G, P, C, W = x.k.shape
    k_BGSC = jnp.swapaxes(x.k, 3, 4).reshape(B, G, P * W, C)
    v_BGSC = jnp.swapaxes(x.v, 2, 3).reshape(B, G, P * W, -1)[..., :C]
    return KVCache(k_BGSC, v_BGSC)

  return jax.tree.map(plain, tree, is_leaf=lambda x: isinstance(x, Panels))


def panels(cache: KVCache) -> Panels:
  """Inverts by_slot, for one layer; slots and channels are padded."""
  k_BGSC, v_BGSC = cache
  B, G, S, C = k_BGSC.shape
  shapes = calls.cache_shapes(B, G, S, C)
  (_, _, across, _, W), (_, _, down, slots, _) = shapes
  pad = lambda x, width: jnp.pad(
    x, ((0, 0), (0, 0), (0, slots - S), (0, width - C))
  )
  k = jnp.swapaxes(pad(k_BGSC, C).reshape(B, G, across, W, C), 3, 4)
  v = jnp.swapaxes(pad(v_BGSC, down * W).reshape(B, G, slots, down, W), 2, 3)
  return Panels(k, v)


class Writer(NamedTuple):
  """Puts one call's keys and values in a layer's cache (layers.Block's write).

  cache: before the call; Panels only as kernels.calls takes it.
  slots_BT: where the call's keys and values go.
  layer: its number in Stacked; may be traced.
  """

  cache: Any
  slots_BT: Array
  layer: Any = 0

  def __call__(self, k_BTGC: Array, v_BTGC: Array) -> tuple[Any, KVCache]:
    if not isinstance(self.cache, Stacked):
      written = write(self.cache, k_BTGC, v_BTGC, self.slots_BT)
      return written, written
    B, T, G, _ = k_BTGC.shape
    row_B1 = jnp.arange(B)[:, None]

    def put(old, new_BTGC):
      new_BTF = new_BTGC.reshape(B, T, -1)
      at = row_B1, self.layer, self.slots_BT
      return old.at[at].set(new_BTF, mode='drop')

    def pick(x_BNSF):
      pick = jax.lax.dynamic_index_in_dim
      x_BSF = pick(x_BNSF, self.layer, 1, keepdims=False)
      return jnp.swapaxes(x_BSF.reshape(*x_BSF.shape[:2], G, -1), 1, 2)

    stack = Stacked(*map(put, self.cache, (k_BTGC, v_BTGC)))
    return stack, KVCache(*map(pick, stack))


class Stacked(NamedTuple):
  """Keys and values of all layers, [B, depth, S, G * C]. A scan over layers
  updates it in place only as part of its carry. With slots before heads, and
  heads and channels in one axis, XLA TPU neither copies nor transposes it."""

  k_BNSF: Array
  v_BNSF: Array


def write(cache: KVCache, k_BTGC, v_BTGC, slots_BT) -> KVCache:
  """Writes keys and values, [B, T, G, C], into these slots of a cache."""

  def put(old_SC, new_TC, slots_T):
    return old_SC.at[slots_T].set(new_TC, mode='drop')

  # Mapped over rows and heads, so that a scatter split by them gathers none.
  puts = jax.vmap(jax.vmap(put, (0, 1, None)))
  k_BGSC = puts(cache.k_BGSC, k_BTGC, slots_BT)
  v_BGSC = puts(cache.v_BGSC, v_BTGC, slots_BT)
  return KVCache(k_BGSC, v_BGSC)


def compact(cache: Any, from_BK: Array, to_BK: Array) -> Any:
  """Moves slots in all layers' caches: all reads before all writes. What goes
  to a slot >= S is dropped, or lies in Panels' padding, unattended."""

  def moved(x, index):
    def row(x, from_K, to_K):
      found = x.at[index(from_K)].get(mode='clip')
      return x.at[index(to_K)].set(found, mode='drop')

    return jax.vmap(row)(x, from_BK, to_BK)

  each, W = slice(None), calls.WIDE
  in_rows = lambda slots_K: (..., slots_K, each)
  if isinstance(cache, Stacked):
    # By layer: across layers XLA TPU would transpose all of the cache.
    layer_N1 = jnp.arange(cache.k_BNSF.shape[1])[:, None]
    in_rows = lambda slots_K: (layer_N1, slots_K[None])
  in_panels = lambda slots_K: (each, slots_K // W, each, slots_K % W)

  def of_array(x):
    if isinstance(x, Panels):
      return Panels(moved(x.k, in_panels), moved(x.v, in_rows))
    return moved(x, in_rows)

  is_panels = lambda x: isinstance(x, Panels)
  return jax.tree.map(of_array, cache, is_leaf=is_panels)
