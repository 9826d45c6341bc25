"""Fused projections are the same model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward
from specdec_jax.models import config, lm

BIASES = dict(qkv_bias=True, mlp_bias=True)


@pytest.mark.parametrize(
  'settings',
  [{}, BIASES | dict(qk_norm=True), BIASES | dict(gated=False)],
  ids=['plain', 'biases', 'no gate'],
)
def test_fused_projections_change_no_result(x64, settings):
  c = config.sized('tiny', dtype='float64', **settings)
  params = jax.tree.map(
    # Biases start at 0, where a swapped pair would not show.
    lambda x: x + 0.1 * jnp.arange(x.size).reshape(x.shape) / x.size,
    lm.init(c, 0),
  )
  tokens_BT = jnp.array([[3, 1, 4, 1, 5]])

  def logits(c, params):
    model = lm.make(c)
    hidden_BTD, _, _ = forward.read(
      model,
      params,
      tokens_BT,
      jnp.array([0]),
      model.init_cache(1, 8),
      slots=8,
    )
    return model.head(params, hidden_BTD)

  apart = logits(c, params)
  fused_config, fused = lm.fuse(c, params)
  assert {k for k in lm.flatten(fused)} == set(lm.shapes(fused_config))
  np.testing.assert_allclose(logits(fused_config, fused), apart, rtol=1e-12)
