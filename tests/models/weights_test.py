"""A matrix is the same matrix however it is stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specdec_jax.kernels import blocks, calls
from specdec_jax.models import convert, layers, lm, weights, work
from tests import fakes
from tests.io import tiny
from tests.kernels import quantised_test

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


@pytest.mark.parametrize('mlp', [41, 64])
def test_what_is_packed_is_taken_apart_as_it_was(mlp):
  """Biases too, which are padded where panels are not full."""
  config = tiny.config(mlp=mlp, mlp_bias=True, qkv_bias=True, o_bias=True)
  rng = np.random.default_rng(0)
  was = {
    name: jnp.asarray(rng.normal(size=x.shape), x.dtype)
    for name, x in lm.shapes(config).items()
  }
  assert {'layers/1/mlp/up/bias', 'layers/1/mlp/gate/bias'} <= was.keys()
  packed = convert.pack(*convert.fuse(config, lm.nest(dict(was))))
  same, found = convert.plain(*packed)
  assert same == config and found.keys() == was.keys()
  for name, x in was.items():
    np.testing.assert_array_equal(found[name], x, name)


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
  tiny.needs_kernels()
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


def of_a_file(kind: str, columns: int, seed: int = 0):
  """(matrix, its values [64, columns]) of random blocks."""
  raw = quantised_test.blocks(kind, 64, columns, seed)
  panels = jnp.asarray(blocks.pack(raw, kind))
  matrix = weights.Quantised(panels, kind, columns)
  return matrix, quantised_test.values(raw, kind)


# Kinds and widths of matrices that are joined, in how many parts; what of.
JOINED = [
  ([('Q4_1', 64), ('Q4_1', 32), ('Q4_1', 20)], 1, weights.Quantised),
  ([('Q4_1', 40), ('Q4_1', 32)], 1, weights.Beside),
  ([('Q4_0', 32), ('Q8_0', 40)], 1, weights.Beside),
  ([('Q4_0', 32), ('numbers', 40)], 1, weights.Beside),
  ([('Q8_0', 40), ('Q8_0', 40)], 2, weights.Quantised),
  ([('Q4_0', 40), ('Q8_0', 40)], 2, weights.Beside),
  ([('numbers', 40), ('Q4_0', 40)], 2, weights.Beside),
]


@pytest.mark.more
@pytest.mark.parametrize('stored, parts, kind', JOINED)
def test_stored_matrices_are_joined_as_their_kinds_allow(stored, parts, kind):
  """Values, columns, what is taken of them, and products with a bias."""
  tiny.needs_kernels(*{name for name, _ in stored} - {'numbers'})
  each = [
    of_a_file(name, n, n + i)
    if name != 'numbers'
    else 2 * [jnp.asarray(np.random.default_rng(n).normal(size=(64, n)))]
    for i, (name, n) in enumerate(stored)
  ]
  found = weights.join([x for x, _ in each], parts)
  wanted = np.concatenate([x for _, x in each], -1)
  assert type(found) is kind and found.shape == wanted.shape
  np.testing.assert_array_equal(found.dense(), wanted)
  rng = np.random.default_rng(0)
  x, bias = (
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in ((3, 64), wanted.shape[1])
  )
  more = dict(gated=True, act='relu') if parts > 1 else {}
  y = found.linear(x, weights.pad(bias, found, parts), **more)
  exact = jnp.split(x @ wanted + bias[None], parts, -1)
  exact[0] = jax.nn.relu(exact[0]) if parts > 1 else exact[0]
  np.testing.assert_allclose(y, np.prod(exact, 0), rtol=1e-3, atol=2e-3)
  if parts > 1:
    return
  ids = jnp.asarray([3, len(bias) - 1, 33])
  np.testing.assert_array_equal(found.columns(ids), wanted[:, ids])
  some = found.take(ids)
  np.testing.assert_array_equal(some.dense(), wanted[:, ids])
  assert (type(some) is weights.Quantised) == (kind is weights.Quantised)


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
