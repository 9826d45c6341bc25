"""Pads a GPU pass over a single token."""

import jax
import jax.numpy as jnp

# A GPU's pass has at least as many rows.
ROWS = 2


def padded(apply):
  """Makes types.Model.apply pad a pass over a single token, on a GPU.

  For one row XLA makes matrix-vector products and splits norms into several
  kernels: llama3_1b takes 1.4 times as long for one token as for two
  (experiments/gpu). The padding writes nothing; nothing attends to it.
  """

  def call(params, tokens_BT, *at, **more):
    if tokens_BT.size >= ROWS or jax.default_backend() != 'gpu':
      return apply(params, tokens_BT, *at, **more)

    def pad(x, value=0):
      widths = ((0, 0), (0, ROWS - 1), *[(0, 0)] * (x.ndim - 2))
      return jnp.pad(x, widths, constant_values=value)

    slots_BT, positions_BT, mask_BTS, cache = at
    if (residual_BTD := more.get('residual_BTD')) is not None:
      more['residual_BTD'] = pad(residual_BTD)
    wide = pad(slots_BT, mask_BTS.shape[-1]), pad(positions_BT), pad(mask_BTS)
    hidden_BTD, taps, cache = apply(
      params, pad(tokens_BT), *wide, cache, **more
    )
    return hidden_BTD[:, :1], tuple(x[:, :1] for x in taps), cache

  return call
