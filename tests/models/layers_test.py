"""Norms, activations and tables against formulas written out in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.models import layers, lm
from tests import fakes


@pytest.mark.parametrize('wide', [False, True])
def test_a_wide_scale_is_applied_before_rounding(wide):
  config = fakes.tiny(dtype='bfloat16', wide_norm=wide)
  norm = layers.Norm(config, 64)
  assert norm.scale.dtype == (jnp.float32 if wide else jnp.bfloat16)
  rng = np.random.default_rng(0)
  # Differences from 1 that bfloat16 does not have.
  scale = (1 + rng.normal(size=64) / 300).astype(np.float32)
  norm.scale[...] = jnp.asarray(scale, norm.scale.dtype)
  x = jnp.asarray(rng.normal(size=(32, 64)), jnp.bfloat16)
  exact = np.asarray(x, np.float64)
  exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + config.norm_eps)
  wanted = np.asarray(exact * scale, jnp.bfloat16)
  got = norm(x)
  assert got.dtype == jnp.bfloat16
  same = (np.asarray(got) == wanted).mean()
  assert (same > 0.99) == wide  # float32 may round to the other neighbour


@pytest.mark.more
def test_tables_are_scaled_added_and_never_read_past_their_end():
  """Positions past the context are those of draft tokens that are cut."""
  config = fakes.tiny(
    dtype='bfloat16', position='learned', context=4, embed_scale=48.03
  )
  params = lm.init(config, 0)
  ends = lm.Ends(config)
  for name in ('head', 'positions'):
    getattr(ends, name)[...] = params[name]
  tokens, positions = np.array([[5, 6, 7]]), np.array([[1, 3, 9]])
  got = ends.lookup(jnp.asarray(tokens), jnp.asarray(positions))
  head, table = (
    np.asarray(params[k], np.float32) for k in ('head', 'positions')
  )
  assert table.shape == (4, config.width)
  scale = float(jnp.bfloat16(48.03))
  assert scale == 48.0
  scaled = np.asarray(head.T[tokens] * scale, jnp.bfloat16).astype(np.float32)
  wanted = np.asarray(scaled + table[[[1, 3, 3]]], jnp.bfloat16)
  np.testing.assert_array_equal(got, wanted)
