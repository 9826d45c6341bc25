"""The loss of a text against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import lm_loss

pytestmark = pytest.mark.usefixtures('x64', 'compile_in_less_time')

CONFIG = dataclasses.replace(model_config.sized('tiny'), dtype='float64')


def a_batch(seed: int = 0, rows: int = 3, length: int = 9):
  draw = np.random.default_rng(seed)
  tokens = draw.integers(0, 300, (rows, length)).astype(np.int32)
  counted = draw.random((rows, length)) < 0.6
  return {'tokens': jnp.asarray(tokens), 'counted': jnp.asarray(counted)}


def logits_of(model, params, tokens):
  x = model.head(params, lm_loss.hidden(model, params, tokens))
  return np.asarray(x)


@pytest.mark.more
def test_cross_entropy_is_that_of_the_next_token():
  params, batch = lm.init(CONFIG, 0), a_batch()
  loss = lm_loss.cross_entropy(CONFIG, ids=300, remat=False)
  got, _ = loss(params, {}, batch, jax.random.key(0))
  logits = logits_of(lm.make(CONFIG, ids=300), params, batch['tokens'])
  tokens, counted = map(np.asarray, (batch['tokens'], batch['counted']))
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  want = [
    -logp[b, t, tokens[b, t + 1]]
    for b, t in np.ndindex(3, 8)
    if counted[b, t + 1]
  ]
  np.testing.assert_allclose(got, np.mean(want), 1e-10)


def test_rematerialised_slopes_are_the_same():
  batch, params = a_batch(), lm.init(CONFIG, 0)

  def slopes(remat):
    loss = lm_loss.cross_entropy(CONFIG, ids=300, remat=remat)
    grad = jax.grad(lambda p: loss(p, {}, batch, jax.random.key(0))[0])
    return jax.jit(grad)(params)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12),
    slopes(True),
    slopes(False),
  )
