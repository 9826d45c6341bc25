"""The key/value cache: memory without a length.

The caller owns slots (where in memory) and positions (what RoPE sees). Writing
a slot twice overwrites, so rolling back is not an operation, and a slot >= S
writes nowhere. Negative slots wrap: never use one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class KVCache(NamedTuple):
  """Keys and values of one layer, or of all with a leading depth axis.

  Heads before slots: with slots first, XLA CPU transposes the whole cache in
  every layer of every step (2.0 ms a step instead of 0.6 for SmolLM2-135M).
  """

  k_BGSC: Array
  v_BGSC: Array


def zeros(*shape: int, dtype) -> KVCache:
  # Two arrays: a shared one could not be donated twice.
  return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KVCache, k_BTGC, v_BTGC, slots_BT, layer=None) -> KVCache:
  """Overwrites the given slots, of one layer if the cache is stacked.

  In a scan over layers the stacked cache must be in the carry; this then
  updates it in place.
  """
  B, G = k_BTGC.shape[0], k_BTGC.shape[2]
  row_B11 = jnp.arange(B)[:, None, None]
  head_1G1 = jnp.arange(G)[None, :, None]
  index = (row_B11, head_1G1, slots_BT[:, None])
  if layer is not None:
    index = (layer, *index)

  def put(old, new_BTGC):
    return old.at[index].set(jnp.swapaxes(new_BTGC, 1, 2), mode='drop')

  return KVCache(put(cache.k_BGSC, k_BTGC), put(cache.v_BGSC, v_BTGC))


def read_layer(cache: KVCache, layer) -> KVCache:
  """One layer of a stacked cache."""
  pick = lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
  return KVCache(pick(cache.k_BGSC), pick(cache.v_BGSC))
