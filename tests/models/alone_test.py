"""A token alone, padded as on a GPU, is the token as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward
from specdec_jax.models import alone, config, lm


@pytest.mark.parametrize('scan_layers', [False, True])
def test_padding_changes_neither_the_token_nor_the_cache(
  monkeypatch, scan_layers
):
  c = config.sized('tiny').running(scan_layers=scan_layers)
  model, params = lm.make(c), lm.init(c, 0)
  text = jnp.array([[5, 9, 2, 7, 1, 3]])
  lengths = []

  def apply(params, tokens_BT, *rest, **more):
    lengths.append(tokens_BT.shape[1])
    return model.apply(params, tokens_BT, *rest, **more)

  padded = model._replace(apply=alone.padded(apply))

  def read(model):
    @jax.jit
    def step(at_1, cache):
      one = model, params, text[:, at_1], at_1
      hidden, taps, new = forward.read(*one, cache, slots=8, taps=(0,))
      # And in two parts, the second from what the first made.
      half = forward.read(*one, cache, slots=8, part=dict(layers=(0, 1)))[0]
      rest = dict(layers=(1, None), residual_BTD=half)
      again = forward.read(*one, cache, slots=8, part=rest)[0]
      return (model.head(params, hidden), taps, again), new

    cache, found = model.init_cache(1, 8), []
    for at in range(6):
      made, cache = step(jnp.array([at]), cache)
      found.append(made)
    return found, cache

  wanted = read(model)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  # The model's own apply pads too, where it is given one token.
  got = read(padded)
  assert set(lengths) == {alone.ROWS}
  equal = lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5)
  jax.tree.map(equal, got, wanted)
