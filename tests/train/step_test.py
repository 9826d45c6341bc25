"""One step: its schedule, what it clips and decays, a batch read in parts."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.train import step as step_lib
from tests.train import runs

STEPS = 10


def settings(**changes):
  plain = dict(warmup=0, final=1.0, weight_decay=0.0, clip=1e9)
  return dataclasses.replace(runs.OPTIMISER, **(plain | changes))


def advance(o, loss=runs.loss, params=None, batch=None, steps=1, noise=0.0):
  """(the state after some steps, figures of each)."""
  params = jax.tree.map(jnp.copy, runs.params() if params is None else params)
  batch = batch or {k: x[:8] for k, x in runs.rows().items()}
  state, said = step_lib.start(o, STEPS, params), []
  step = step_lib.make(o, STEPS, loss, 0, state)
  for _ in range(steps):
    state, figures = step(state, {'noise': jnp.float32(noise)}, batch)
    said.append(jax.device_get(figures))
  return state, said


@pytest.mark.more
@pytest.mark.parametrize('parts', [2, 4, 8])
def test_a_batch_in_parts_is_the_batch(parts):
  whole, said = advance(settings())
  state, in_parts = advance(settings(accumulate=parts))
  # Rows that do not count are not spread evenly over the parts.
  for name in ('loss', 'gradient_norm', 'train_alpha'):
    np.testing.assert_allclose(in_parts[0][name], said[0][name], rtol=1e-5)
  for name, x in whole.params.items():
    np.testing.assert_allclose(state.params[name], x, rtol=1e-4, atol=1e-6)


@pytest.mark.more
def test_the_parts_have_noise_of_their_own():
  # Of all rows alike: only their noise can differ.
  noisy = lambda params, frozen, batch, key: (jax.random.normal(key), {})
  row = {k: np.ones((8, *x.shape[1:]), x.dtype) for k, x in runs.rows().items()}
  two, four = (
    advance(settings(accumulate=parts), noisy, batch=row)[1][0]['loss']
    for parts in (2, 4)
  )
  assert abs(two - four) > 1e-3


@pytest.mark.more
def test_the_rate_rises_then_falls_along_a_cosine():
  o = settings(warmup=4, final=0.1)
  _, said = advance(o, steps=STEPS)
  peak = o.learning_rate
  want = [peak * k / 4 for k in range(4)]
  for k in range(STEPS - 4):
    share = 0.5 * (1 + math.cos(math.pi * k / (STEPS - 4)))
    want.append(peak * (0.1 + 0.9 * share))
  np.testing.assert_allclose(
    [x['learning_rate'] for x in said], want, rtol=1e-5
  )
  # The first step, at rate 0, moves nothing.
  state, _ = advance(o)
  for name, x in runs.params().items():
    np.testing.assert_array_equal(state.params[name], x)


def test_a_gradient_is_clipped_by_its_norm_and_reported_before():
  plain, said = advance(settings(b1=0.0))
  clipped, same = advance(settings(b1=0.0, clip=1e-12))
  assert said[0]['gradient_norm'] == same[0]['gradient_norm'] > 0.1
  moved = lambda state: np.abs(state.params['w'] - runs.params()['w']).max()
  # Adam undoes a scale, but for its epsilon, which is far above this one.
  assert moved(clipped) < 1e-3 * moved(plain)


def test_only_matrices_decay():
  still = lambda params, frozen, batch, key: (0.0 * params['w'].sum(), {})
  params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
  o = settings(weight_decay=0.5)
  state, _ = advance(o, still, params)
  want = 1 - o.learning_rate * 0.5
  np.testing.assert_allclose(state.params['w'], want, rtol=1e-6)
  np.testing.assert_array_equal(state.params['b'], 1)


@pytest.mark.more
def test_muon_is_for_matrices_of_layers():
  draw = np.random.default_rng(0)
  matrix = lambda: jnp.asarray(draw.normal(size=(4, 4)), jnp.float32)
  params = {
    'embed': matrix(),
    'head': matrix(),
    'layers': {'w': matrix(), 'scale': jnp.ones(4)},
  }

  def loss(params, frozen, batch, key):
    leaves = jax.tree.leaves(params)
    return sum(jnp.sum(jnp.sin(x) * (i + 1)) for i, x in enumerate(leaves)), {}

  adam, _ = advance(settings(), loss, params)
  muon, _ = advance(settings(muon=0.05), loss, params)
  for name in ('embed', 'head'):
    np.testing.assert_array_equal(muon.params[name], adam.params[name])
  scale = [x.params['layers']['scale'] for x in (adam, muon)]
  np.testing.assert_array_equal(*scale)
  change = np.asarray(muon.params['layers']['w'] - params['layers']['w'])
  # Newton and Schulz's steps leave every singular value near 1.
  values = np.linalg.svd(change / 0.05, compute_uv=False)
  assert values.max() < 1.5 and values.min() > 0.3, values


@jax.debug_nans(False)  # which keeps what it may have to run again
def test_the_state_is_donated():
  o = settings()
  state = step_lib.start(o, STEPS, jax.tree.map(jnp.copy, runs.params()))
  step = step_lib.make(o, STEPS, runs.loss, 0, state)
  batch = {k: x[:8] for k, x in runs.rows().items()}
  step(state, {'noise': jnp.float32(0)}, batch)
  assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
