"""The CPU kernels against float64 and against models.attention, bit by bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.kernels import calls
from specdec_jax.models import attention, layers, weights
from specdec_jax.models import cache as kv
from tests import fakes
from tests.io import tiny
from tests.models import weights_test

# The last has more panels than there are threads.
SHAPES = [(64, 96), (37, 50), (300, 33), (1, 1), (20, 5000)]
FLOATS = dict(dtype='float32')
ROWS = (1, 2, 3, 5, 8, 12, 13, 16, 40, 130)


@pytest.fixture(autouse=True, scope='module')
def compiled():
  tiny.needs_kernels()


def normal(seed, *shape):
  x = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(x, jnp.float32)


@pytest.mark.more
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shape', SHAPES)
def test_a_products_rows_do_not_depend_on_each_other(shape, dtype):
  K, N = shape
  kernel = (normal(0, K, N) * K**-0.5).astype(dtype)
  packed = calls.pack(kernel)
  np.testing.assert_array_equal(calls.columns_of(packed, jnp.arange(N)), kernel)
  product = jax.jit(lambda x: calls.linear(x, packed, N))
  x_MK = normal(1, max(ROWS), K)
  exact = np.asarray(x_MK, np.float64) @ np.asarray(kernel, np.float64)
  alone = np.concatenate([product(x_MK[i : i + 1]) for i in range(len(x_MK))])
  np.testing.assert_allclose(alone, exact, atol=1e-5)
  for rows in ROWS:
    np.testing.assert_array_equal(product(x_MK[:rows]), alone[:rows])


@pytest.mark.parametrize(
  'act, kept', [*((act, '') for act in layers.ACTS), ('silu', 'Q4_1')]
)
@pytest.mark.parametrize('kind', ['rms', 'layer'])
@pytest.mark.parametrize('gated', [False, True])
def test_what_surrounds_a_product(kind, act, kept, gated):
  """Of blocks with mixed inputs too, with a row's error of 16 bits."""
  parts, atol = 2 if gated else 1, 5e-4 if kept else 2e-5
  K, N = (64, 40) if kept else (70, 1009)
  x, add = 3 * normal(0, 2, 3, K), normal(1, 2, 3, N)
  kernel, bias = normal(2, K, parts * N) / 8, normal(3, parts * N)
  matrix = weights.pack(kernel, parts)
  if kept:
    tiny.needs_kernels(kept)
    each = [weights_test.of_a_file(kept, N, seed) for seed in range(parts)]
    order = jnp.asarray(np.random.default_rng(6).permutation(K), jnp.int32)
    joined = weights.join([x for x, _ in each], parts)
    matrix = dataclasses.replace(joined, order=order)
    kernel = jnp.concatenate([x for _, x in each], -1)[jnp.argsort(order)]
  # An eps that matters.
  norm = layers.Norm(fakes.tiny(**FLOATS, norm=kind, norm_eps=3.0), K)
  norm.scale[...] = normal(4, K)
  if kind == 'layer':
    norm.bias[...] = normal(5, K)
  around = dict(norm=norm.packed(), act=act, gated=gated)
  padded = weights.pad(bias, matrix, parts)
  linear = lambda x, add: matrix.linear(x, padded, add=add, **around)
  y = linear(x, add)
  np.testing.assert_array_equal(linear(x[0, :1], add[0, :1]), y[0, :1])
  wide = norm(x) @ kernel + bias[None, None]
  gate, *up = jnp.split(wide, parts, -1)
  wanted = add + layers.ACTS[act](gate) * (up[0] if up else 1)
  np.testing.assert_allclose(y, wanted, atol=atol)
  normed = calls.add_norm(x, norm.packed(), 2 * x)
  np.testing.assert_allclose(normed, 2 * x + norm(x), atol=1e-5)


# B, T, H, G, C, S, soft cap; whether rotated, with query and key norms.
ATTENTION = [
  (1, 1, 9, 3, 64, 384, None, True, False),
  (2, 5, 4, 2, 16, 50, None, True, True),
  (2, 20, 4, 1, 48, 70, 3.0, False, False),
  (1, 40, 2, 2, 6, 96, None, True, True),
]


@pytest.mark.more
@pytest.mark.parametrize('case', ATTENTION)
def test_attention_and_the_cache_that_it_writes(case):
  """Every second case has a bias, of its own in each row and head."""
  B, T, H, G, C, S, cap, rotated, normed = case
  bias = normal(7, B, H, T, S) if B > 1 else None
  qkv = normal(0, B, T, (H + 2 * G) * C)
  angle = normal(1, B, T, 1, C // 2)
  cos, sin = (jnp.cos(angle), jnp.sin(angle)) if rotated else (None, None)
  # The first row ends behind the cache, where nothing is written.
  at_BT = jnp.asarray([S - T + 1, 3][:B])[:, None] + jnp.arange(T)[None]
  mask = jnp.arange(S)[None, None] <= at_BT[..., None]
  old = kv.KVCache(normal(2, B, G, S, C), normal(3, B, G, S, C))
  q, k, v = jnp.split(qkv, (H * C, (H + G) * C), -1)
  q, k, v = (x.reshape(B, T, -1, C) for x in (q, k, v))
  norms = None
  if normed:
    modules = [layers.Norm(fakes.tiny(**FLOATS, norm_eps=0.5), C) for _ in 'qk']
    for i, module in enumerate(modules):
      module.scale[...] = normal(4 + i, C)
    norms = tuple(x.packed() for x in modules)
    q, k = modules[0](q), modules[1](k)
  if rotated:
    q, k = (attention.rotate(x, cos, sin) for x in (q, k))
  written = kv.write(old, k, v, at_BT)
  ways = dict(scale=0.3, cap=cap)
  wanted = attention.attend(q, written, mask, bias_BHTS=bias, **ways)
  call = jax.jit(
    lambda part, cache, bias: calls.attend(
      *part, *cache, heads=H, norms=norms, bias_BHTS=bias, **ways
    )
  )
  parts = qkv, cos, sin, at_BT, mask
  y, *new = call(parts, kv.panels(old), bias)
  np.testing.assert_allclose(y, wanted, atol=5e-6)
  for got, want in zip(new, kv.panels(written), strict=True):
    np.testing.assert_allclose(got, want, atol=1e-5)
  for t in range(T):
    one = jax.tree.map(lambda x, t=t: x[:, t : t + 1], parts)
    part = None if bias is None else bias[:, :, t : t + 1]
    np.testing.assert_array_equal(call(one, new, part)[0], y[:, t : t + 1])


@pytest.mark.more
def test_queries_alone_and_a_row_that_sees_nothing():
  """As of an encoder's states, which nothing writes; a source may be empty."""
  B, T, H, C, S = 2, 3, 2, 8, 20
  q, old = normal(0, B, T, H * C), normal(1, 2, B, H, S, C)
  mask_BTS = jnp.arange(S)[None, None] < jnp.array([7, 0])[:, None, None]
  store, blank = kv.KVCache(*old), (None, None, None)
  y, *cache = calls.attend(
    q, *blank, mask_BTS, *kv.panels(store), heads=H, scale=0.3
  )
  q_BTHC = q.reshape(B, T, H, C)
  wanted = attention.attend(q_BTHC, store, mask_BTS, scale=0.3)
  np.testing.assert_allclose(y[:1], wanted[:1], atol=5e-6)
  assert not cache and not np.any(y[1])
  # One bias for all rows and tokens, as of sources of one length.
  bias = normal(2, 1, H, 1, S)
  call = lambda bias: calls.attend(
    *(q, *blank, mask_BTS, *kv.panels(store)),
    heads=H,
    scale=0.3,
    bias_BHTS=bias,
  )
  spread = jnp.broadcast_to(bias, (B, H, T, S))
  np.testing.assert_array_equal(call(bias)[0], call(spread)[0])
