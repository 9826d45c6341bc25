"""The loss of a text against NumPy, and of pairs against decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward, types
from specdec_jax.models import config as model_config
from specdec_jax.models import layers, lm
from specdec_jax.train import text_loss

pytestmark = pytest.mark.usefixtures('x64')

CONFIG = dataclasses.replace(model_config.sized('tiny'), dtype='float64')


@pytest.mark.more
def test_cross_entropy_is_that_of_the_next_token():
  params, draw = lm.init(CONFIG, 0), np.random.default_rng(0)
  tokens = draw.integers(0, 300, (3, 9)).astype(np.int32)
  counted = draw.random((3, 9)) < 0.6
  batch = jax.tree.map(jnp.asarray, {'tokens': tokens, 'counted': counted})
  loss = text_loss.cross_entropy(CONFIG, ids=300, remat=False)
  got, _ = loss(params, {}, batch, jax.random.key(0))
  model = lm.make(CONFIG, ids=300)
  hidden = forward.hidden(model, params, batch['tokens'])
  logits = np.asarray(model.head(params, hidden))
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  want = [
    -logp[b, t, tokens[b, t + 1]]
    for b, t in np.ndindex(3, 8)
    if counted[b, t + 1]
  ]
  np.testing.assert_allclose(got, np.mean(want), 1e-10)


# --- an encoder-decoder ------------------------------------------------------

PAIRS = model_config.sized('t5_tiny', vocab=40).running(dtype='float64')


def pairs():
  """(batch, params): targets of 4, 2 and 6 tokens, sources of 3, 5 and 1."""
  draw = np.random.default_rng(1)
  ends, lengths = np.array([5, 3, 7]), np.array([3, 5, 1], np.int32)
  at = np.arange(7)[None]
  batch = {
    'tokens': draw.integers(1, 40, (3, 7)).astype(np.int32),
    'counted': (at > 0) & (at < ends[:, None]),
    'source': draw.integers(1, 40, (3, 5)).astype(np.int32),
    'source_length': lengths,
  }
  batch['tokens'][:, 0] = 0
  return batch, lm.init(PAIRS, 0)


def value(params, batch, config=PAIRS, key=0, remat=False, **settings):
  loss = text_loss.cross_entropy(config, ids=40, remat=remat, **settings)
  batch = jax.tree.map(jnp.asarray, batch)
  return loss(params, {}, batch, jax.random.key(key))[0]


@pytest.mark.more
def test_the_loss_of_pairs_is_that_of_decoding_them_one_token_at_a_time():
  batch, params = pairs()
  model, costs = lm.make(PAIRS, ids=40), []
  read = jax.jit(
    lambda one, at, cache: forward.read(model, params, one, at, cache, slots=7)
  )
  for row in range(3):
    tokens, n = batch['tokens'][row], batch['source_length'][row]
    # Alone, and without what lies behind its source.
    source = types.Source(batch['source'][row, None, :n], np.array([n]))
    cache = forward.open_cache(model, params, 1, 7, source)
    for t in range(batch['counted'][row].sum()):
      one = jnp.asarray(tokens[None, t : t + 1])
      at = jnp.array([t])
      hidden, _, cache = read(one, at, cache)
      logits = np.asarray(model.head(params, hidden))[0, 0]
      costs.append(np.log(np.exp(logits).sum()) - logits[tokens[t + 1]])
  assert len(costs) == 12
  np.testing.assert_allclose(
    jax.jit(value)(params, batch), np.mean(costs), 1e-10
  )


@pytest.mark.more
def test_what_lies_behind_pairs_changes_nothing_and_all_parameters_learn():
  batch, params = pairs()
  learn = jax.jit(jax.value_and_grad(value))
  want = learn(params, batch)
  behind = np.arange(5)[None] >= batch['source_length'][:, None]
  other = batch | {'source': np.where(behind, 39, batch['source'])}
  unread = ~batch['counted'] & (np.arange(7)[None] > 0)
  other['tokens'] = np.where(unread, 38, batch['tokens'])
  got = learn(params, other)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), got, want
  )
  for name, x in lm.flatten(want[1]).items():
    assert np.abs(x).max() > 1e-7, name


@pytest.mark.slow
def test_dropout_is_off_at_0_and_has_draws_of_its_own_everywhere(monkeypatch):
  batch, params = pairs()
  dropped = lambda key, **more: float(
    value(params, batch, key=key, dropout=0.3, **more)
  )
  assert dropped(1) == dropped(1) != dropped(2) != float(value(params, batch))
  keys, drop = [], layers.drop

  def noted(dropout, part, x):
    key = None if dropout is None else dropout.at(part).key
    keys.append(key if key is None else jax.random.key_data(key).tobytes())
    return drop(dropout, part, x)

  monkeypatch.setattr(layers, 'drop', noted)
  # Both embeddings; two parts of two layers, and three of two.
  dropped(1)
  assert len(set(keys)) == len(keys) == 12 and None not in keys


@pytest.mark.more
def test_layers_that_are_scanned_have_the_same_dropout():
  batch, params = pairs()
  stack = lambda tree: jax.tree.map(lambda *x: jnp.stack(x), *tree.values())
  scanned = params | {'layers': stack(params['layers'])}
  own = params['encoder']
  scanned['encoder'] = own | {'layers': stack(own['layers'])}
  config = PAIRS.running(scan_layers=True)
  np.testing.assert_allclose(
    value(scanned, batch, config, dropout=0.3),
    value(params, batch, dropout=0.3),
    1e-10,
  )


@pytest.mark.slow
def test_layers_that_are_computed_again_drop_the_same_in_bfloat16():
  batch, params = pairs()

  @functools.partial(jax.jit, static_argnames='remat')
  def gradient(key, remat):
    low = dict(config=PAIRS.running(dtype='bfloat16'), dropout=0.3)
    make = functools.partial(value, key=key, remat=remat, **low)
    found = jax.tree.leaves(jax.grad(make)(params, batch))
    return jnp.concatenate([x.ravel() for x in found])

  want, again, other = gradient(1, False), gradient(1, True), gradient(2, False)
  off = lambda x: jnp.linalg.norm(x - want) / jnp.linalg.norm(want)
  assert off(again) < 0.02 < 0.2 < off(other)


def test_what_is_kept_of_a_layer_keeps_its_mean():
  x = jnp.ones((100, 100))
  dropout = layers.Dropout(jax.random.key(0), 0.2)
  y = np.asarray(layers.drop(dropout, 0, x))
  assert set(np.unique(y)) == {0.0, 1 / (1 - 0.2)}
  assert abs(y.mean() - 1) < 0.02  # 4 standard deviations
  np.testing.assert_array_equal(layers.drop(None, 0, x), x)
