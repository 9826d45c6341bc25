"""Matrices of integers: their values, products, and where a mesh has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import sharding
from specdec_jax.io import load
from specdec_jax.io.quantised import rounded
from specdec_jax.models import convert, lm, weights, work
from tests import fakes
from tests.io import tiny

N = 24


def numbers(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on_devices(matrix):
  return jax.tree.map(jnp.asarray, matrix)


def test_the_ends_of_a_group_are_the_ends_of_its_codes():
  """Two groups and two columns by hand."""
  x = np.zeros((256, 2), np.float32)
  x[0], x[1], x[2] = [-16, -5], [14, 10], [5, 0]
  x[128], x[129], x[130] = [30, 0], [0, -45], [8, -3]
  found = rounded.quantise(x, 'int4')
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
  close(found.scale, [[2, 1], [2, 3]])
  close(found.offset, [[0, 3], [16, -21]])
  codes = found.codes.reshape(256, 2)
  np.testing.assert_array_equal(codes[:3], [[-8, -8], [7, 7], [2, -3]])
  np.testing.assert_array_equal(codes[128:131], [[7, 7], [-8, -8], [-4, 6]])
  close(found.dense()[:2], x[:2])
  found = rounded.quantise(x, 'int8')
  np.testing.assert_allclose(found.scale, [[46 / 255, 55 / 255]])
  ends = [found.codes[0, row, 0] for row in (0, 128)]
  assert ends == [-128, 127]


@pytest.mark.parametrize(
  'kind, rows, groups',
  [
    ('int8', 256, 1),
    ('int4', 256, 2),
    # 64 of each
    pytest.param('int4', 576, 9, marks=pytest.mark.more),
    pytest.param('int4', 96, 3, marks=pytest.mark.more),
    ('int4', 80, 1),
  ],
)
def test_has_nearly_the_matrix_and_exactly_its_products(kind, rows, groups):
  x_KN = numbers(rows, N)
  found = on_devices(rounded.quantise(x_KN, kind))
  assert found.codes.shape == (groups, rows // groups, N)
  assert found.shape == (rows, N) and weights.of(found) is found
  dense = np.asarray(found.dense())
  step_GN = np.asarray(found.scale)
  error_GCN = np.abs(dense - x_KN).reshape(found.codes.shape)
  assert (error_GCN <= 0.501 * step_GN[:, None]).all()
  bias, wide = jnp.arange(N, dtype=jnp.float32), dense.astype(float)
  for shape in (1,), (2, 3):
    y = numbers(*shape, rows, seed=1)
    exact = y.astype(float) @ wide
    np.testing.assert_allclose(found.linear(y), exact, rtol=1e-5, atol=1e-4)
    added = exact + np.arange(N)
    np.testing.assert_allclose(
      found.linear(jnp.asarray(y), bias), added, rtol=1e-5, atol=1e-4
    )
    narrow = jnp.asarray(y, jnp.bfloat16)
    exact = np.asarray(narrow, float) @ wide
    logits = found.linear(narrow, dtype=jnp.float32)
    np.testing.assert_allclose(logits, exact, rtol=1e-5, atol=1e-4)
    assert found.linear(narrow).dtype == jnp.bfloat16
  ids = jnp.array([[23, 0], [5, 99]])
  at = np.minimum(ids, N - 1)
  np.testing.assert_array_equal(found.columns(ids), dense[:, at])
  np.testing.assert_array_equal(found.take(ids[0]).dense(), dense[:, at[0]])


def test_layers_are_stacked_and_matrices_joined():
  x = numbers(3, 128, N)
  whole = rounded.quantise(x, 'int4')
  assert whole.shape == x.shape
  each = [on_devices(rounded.quantise(layer, 'int4')) for layer in x]
  dense = np.stack([layer.dense() for layer in each])
  np.testing.assert_array_equal(whole.dense(), dense)
  joined = weights.join(each)
  np.testing.assert_array_equal(joined.dense(), np.concatenate(dense, -1))
  # Half a byte each, and 8 for a scale and an offset.
  assert work.tree_bytes(whole) == x.size / 2 + 3 * N * 8


WIDE = dict(
  width=128,
  heads=4,
  kv_heads=4,
  head_dim=32,
  mlp=384,
  vocab=64,
  dtype='float32',
)


def put(kind, layout, name, x):
  where = layout and layout.parameter(name, x.ndim)
  return rounded.put(x, rounded.kind_of(kind, name, x.shape), where)


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('kind', weights.INTEGERS)
def test_a_mesh_splits_codes_and_scales_alike(kind, scan):
  """Products of a row and of more are those of one device."""
  config = fakes.tiny(**WIDE).running(scan_layers=scan)
  layout = sharding.lay_out(sharding.make_mesh(2, 2), config)
  place = lambda layout: lm.flatten(
    lm.init(config, 0, functools.partial(put, kind, layout))
  )
  split, whole = place(layout), place(None)
  shapes = rounded.shapes(lm.shapes(config), kind)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), split) == (
    jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
  )
  jax.tree.map(np.testing.assert_array_equal, split, whole)
  of = 'layers/' if scan else 'layers/0/'
  held = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), split)
  last = lambda name: (held[name].codes[-3:], held[name].scale[-2:])
  # Three groups of 128 rows are cut in two, each; one is cut as int8's is.
  down = {'int8': ((1, 192, 128), (1, 128)), 'int4': ((3, 64, 128), (3, 128))}
  assert last(f'{of}mlp/down/kernel') == down[kind]
  assert last(f'{of}mlp/up/kernel') == ((1, 128, 192), (1, 192))
  assert split['head'].codes.dtype == jnp.int8
  assert last('head') == ((1, 128, 32), (1, 32))
  assert not isinstance(split[f'{of}attn_norm/scale'], weights.Grouped)


def test_groups_that_devices_divide_are_not_cut():
  config = fakes.tiny(**WIDE | dict(mlp=512))
  layout = sharding.lay_out(sharding.make_mesh(2, 2), config)
  x, name = numbers(512, 128), 'layers/0/mlp/down/kernel'
  matrix = put('int4', layout, name, x)
  held = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), matrix)
  assert held == weights.Grouped((2, 128, 128), (2, 128), (2, 128))
  # Each device has the scales of its own groups.
  rows = [
    part.addressable_shards[-1].index[0] for part in jax.tree.leaves(matrix)
  ]
  assert rows == [slice(2, 4)] * 3
  for rows in 1, 5:
    y = numbers(rows, 512, seed=1)
    product = jax.jit(lambda m, y: m.linear(y))(matrix, y)
    wanted = y @ np.asarray(matrix.dense())
    np.testing.assert_allclose(product, wanted, rtol=1e-5, atol=1e-4)
  # Three devices divide neither four groups nor their 128 rows.
  layout = sharding.lay_out(
    sharding.make_mesh(1, 3), fakes.tiny(**WIDE | dict(heads=6, kv_heads=6))
  )
  held = rounded.shardings(layout.parameter(name, 2), matrix)
  assert held.codes.shard_shape(matrix.codes.shape) == matrix.codes.shape


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['int4', 'int8'])
def test_speculates_under_a_mesh_as_on_one_device(tmp_path, kind):
  """Text of a folder's model: scanned or not, split or not, drafted or not."""
  sizes = dict(width=128, heads=4, kv_heads=4, head_dim=32, mlp=256)
  c = tiny.config('qwen2', depth=2, **sizes)
  folder = tiny.write_folder(tmp_path / 'hf', c, 'qwen2')
  prompts = ['hello hello hello', 'abc']
  texts, plain = [], load.load(folder)
  for mesh, scan in (
    (None, False),
    (sharding.make_mesh(1, 2), False),
    (sharding.make_mesh(2, 4), True),
  ):
    m = load.load(
      folder, dtype=kind, mesh=mesh, scan_layers=scan, kernels='xla'
    )
    assert m.label == f'{plain.label} ({kind})' and m.digest == plain.digest
    assert m.config.run.fused == (mesh is None)
    assert m.dtype == 'float32'
    less = work.step_bytes(m.params) / work.step_bytes(plain.params)
    assert less < {'int8': 0.3, 'int4': 0.2}[kind]
    draft = 'lookup' if mesh else None
    done = specdec_jax.generate(
      m, prompts, draft=draft, max_new_tokens=20, temperature=0.0
    )
    texts.append([x.tokens for x in done])
    values = convert.plain(m.config, m.params)[1]
    wanted = convert.plain(plain.config, plain.params)[1]
    for name, x in values.items():
      assert x.shape == wanted[name].shape
      same = not rounded.kind_of(kind, name, x.shape)
      np.testing.assert_allclose(x, wanted[name], atol=0 if same else 0.05)
  assert all(x == texts[0] for x in texts)
