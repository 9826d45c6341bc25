"""A token alone, padded as on a GPU, is the token as it was."""

import jax
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
  text = np.array([[5, 9, 2, 7, 1, 3]], np.int32)
  lengths = []

  def apply(params, tokens_BT, *rest, **more):
    lengths.append(tokens_BT.shape[1])
    return model.apply(params, tokens_BT, *rest, **more)

  padded = model._replace(apply=alone.padded(apply))

  def read(model):
    cache, found = model.init_cache(1, 8), []
    for at in range(6):
      token_BT, start_B = text[:, at : at + 1], np.array([at])
      hidden, taps, cache = forward.read(
        model, params, token_BT, start_B, cache, slots=8, taps=(0,)
      )
      found += [model.head(params, hidden), *taps]
    return found, cache

  wanted = read(model)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  # The model's own apply pads too, where it is given one token.
  got = read(padded)
  assert set(lengths) == {alone.ROWS}
  equal = lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5)
  jax.tree.map(equal, got, wanted)


def test_a_part_of_the_model_is_padded_with_its_residual(monkeypatch):
  c = config.sized('tiny')
  model, params = lm.make(c), lm.init(c, 0)
  token_BT, start_B = np.array([[5]]), np.array([2])

  def read():
    part = lambda layers, **more: forward.read(
      model,
      params,
      token_BT,
      start_B,
      model.init_cache(1, 8),
      slots=8,
      layers=layers,
      **more,
    )[0]
    return part((1, None), residual_BTD=part((0, 1)))

  wanted = read()
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  np.testing.assert_allclose(read(), wanted, atol=2e-5)
