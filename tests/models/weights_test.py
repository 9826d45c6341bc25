"""A matrix is the same matrix however it is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specdec_jax.io import files
from specdec_jax.kernels import calls, library
from specdec_jax.models import convert, layers, lm, weights, work
from tests import fakes

K, N = 5, 90


def matrix(dtype='float32'):
  x = np.random.default_rng(0).normal(size=(K, N))
  return jnp.asarray(x, dtype)


STORED = {
  'dense': lambda x: x,
  'panels': weights.pack,
  'panels side by side': lambda x: weights.pack(x, 2),
}


@pytest.fixture(params=STORED)
def stored(request):
  return STORED[request.param]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_holds_the_same_numbers(stored, dtype):
  x_KN = matrix(dtype)
  found = weights.of(stored(x_KN))
  assert found.shape == (K, N)
  np.testing.assert_array_equal(found.dense(), x_KN)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', ['dense', 'panels'])
def test_columns_that_are_taken_are_stored_as_all_were(name, dtype):
  x_KN, ids = matrix(dtype), jnp.array([89, 3, 17, 16, 3])
  whole = STORED[name](x_KN)
  found = weights.of(whole).columns(ids[None])
  np.testing.assert_array_equal(found, x_KN[:, ids[None]])
  some = weights.of(whole).take(ids)
  assert type(some) is type(whole)
  assert weights.of(some).shape == (K, 5)
  np.testing.assert_array_equal(weights.of(some).dense(), x_KN[:, ids])


@pytest.mark.more
@pytest.mark.parametrize('name', ['dense', 'panels'])
def test_gives_the_same_product(name):
  if why := library.load(files.cache_folder()):
    pytest.skip(why)
  x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, K)), jnp.float32)
  bias, kernel = jnp.arange(N, dtype=jnp.float32), STORED[name](matrix())
  exact = np.asarray(x, float) @ np.asarray(matrix(), float)
  np.testing.assert_allclose(weights.of(kernel).linear(x), exact, atol=1e-5)
  if weights.is_stored(kernel):
    bias = calls.pad(bias, kernel.parts)
  found = weights.of(kernel).linear(x, bias)
  np.testing.assert_allclose(found, exact + np.arange(N), atol=1e-5)


def test_passes_through_transformations_and_modules(stored):
  kernel = stored(matrix())
  same = jax.jit(lambda x: jax.tree.map(lambda a: 2 * a, x))(kernel)
  found = weights.of(same)
  assert found.shape == (K, N)
  np.testing.assert_array_equal(found.dense(), 2 * matrix())
  linear = lambda: layers.Linear(fakes.tiny(dtype='float32'), K, N)
  graphdef, _ = nnx.split(nnx.eval_shape(linear), nnx.Param)
  merged = nnx.merge(graphdef, nnx.State({'kernel': kernel}))
  found = weights.of(merged.kernel.get_value())
  np.testing.assert_array_equal(found.dense(), matrix())


def test_matrices_are_joined_before_they_are_packed():
  parts = jnp.split(matrix(), 2, -1)
  np.testing.assert_array_equal(weights.join(parts), matrix())
  with pytest.raises(AssertionError):
    weights.join([weights.pack(x) for x in parts])


def test_is_one_parameter_of_a_model():
  """Of one name; its bytes are counted, its values are in the digest."""
  config = fakes.tiny(dtype='float32')
  config, params = convert.fuse(config, lm.init(config, 0))
  fused = lm.flatten(params)
  step = work.step_bytes(params)
  config, params = convert.pack(config, params)
  flat = lm.flatten(params)
  assert list(flat) == list(fused)
  again = lm.nest(flat)
  assert jax.tree.structure(again) == jax.tree.structure(params)
  head = flat['head']
  assert weights.is_stored(head) and head.shape == fused['head'].shape
  arrays = {n: jax.tree.leaves(x) for n, x in flat.items()}
  read = [x.nbytes for n, each in arrays.items() for x in each if n != 'embed']
  assert work.step_bytes(params) == sum(read) >= step
  assert convert.digest(again) == convert.digest(params)
  more = jax.tree.map(lambda x: x + 1, head)
  assert convert.digest(params | {'head': more}) != convert.digest(params)
