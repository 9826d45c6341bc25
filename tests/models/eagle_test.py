"""The layer that reads features: its settings, its law, its reading."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from tests import fakes


def test_settings_follow_the_target(x64):
  target = fakes.tiny(windows=(3, 0), qk_norm=True).running(scan_layers=True)
  c = eagle.settings(target, (0, 1), mlp=8)
  assert (c.block.depth, c.block.windows, c.block.mlp) == (1, (0,), 8)
  assert c.block.run == model_config.Execution(scan_layers=True, fused=True)
  assert c.block.qk_norm
  names = set(eagle.shapes(c))
  assert {'fuse/kernel', 'join/kernel', 'block/attn/q_norm/scale'} <= names
  # One tap is as wide as the target: nothing to fuse.
  assert 'fuse/kernel' not in eagle.shapes(eagle.settings(target, (1,)))


@pytest.mark.parametrize('taps', [(), (0,), (0, 2), (1, 0), (1, 1), (-1, 1)])
def test_taps_that_are_not_the_targets_layers(taps):
  with pytest.raises(ValueError, match='needs layers of the target in incr'):
    eagle.settings(fakes.tiny(), taps)


def test_taps_are_heard_equally_loud(x64):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 2, 8))
  loud = np.array([1e3, 0.1])[:, None] * x
  found = eagle.normed(jnp.asarray(loud.reshape(2, 3, 16)), 2)
  want = x / np.sqrt((x * x).mean(-1, keepdims=True))
  np.testing.assert_allclose(found, want.reshape(2, 3, 16), rtol=1e-3)
  assert not eagle.normed(jnp.zeros((1, 1, 16)), 2).any()
  # Half precision has room for the features, not for their squares.
  half = eagle.normed(jnp.full((1, 1, 16), 6e4, jnp.float16), 2)
  np.testing.assert_allclose(half, 1, rtol=1e-6)


@pytest.mark.more
@pytest.mark.parametrize('tied, cap', [(True, None), (False, 5.0)])
def test_logits_are_those_of_the_targets_head(x64, tied, cap):
  """With the target's own norm, the target's logits of the chosen ids."""
  config = fakes.tiny(tied=tied, logit_softcap=cap)
  params, ids = fakes.wild(config, 0), jnp.array([7, 0, 12])
  c = eagle.settings(config, (1,))
  weights = eagle.weights({'norm': params['norm']}, ids, params)
  hidden = jax.random.normal(jax.random.key(0), (2, 3, config.width))
  logits = eagle.logits(c, lm.make(config), weights, hidden).whole()
  want = lm.make(config).head(params, hidden)
  np.testing.assert_allclose(logits[..., ids], want[..., ids], atol=1e-12)
  others = np.setdiff1d(np.arange(config.vocab), ids)
  assert np.isneginf(logits[..., others]).all()


@pytest.mark.more
@pytest.mark.parametrize('position', ['rope', 'learned'])
def test_one_at_a_time_is_all_at_once(x64, position):
  """Over slots that hold garbage, as after a refused draft."""
  config = fakes.tiny(position=position)
  target, params = lm.make(config), fakes.wild(config, 0)
  c, T, S = eagle.settings(config, (0, 1)), 5, 8
  layer = lm.nest(eagle.init(c, 1))
  weights = eagle.weights(layer, jnp.arange(5), params)
  tokens_BT = jnp.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
  features = jax.random.normal(jax.random.key(0), (2, T, 2 * config.width))
  features_BTD = eagle.features_of(layer, c, features)
  start_B = jnp.array([0, 2], jnp.int32)

  @jax.jit
  def read(features_BTD, tokens_BT, start_B, cache):
    reader = eagle.reader(c, target, features_BTD)
    return forward.read(reader, weights, tokens_BT, start_B, cache, slots=S)

  garbage = jax.tree.map(lambda x: x + 9, eagle.init_cache(c, 2, S))
  # What comes before is the same: row 1 has two tokens there.
  _, _, cache = read(
    features_BTD[:, :2], tokens_BT[:, :2], 0 * start_B, garbage
  )
  all_BTD, _, _ = read(features_BTD, tokens_BT, start_B, cache)
  for t in range(T):
    one_B1D, _, cache = read(
      features_BTD[:, t : t + 1], tokens_BT[:, t : t + 1], start_B + t, cache
    )
    np.testing.assert_allclose(one_B1D[:, 0], all_BTD[:, t], atol=1e-12)
