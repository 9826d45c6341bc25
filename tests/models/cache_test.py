"""The cache gives back what was written, in both layouts."""

import jax.numpy as jnp
import numpy as np

from specdec_jax.models import cache as kv

B, T, G, C, S, DEPTH = 2, 3, 2, 4, 8, 2
SLOTS = np.array([[1, 2, 3], [5, 0, S]])  # the last one is nowhere


def test_keys_and_values_come_back():
  rng = np.random.default_rng(0)
  k, v = rng.normal(size=(2, B, T, G, C)).astype(np.float32)
  plain = kv.KVCache(*jnp.zeros((2, B, G, S, C)))
  stacked = kv.Stacked(*jnp.zeros((2, B, DEPTH, S, G * C)))
  for _ in range(2):  # the second time overwrites
    plain = kv.write(plain, k, v, SLOTS)
    stacked, last = kv.Writer(stacked, SLOTS, 1)(k, v)
  for layer in (plain, last):
    for got, wrote in ((layer.k_BGSC, k), (layer.v_BGSC, v)):
      wanted = np.zeros((B, G, S, C), np.float32)
      for b in range(B):
        for t, slot in enumerate(SLOTS[b]):
          if slot < S:
            wanted[b, :, slot] = wrote[b, t]
      np.testing.assert_array_equal(got, wanted)
  assert not any(x[:, 0].any() for x in stacked)
