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
  """Keys and values of one layer, or of all with a leading depth axis."""

  k_BSGC: Array
  v_BSGC: Array


def zeros(rows: int, slots: int, kv_heads: int, head_dim: int, dtype):
  # Two arrays: a shared one could not be donated twice.
  shape = (rows, slots, kv_heads, head_dim)
  return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KVCache, k_BTGC, v_BTGC, slots_BT) -> KVCache:
  """Overwrites the given slots of one layer's cache."""
  row_B1 = jnp.arange(slots_BT.shape[0])[:, None]
  put = lambda old, new: old.at[row_B1, slots_BT].set(new, mode='drop')
  return KVCache(put(cache.k_BSGC, k_BTGC), put(cache.v_BSGC, v_BTGC))


def write_layer(cache: KVCache, layer, k_BTGC, v_BTGC, slots_BT) -> KVCache:
  """The same for one layer of a stacked cache, in place in a scan's carry."""
  row_B1 = jnp.arange(slots_BT.shape[0])[:, None]
  put = lambda old, new: old.at[layer, row_B1, slots_BT].set(new, mode='drop')
  return KVCache(put(cache.k_BSGC, k_BTGC), put(cache.v_BSGC, v_BTGC))


def read_layer(cache: KVCache, layer) -> KVCache:
  pick = lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, keepdims=False)
  return KVCache(pick(cache.k_BSGC), pick(cache.v_BSGC))
