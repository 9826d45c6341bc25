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


@pytest.mark.more
def test_cross_entropy_is_that_of_the_next_token():
  params, draw = lm.init(CONFIG, 0), np.random.default_rng(0)
  tokens = draw.integers(0, 300, (3, 9)).astype(np.int32)
  counted = draw.random((3, 9)) < 0.6
  batch = jax.tree.map(jnp.asarray, {'tokens': tokens, 'counted': counted})
  loss = lm_loss.cross_entropy(CONFIG, ids=300, remat=False)
  got, _ = loss(params, {}, batch, jax.random.key(0))
  model = lm.make(CONFIG, ids=300)
  hidden = lm_loss.hidden(model, params, batch['tokens'])
  logits = np.asarray(model.head(params, hidden))
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  want = [
    -logp[b, t, tokens[b, t + 1]]
    for b, t in np.ndindex(3, 8)
    if counted[b, t + 1]
  ]
  np.testing.assert_allclose(got, np.mean(want), 1e-10)
