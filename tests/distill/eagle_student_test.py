"""The loss of EAGLE drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, forward
from specdec_jax.distill import eagle_student, sections
from specdec_jax.models import eagle, lm

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')


@pytest.mark.more
@pytest.mark.parametrize(
  'temperature, eagle3', [(1.0, False), (0.5, False), (1.0, True)]
)
def test_the_loss_is_the_divergence_from_the_teacher(x64, temperature, eagle3):
  """Of the first step, in NumPy, from the features alone; an EAGLE-3 reads a
  layer below, and has a head of its own."""
  target = build.load('random:tiny', dtype='float64')
  model = target.model
  config = eagle.settings(target.config, (1,))
  if eagle3:
    config = eagle_student._eagle3((0,), target.config)
  ids = np.arange(3, 203, 2)
  draw = np.random.default_rng(0)
  tokens = jnp.asarray(draw.integers(0, 256, (2, 7)), jnp.int32)
  features = jnp.asarray(draw.normal(size=(2, 7, 64)))
  features = eagle.normed(features, 1)
  below = eagle.normed(jnp.asarray(draw.normal(size=(2, 7, 64))), 1)
  read = below if eagle3 else features
  full = np.asarray(model.head(target.params, features))
  mass = np.log(np.exp(full).sum(-1))
  counted = draw.random((2, 7)) < 0.7
  params = lm.nest(eagle.init(config, 0))
  weights = eagle.weights(params, ids, target.params)
  frozen = {n: weights[n] for n in ('target', 'head')}
  if eagle3:
    weights['head'] = jnp.asarray(draw.normal(size=(64, len(ids)))) / 8
  own = {'head': weights['head']} if eagle3 else {}
  settings = sections.Loss('forward_kl', temperature, 1, 0.8, 0.0)
  value, figures = eagle_student.unrolled(config, model, settings)(
    params | own,
    frozen,
    {
      'tokens': tokens,
      'features': jnp.concatenate([read, features], -1) if eagle3 else read,
      'mass': jnp.asarray(mass),
      'counted': jnp.asarray(counted),
    },
    jax.random.key(0),
  )
  # q by the drafter's own view of the same features, shifted by one.
  before = jnp.pad(read, ((0, 0), (1, 0), (0, 0)))[:, :7]
  reader = eagle.reader(
    config, model, eagle.features_of(params, config, before)
  )
  hidden, _, _ = forward.read(
    reader,
    weights,
    tokens,
    jnp.zeros(2, jnp.int32),
    eagle.init_cache(config, 2, 7),
    slots=7,
  )
  few = np.asarray(eagle.reduced(config, weights, hidden)) / temperature
  q = np.exp(few) / np.exp(few).sum(-1, keepdims=True)
  p = np.exp(full - mass[..., None])[..., ids]
  if temperature != 1:
    p = p ** (1 / temperature)
    p /= p.sum(-1, keepdims=True)
  # Index t predicts the token at t + 1.
  counted = np.pad(counted[:, 1:], ((0, 0), (0, 1)))
  want = (p * np.log(p / q)).sum(-1)[counted].mean()
  # The target's norm adds its epsilon once more to features of mean square 1.
  np.testing.assert_allclose(value, want, 1e-4)
  alpha = np.minimum(p, q).sum(-1)[counted].mean()
  np.testing.assert_allclose(figures['train_alpha'][0], alpha, 1e-4)
