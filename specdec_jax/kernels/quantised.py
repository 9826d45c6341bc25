"""Products with weights as a checkpoint stores them, by quantised.c.

A matrix [K, N] lies in panels of 32 columns, uint8 [N / 32, K / depth, bytes],
N padded with zeros: for each block of K its columns' codes, four k of a column
side by side, and then their scales. What quantised.c reads is one stream.

The blocks of GGUF's kinds: https://github.com/ggml-org/ggml,
src/ggml-common.h. U4_64 is unsigned codes of 4 bits, of which 64 of a column
have a scale and a minimum in float32; `pack_groups` makes its panels.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.kernels import calls

Array = jax.Array

WIDE = 32
# Bits of the numbers that a row is rounded to, in blocks of 32.
BITS = (16, 8)


class Kind(NamedTuple):
  """How a block of numbers of one column is stored.

  depth: numbers of a block. size: bytes of it in a file.
  fields: (bytes side by side, bytes in all) of each field of a block here.
  split(blocks [..., size]) -> its fields, each [..., bytes]: from a file.
  values(*fields) -> float32 [..., depth].
  """

  depth: int
  size: int
  fields: tuple[tuple[int, int], ...]
  split: Callable[[np.ndarray], list[np.ndarray]]
  values: Callable[..., Array]

  @property
  def offsets(self) -> list[int]:
    """Where the fields of a panel's block begin, and its end."""
    return np.cumsum([0, *(WIDE * n for _, n in self.fields)]).tolist()


def _half(two: Array) -> Array:
  """float16s, of two bytes each, as float32 [..., 1]."""
  halves = jax.lax.bitcast_convert_type(two, jnp.float16)
  return halves.astype(jnp.float32)[..., None]


def _full(four: Array) -> Array:
  """float32s, of four bytes each, [..., 1]."""
  return jax.lax.bitcast_convert_type(four, jnp.float32)[..., None]


def _nibbles(codes: Array) -> Array:
  """The low halves of bytes, then the high ones."""
  return jnp.concatenate([codes & 15, codes >> 4], -1)


def _float(x: Array) -> Array:
  return x.astype(jnp.float32)


def _paired(codes: np.ndarray) -> np.ndarray:
  """[..., 32] codes, of which 4 bits are kept: k and k + 16 in one byte."""
  return codes[..., :16] & 15 | codes[..., 16:] << 4


def _split_q4_k(x: np.ndarray) -> list[np.ndarray]:
  """d, -dmin; of each 32 numbers their codes, and two whole numbers of 6 bits:
  what d and dmin are multiplied by."""
  a, b, c = x[..., 4:8], x[..., 8:12], x[..., 12:16]
  scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], -1)
  mins = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], -1)
  two = x[..., 16:].reshape(*x.shape[:-1], 4, 1, 32)
  codes = np.concatenate([two & 15, two >> 4], -2)
  codes = _paired(codes.reshape(*x.shape[:-1], 8, 32))
  fields = [x[..., :2], x[..., 2:4] ^ np.array([0, 128], np.uint8)]
  for i in range(8):
    one = slice(i, i + 1)
    fields += [codes[..., i, :], scales[..., one], mins[..., one]]
  return fields


def _values_q4_k(d: Array, minus: Array, *parts: Array) -> Array:
  """Of `parts` each 32 numbers have three."""
  each = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
  return jnp.concatenate(
    [
      _half(d) * _float(scale) * _float(_nibbles(codes))
      + _half(minus) * _float(least)
      for codes, scale, least in each
    ],
    -1,
  )


def _place(g: int) -> tuple[slice, int]:
  """Where the two high bits of quad g of 32 k lie: bytes, and shift."""
  first = g // 4 * 4
  return slice(first, first + 4), g % 4 * 2


def _split_q6_k(x: np.ndarray) -> list[np.ndarray]:
  """d; of each 32 numbers the low and the high bits of their codes, and what d
  is multiplied by for 16 of them, and for the others."""
  lead = x.shape[:-1]
  low, high = x[..., :128].reshape(*lead, 2, 64), x[..., 128:192]
  high = high.reshape(*lead, 2, 1, 32)
  low = np.concatenate([low & 15, low >> 4], -1).reshape(*lead, 8, 32)
  shift = np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1)
  quads = (high >> shift & 3).reshape(*lead, 8, 8, 4)
  high = np.zeros((*lead, 8, 8), np.uint8)
  for g in range(8):
    at, n = _place(g)
    high[..., at] |= quads[..., g, :] << n
  fields = [x[..., 208:]]
  for i in range(8):
    scales = (x[..., j : j + 1] for j in (192 + 2 * i, 193 + 2 * i))
    fields += [_paired(low[..., i, :]), high[..., i, :], *scales]
  return fields


def _values_q6_k(d: Array, *parts: Array) -> Array:
  """Of `parts` each 32 numbers have four."""
  out = []
  for i in range(0, len(parts), 4):
    low, both, *scales = parts[i : i + 4]
    high = [both[..., at] >> n & 3 for at, n in map(_place, range(8))]
    codes = _nibbles(low) | jnp.concatenate(high, -1) << 4
    for scale, x in zip(scales, jnp.split(codes, 2, -1), strict=True):
      signed = _float(jax.lax.bitcast_convert_type(scale, jnp.int8))
      out.append(_half(d) * signed * (_float(x) - 32))
  return jnp.concatenate(out, -1)


def _grouped(bits: int, depth: int) -> Kind:
  """Scale and minimum, in float32, and unsigned codes of `depth` numbers."""
  parts, codes = depth // 32, _nibbles if bits == 4 else lambda x: x
  return Kind(
    depth,
    size=8 + depth * bits // 8,
    fields=(_FLOAT, _FLOAT, *parts * ((4, 4 * bits),)),
    split=lambda x: [x[..., :4], x[..., 4:8], *np.split(x[..., 8:], parts, -1)],
    values=lambda scale, least, *each: (
      _full(scale) * _float(jnp.concatenate([*map(codes, each)], -1))
      + _full(least)
    ),
  )


_CODES, _FLOAT, _HALF, _BYTE = (4, 16), (4, 4), (2, 2), (1, 1)
# Those of a .gguf file, by its names.
GGUF = {
  'Q4_0': Kind(
    *(32, 18, (_CODES, _HALF)),
    split=lambda x: [x[..., 2:], x[..., :2]],
    values=lambda codes, d: _half(d) * (_float(_nibbles(codes)) - 8),
  ),
  'Q4_1': Kind(
    *(32, 20, (_CODES, _HALF, _HALF)),
    split=lambda x: [x[..., 4:], x[..., :2], x[..., 2:4]],
    values=lambda codes, d, m: _half(d) * _float(_nibbles(codes)) + _half(m),
  ),
  'Q8_0': Kind(
    *(32, 34, ((4, 32), _HALF)),
    # Signed bytes in a file, unsigned here.
    split=lambda x: [x[..., 2:] ^ 128, x[..., :2]],
    values=lambda codes, d: _half(d) * (_float(codes) - 128),
  ),
  'Q4_K': Kind(
    *(256, 144, (_HALF, _HALF, *8 * (_CODES, _BYTE, _BYTE))),
    split=_split_q4_k,
    values=_values_q4_k,
  ),
  'Q6_K': Kind(
    *(256, 210, (_HALF, *8 * (_CODES, (4, 8), _BYTE, _BYTE))),
    split=_split_q6_k,
    values=_values_q6_k,
  ),
}
GROUPS = (32, 64, 128)
KINDS = GGUF | {
  f'U{bits}_{n}': _grouped(bits, n) for bits in (4, 8) for n in GROUPS
}


def pack(blocks: np.ndarray, kind: str) -> np.ndarray:
  """The panels of a matrix [K, N], from its columns in a file.

  Args:
    blocks: [N, K / depth, size] uint8.
    kind: one of KINDS.
  """
  k, (N, B, _) = KINDS[kind], blocks.shape
  out = np.zeros((-(-N // WIDE), B, k.offsets[-1]), np.uint8)
  fields = zip(k.fields, k.split(blocks), k.offsets, strict=False)
  for (unit, size), field, start in fields:
    dtype = np.dtype(f'u{unit}')
    padded = np.zeros((len(out) * WIDE, B, size // unit), dtype)
    padded[:N] = np.ascontiguousarray(field).view(dtype)
    x = padded.reshape(len(out), WIDE, B, -1).transpose(0, 2, 3, 1)
    part = np.ascontiguousarray(x).view(np.uint8).reshape(len(out), B, -1)
    out[..., start : start + WIDE * size] = part
  return out


def pack_groups(
  codes_NK: np.ndarray, scale_NJ: np.ndarray, minimum_NJ: np.ndarray, bits: int
) -> np.ndarray:
  """The panels, U4_64 or such, of the matrix [K, N] scale * code + minimum.

  Args:
    codes_NK: uint8, below 2^bits.
    scale_NJ: of each K / J codes, one of GROUPS.
    minimum_NJ: as scale_NJ.
    bits: 4 or 8.
  """
  (N, K), J = codes_NK.shape, scale_NJ.shape[1]
  assert K == J * (K // J) and codes_NK.max() < 1 << bits, (K, J, bits)
  codes = codes_NK.reshape(N, J, -1, 32)
  if bits == 4:
    codes = _paired(codes)
  floats = np.stack([scale_NJ, minimum_NJ], -1).astype(np.float32)
  fields = floats.view(np.uint8), codes.reshape(N, J, -1)
  return pack(np.concatenate(fields, -1), f'U{bits}_{K // J}')


def _by_column(packed: Array, kind: str) -> list[Array]:
  """The fields of panels, each [columns, K / depth, bytes]."""
  k, (P, B, _) = KINDS[kind], packed.shape
  parts = jnp.split(packed, k.offsets[1:-1], -1)
  each = zip(k.fields, parts, strict=True)
  split = [x.reshape(P, B, -1, WIDE, unit) for (unit, _), x in each]
  return [jnp.moveaxis(x, 3, 1).reshape(P * WIDE, B, -1) for x in split]


def unpack(packed: Array, kind: str, columns: int) -> Array:
  """The matrix, float32 [K, columns]: to the bit what the file stands for."""
  x_NBI = KINDS[kind].values(*_by_column(packed, kind))
  return x_NBI.reshape(len(x_NBI), -1)[:columns].T


def take(packed: Array, kind: str, ids_R: Array) -> Array:
  """The panels of these columns alone."""
  k, B, out = KINDS[kind], packed.shape[1], []
  padding = ((0, -len(ids_R) % WIDE), (0, 0), (0, 0))
  for (unit, size), x in zip(k.fields, _by_column(packed, kind), strict=True):
    some_RBI = jnp.pad(x[ids_R], padding)
    some_PWBUI = some_RBI.reshape(-1, WIDE, B, size // unit, unit)
    x_PBUWI = jnp.moveaxis(some_PWBUI, 1, 3)
    out.append(x_PBUWI.reshape(len(x_PBUWI), B, -1))
  return jnp.concatenate(out, -1)


def columns_of(packed: Array, kind: str, ids: Array) -> Array:
  """Columns of the matrix, float32 [K, *ids.shape]."""
  k = KINDS[kind]
  column, fields = (ids % WIDE)[..., None], []
  for (unit, size), start in zip(k.fields, k.offsets, strict=False):
    i = np.arange(size)
    first = start + i // unit * unit * WIDE + i % unit
    at = column * unit + first.reshape((1,) * ids.ndim + (-1,))
    x = packed.at[(ids // WIDE)[..., None], :, at].get(mode='clip')
    fields.append(jnp.swapaxes(x, -1, -2))
  return jnp.moveaxis(k.values(*fields).reshape(*ids.shape, -1), -1, 0)


def broken(packed: np.ndarray, kind: str) -> int:
  """How many scales of panels are infinite or no number."""
  k, count = KINDS[kind], 0
  floats = {_HALF: np.float16, _FLOAT: np.float32}
  for field, start in zip(k.fields, k.offsets, strict=False):
    if field in floats:
      part = packed[..., start : start + field[1] * WIDE]
      numbers = np.ascontiguousarray(part).view(floats[field])
      count += np.count_nonzero(~np.isfinite(numbers))
  return int(count)


def linear(
  x: Array, packed: Array, kind: str, columns: int, *, bits: int = 16, **around
) -> Array:
  """add + act(norm(x) @ matrix + bias), float32.

  Args:
    x: [..., K] float32.
    packed: the panels of the matrix; if gated, those of gate and of up.
    kind: one of KINDS, whose library is loaded (library.quantised).
    columns: N, of the result.
    bits: of BITS; 16 gives float32's result to about 3e-5 of it, 8 to 7e-3.
    **around: the fields of calls.Around.
  """
  return calls.product(
    f'specdec_{kind.lower()}',
    x,
    packed,
    columns,
    calls.Around(**around),
    wide=np.int32(bits == 16),
  )
