"""Products with stored weights against float64 and the gguf package."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import program
from specdec_jax.kernels import blocks as gguf_blocks
from specdec_jax.kernels import calls, library, quantised

# How matrices are stored in a file, and groups.
STORED = tuple(gguf_blocks.KEPT)
ROWS = (1, 2, 5, 12, 13, 64, 512)
# 0 is the best path of this CPU, and not compiled again under its own name. The
# code of groups is one for all depths, so that of two is compiled for plain C
# too. Without VNNI codes are halved if they have 8 bits, or are places in a
# table.
CPU = {*program.cpu().split()}
NEEDS = {16: {'avx512f', 'avx512bw'}, 8: {'avx2', 'fma'}, 4: set()}
VNNI = {16: 'avx512_vnni', 8: 'avx_vnni'}
BEST = next(lanes for lanes, flags in NEEDS.items() if flags <= CPU)
LANES = [(0, True), (8, True), (4, True), (16, False), (8, False)]
PATHS = [
  pytest.param(kind, lanes, vnni, marks=[pytest.mark.more] * (lanes > 0))
  for kind in quantised.KINDS
  for lanes, vnni in LANES
  if NEEDS.get(lanes, set()) <= CPU and (lanes, vnni) != (BEST, True)
  if lanes != 4 or kind not in ('U4_32', 'U4_128', 'U8_32', 'U8_64')
  if vnni or VNNI[lanes] in CPU and kind in ('Q4_1', 'Q6_K', 'Q8_0', 'NF4_64')
]


def linear(*args, **named):
  return quantised.shared(*args, **named)[0]


def blocks(kind: str, K: int, N: int, seed: int = 0) -> np.ndarray:
  """Random columns as in a file, with scales of both signs."""
  depth, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
  rng = np.random.default_rng(seed)
  x = rng.integers(0, 256, (N, K // depth, size), np.uint8)
  for at in HALVES[kind]:
    size = rng.uniform(0.5, 1.5, x.shape[:2]) * rng.choice([-0.01, 0.01])
    x[..., at : at + 2] = size.astype(np.float16)[..., None].view(np.uint8)
  return x


# Where float16s are in a block.
HALVES = {
  **{'Q4_0': (0,), 'Q4_1': (0, 2), 'Q5_0': (0,), 'Q5_1': (0, 2), 'Q8_0': (0,)},
  **{'Q2_K': (80, 82), 'Q3_K': (108,), 'Q4_K': (0, 2)},
  **{'Q5_K': (0, 2), 'Q6_K': (208,)},
  'IQ4_NL': (0,),
}


def values(raw: np.ndarray, kind: str) -> np.ndarray:
  """The matrix [K, N] that the gguf package reads."""
  flat = raw.reshape(len(raw), -1)
  return gguf.dequantize(flat, gguf.GGMLQuantizationType[kind]).T


def matrix(stored: str, K: int, N: int, seed: int = 0, tiny: bool = False):
  """Random panels, their kind, and the matrix that they stand for.

  tiny: whether scales of three columns are subnormal float16s.
  """
  if stored in gguf_blocks.GGUF:
    raw = blocks(stored, K, N, seed)
    for at in HALVES[stored] if tiny else ():
      for column, half in enumerate(([5, 0], [0, 128], [255, 131])):
        raw[column, :, at : at + 2] = half
    kind = gguf_blocks.KEPT[stored].kind
    return gguf_blocks.pack(raw, stored), kind, values(raw, stored)
  rng, k = np.random.default_rng(seed), quantised.KINDS[stored]
  codes = rng.integers(0, 1 << k.bits, (N, K), np.uint8)
  # Of 16 bits, as those that are published: so the products are exact.
  floats = rng.normal(0, 0.01, (1 + k.mins, N, K // k.depth)).astype(np.float16)
  scale, *least = floats.astype(np.float32).repeat(k.depth, -1)
  columns = quantised.group_blocks(codes, *floats)
  packed = gguf_blocks.pack(columns, stored)
  numbers = quantised.NF4[codes] if k.table else codes
  return packed, stored, (scale * numbers + sum(least)).T


def normal(seed, *shape):
  x = np.random.default_rng(seed).normal(size=shape)
  return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize('stored', STORED)
def test_values_are_those_of_the_gguf_package_to_the_bit(stored):
  """Of every matrix and every column; subnormal float16s too, and groups."""
  packed, kind, wanted = matrix(stored, 512, 300, tiny=True)
  packed = jnp.asarray(packed)
  assert packed.shape[0] == 10 and packed.dtype == jnp.uint8
  every = quantised.columns_of(packed, kind, jnp.arange(320))
  np.testing.assert_array_equal(every[:, :300], wanted)
  ids = jnp.asarray([[299, 0, 31], [32, 5, 64]])
  found = quantised.columns_of(packed, kind, ids)
  np.testing.assert_array_equal(found, wanted[:, np.asarray(ids)])
  assert not np.any(every[:, 300:])


@pytest.mark.parity
@pytest.mark.parametrize('stored', gguf_blocks.GGUF)
def test_what_libgguf_encodes_is_read_to_the_bit(stored):
  """Columns of all sizes: scales are subnormal, or zero."""
  other = pytest.importorskip('libgguf', reason='needs libgguf (extra parity)')
  K, N = 512, 70
  x = np.random.default_rng(0).normal(size=(N, K)).astype(np.float32)
  x *= np.logspace(-6, 3, N, dtype=np.float32)[:, None]
  x[7], x[8, 1:] = 0, 0
  kind = other.GGMLQuantizationType[stored]
  raw = other.quantize_rows(x, kind)
  wanted = other.dequantize_rows(raw, kind, n_per_row=K)
  np.testing.assert_array_equal(values(raw, stored).T, wanted)
  depth, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]]
  packed = gguf_blocks.pack(raw.reshape(N, K // depth, size), stored)
  kind = gguf_blocks.KEPT[stored].kind
  found = quantised.columns_of(packed, kind, jnp.arange(N)).T
  np.testing.assert_array_equal(found, wanted)
  size = lambda x: np.linalg.norm(x[20:], axis=-1)
  assert np.all(size(wanted - x) < 0.5 * size(x))


def load(kind: str, lanes: int = 0, vnni: bool = True) -> str:
  """The kind's name in `shared`."""
  one = library.quantised(kind, lanes)
  if not vnni:
    name = f'{one.name}_pairs'
    flags = *one.flags, '-mno-avx512vnni', '-mno-avxvnni'
    handlers = ((f'specdec_{name}', 'SpecdecQuantised'),)
    one = library.Library(name, one.source, flags, handlers)
  if why := library.load(program.cache_folder(), one):
    pytest.skip(why)
  return one.name


def bound(kind: str, x: np.ndarray, w: np.ndarray, bits: int) -> np.ndarray:
  """The largest error of x @ w in this arithmetic.

  Half a step for each number of a row, and for each of the chain's two
  roundings a block, and of its factors' three, half a unit of the last place of
  what it can have added up to. Numbers of a table have half a step too.
  """
  (M, K), steps = x.shape, {16: 32512, 8: 127}[bits]
  most = np.abs(x).reshape(M, -1, 32).max(-1).repeat(32, -1)
  step = most / steps * (0.5 + 1e-3)
  sizes = (np.abs(x) + step) @ np.abs(w)
  # Codes are unsigned: a sum may be large where their difference is small.
  table = quantised.KINDS[kind].table * 0.5 / 32512 * np.abs(w).max()
  exact = step @ np.abs(w) + table * np.abs(x).sum(-1, keepdims=True)
  return exact + (2 * K // 32 + 3) * 2.0**-24 * 16 * sizes


@pytest.mark.parametrize('bits', quantised.BITS)
@pytest.mark.parametrize('kind, lanes, vnni', PATHS)
def test_every_path_has_the_same_bits_at_every_row_count(
  kind, lanes, vnni, bits
):
  """Within the computed error of float64; 70 columns: the last are padding."""
  own = load(kind, lanes, vnni)
  load(kind)
  K, N = 512, 70
  packed, _, w = matrix(kind, K, N, seed=1)
  packed, w = jnp.asarray(packed), w.astype(np.float64)
  x = np.array(normal(2, max(ROWS), K))
  x[3, 32:64], x[4] = 0, x[4] * 1e-3
  product = jax.jit(lambda x: linear(x, packed, own, N, bits=bits))
  alone = np.concatenate([product(x[i : i + 1]) for i in range(len(x))])
  error = np.abs(alone - x.astype(np.float64) @ w)
  assert np.all(error <= bound(kind, x, w, bits))
  for rows in ROWS:
    np.testing.assert_array_equal(product(x[:rows]), alone[:rows])
  best = linear(jnp.asarray(x), packed, kind, N, bits=bits)
  np.testing.assert_array_equal(best, alone)


def test_scales_that_are_not_finite_are_counted():
  """Of a group that is infinite, two minima that are no number."""
  scale, minimum = np.ones((2, 40, 2), np.float32)
  scale[3, 0], minimum[35] = np.inf, np.nan
  columns = quantised.group_blocks(np.zeros((40, 64), np.uint8), scale, minimum)
  packed = gguf_blocks.pack(columns, 'U8_32')
  assert quantised.broken(packed, 'U8_32') == 3


@pytest.mark.parametrize('bits', quantised.BITS)
def test_rows_are_rounded_once_for_matrices_of_several_kinds(bits):
  """With the bits of each alone; x is not looked at again."""
  kinds = 'Q4_0', 'Q6_K', 'Q4_K'
  for kind in kinds:
    load(kind)
  each = {k: jnp.asarray(matrix(k, 256, 40)[0]) for k in kinds}
  scale = normal(1, 256)
  for count in (1, 5, 13):
    x, norm = normal(0, count, 256), calls.Norm('rms', scale, None, 1.0)
    own = dict(columns=40, norm=norm, bits=bits)
    alone = [linear(x, each[k], k, **own) for k in kinds]
    _, rows = quantised.shared(x, each['Q4_0'], 'Q4_0', **own)
    for kind, wanted in zip(kinds, alone, strict=True):
      y, none = quantised.shared(0 * x, each[kind], kind, rows=rows, **own)
      np.testing.assert_array_equal(y, wanted)
      assert not none.size


def test_a_matrix_of_mixed_rows_is_multiplied_in_their_order():
  """To the bit, whatever the number of rows."""
  load('Q4_1')
  packed, _, _ = matrix('Q4_1', 128, 70)
  packed, x = jnp.asarray(packed), normal(0, 13, 128)
  order = jnp.asarray(np.random.default_rng(1).permutation(128), jnp.int32)
  wanted = linear(x[:, order], packed, 'Q4_1', 70)
  for rows in (1, 5, 13):
    found = linear(x[:rows], packed, 'Q4_1', 70, order=order)
    np.testing.assert_array_equal(found, wanted[:rows])


def test_a_number_that_is_none_stays_none():
  """A row with a NaN gives NaNs; the others are what they were."""
  load('Q8_0')
  packed = jnp.asarray(gguf_blocks.pack(blocks('Q8_0', 64, 32), 'Q8_0'))
  x = np.array(normal(0, 3, 64))
  clean = linear(jnp.asarray(x), packed, 'Q8_0', 32)
  x[1, 40] = np.nan
  with jax.debug_nans(False):
    y = np.asarray(linear(jnp.asarray(x), packed, 'Q8_0', 32))
  assert np.all(np.isnan(y[1]))
  np.testing.assert_array_equal(y[[0, 2]], clean[jnp.asarray([0, 2])])
