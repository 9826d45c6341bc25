"""Multiplies by weights as a checkpoint stores them, through quantised.c.

A matrix [K, N] lies in panels of 32 columns, uint8 [N / 32, K / depth, bytes],
N padded with zeros. Each block along K holds its columns' codes, four k of a
column side by side, and their scales. quantised.c reads one stream.

Kinds have GGUF's names, and keep its numbers to the bit, or say bits and group:
U4_64 is unsigned codes of 4 bits, where 64 in a column have a float32 scale and
minimum. NF4_64's codes are places in NF4.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.kernels import calls

Array = jax.Array

WIDE = 32
# Bits of the numbers that a row is rounded to, in blocks of 32.
BITS = (16, 8)
# Panels that are packed at once: what is made on the way fits in a cache.
_SOME = 8


OWN, SUPER, GROUP = 'own', 'super', 'group'
_QUADS, _FLOAT, _HALF = (np.dtype(x) for x in ('u4', 'f4', 'f2'))


# NormalFloat of 4 bits (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314,
# appendix E): quantiles of a normal distribution. Products have them rounded to
# 16 bits, as rows of x are.
NF4 = np.array(
  [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
  ],
  np.float32,
)


class Kind(NamedTuple):
  """How one column's numbers are stored; STORED in quantised.c.

  depth, bits: numbers in a block, bits in a code. zero: taken from a code.
  scales: OWN, a float16 after each 32 codes; SUPER, one before all, which whole
    numbers of 8 bits after each 32 multiply; GROUP, a float32 before all.
  mins: 1 if there are minima, which lie after the scales.
  parts: how many parts 32 numbers have, each with a scale, and a minimum.
  """

  depth: int
  bits: int
  scales: str
  mins: int
  parts: int
  zero: int

  @property
  def table(self) -> bool:
    """Tells whether codes are places in NF4."""
    return self.scales == GROUP and not self.mins

  @property
  def layout(self) -> tuple[list[np.dtype], list[int], list[np.dtype]]:
    """Returns (types of scales before the codes, bytes in 32 codes, types of
    what follows). Codes are whole, or split into 4 bits and the others."""
    one = {OWN: [], SUPER: [_HALF], GROUP: [_FLOAT]}[self.scales]
    codes = {2: [8], 4: [16], 5: [16, 4], 6: [16, 8], 8: [32]}[self.bits]
    whole = self.parts * [np.dtype('u1' if self.mins else 'i1')]
    each = {OWN: [_HALF], SUPER: whole, GROUP: []}[self.scales]
    return (1 + self.mins) * one, codes, (1 + self.mins) * each

  @property
  def fields(self) -> list[tuple[np.dtype, int]]:
    """Lists (type, bytes) for each field in a block: all columns' numbers of
    this type lie side by side."""
    one = lambda types: [(x, x.itemsize) for x in types]
    head, codes, last = self.layout
    each = [(_QUADS, n) for n in codes] + one(last)
    return one(head) + self.depth // 32 * each

  @property
  def size(self) -> int:
    """Counts bytes in one column's block."""
    return sum(n for _, n in self.fields)

  @property
  def offsets(self) -> list[int]:
    """Lists where the fields in a panel's block begin."""
    return np.cumsum([0, *(WIDE * n for _, n in self.fields[:-1])]).tolist()


KINDS = {
  'Q4_0': Kind(32, 4, OWN, 0, 1, 8),
  'Q4_1': Kind(32, 4, OWN, 1, 1, 0),
  'Q5_0': Kind(32, 5, OWN, 0, 1, 16),
  'Q5_1': Kind(32, 5, OWN, 1, 1, 0),
  'Q8_0': Kind(32, 8, OWN, 0, 1, 128),
  'Q2_K': Kind(256, 2, SUPER, 1, 2, 0),
  'Q4_K': Kind(256, 4, SUPER, 1, 1, 0),
  'Q5_K': Kind(256, 5, SUPER, 1, 1, 0),
  'Q6_K': Kind(256, 6, SUPER, 0, 2, 32),
  **{
    f'U{bits}_{depth}': Kind(depth, bits, GROUP, 1, 1, 0)
    for bits in (4, 8)
    for depth in (32, 64, 128)
  },
  'NF4_64': Kind(64, 4, GROUP, 0, 1, 0),
}


def _number(dtype: np.dtype, x: Array) -> Array:
  """Reads bytes [..., itemsize] as numbers of a type, float32 [..., 1]."""
  y = jax.lax.bitcast_convert_type(x, dtype).astype(jnp.float32)
  return y.reshape(*x.shape[:-1], 1)


@jax.jit
def _codes(low: Array, high: Array | None = None) -> Array:
  """Reads 32 codes: bytes, nibbles and their higher bits, or fewer bits."""
  if low.shape[-1] == 16:
    low = jnp.concatenate([low & 15, low >> 4], -1)
  elif low.shape[-1] < 16:
    low = _quads(low)
  if high is not None:
    low |= _quads(high) << 4
  return low


def _quads(x: Array) -> Array:
  """Reads 32 codes of one or two bits, the first ones from a quad of bytes."""
  bits = x.shape[-1] // 4
  words, mask = x.reshape(*x.shape[:-1], bits, 4), (1 << bits) - 1
  quads = jnp.stack([words >> n & mask for n in range(0, 8, bits)], -2)
  return quads.reshape(*x.shape[:-1], 32)


def _values(kind: str, fields: Sequence[Array]) -> Array:
  """Computes float32 [..., depth] from blocks' fields [..., bytes]."""
  k, out = KINDS[kind], []
  before, sizes, after = k.layout
  head, c = [*map(_number, before, fields)], len(sizes)
  for i in range(len(head), len(fields), c + len(after)):
    codes = _codes(*fields[i : i + c])
    numbers = jnp.asarray(NF4)[codes] if k.table else codes - np.float32(k.zero)
    last = [*map(_number, after, fields[i + c :])]
    if k.scales == SUPER:
      each = jnp.concatenate(last, -1).reshape(*codes.shape[:-1], -1, k.parts)
      each = jnp.repeat(each, 32 // k.parts, -1)
      last = [x * each[..., n, :] for n, x in enumerate(head)]
    scale, *least = last or head
    out.append(scale * numbers + least[0] if k.mins else scale * numbers)
  return jnp.concatenate(out, -1)


def pack(
  kind: str,
  fields: Callable[[np.ndarray], Sequence[np.ndarray]],
  blocks: np.ndarray,
) -> np.ndarray:
  """Packs a matrix [K, N] into panels, from its columns' blocks, uint8
  [N, K / depth, size]. fields([P, WIDE, K / depth, size]) turns some panels'
  columns into what `beside` joins to blocks."""
  N, B, size = blocks.shape
  out = np.empty((-(-N // WIDE), B, WIDE * KINDS[kind].size), np.uint8)

  def some(first: int) -> None:
    x = blocks[first * WIDE : (first + _SOME) * WIDE]
    if extra := -len(x) % WIDE:
      x = np.pad(x, ((0, extra), (0, 0), (0, 0)))
    parts = fields(x.reshape(-1, WIDE, B, size))
    out[first : first + _SOME] = beside(parts, 2)

  with futures.ThreadPoolExecutor() as pool:
    list(pool.map(some, range(0, len(out), _SOME)))
  return out


def turn(x_PWBI: np.ndarray, dtype: str) -> np.ndarray:
  """Turns columns' bytes into a field of one type, [P, B, I / bytes, W]."""
  return np.ascontiguousarray(np.moveaxis(x_PWBI.view(dtype), 1, -1))


def pair(quads: np.ndarray) -> np.ndarray:
  """Puts the low 4 bits of quads [..., 8, W] in pairs: [..., 4, W]."""
  low = quads & np.uint32(0x0F0F0F0F)
  return low[..., :4, :] | low[..., 4:, :] << 4


def beside(fields: Sequence[np.ndarray], axis: int) -> np.ndarray:
  """Joins fields' bytes from an axis on, one field after the other."""
  each = (x.reshape(*x.shape[:axis], -1).view(np.uint8) for x in fields)
  return np.concatenate([*each], -1)


def group_blocks(codes_NK: np.ndarray, *numbers_NJ: np.ndarray) -> np.ndarray:
  """Makes blocks for `pack`, of scale * code + minimum or scale * NF4[code].

  Returns uint8 [N, J, 8 + K / J]: a group's two numbers in float32 (or one),
  its codes. numbers_NJ are a scale for each K / J codes, which are 32, 64 or
  128; and a minimum.
  """
  scale_NJ, floats = numbers_NJ[0], np.stack(numbers_NJ, -1).astype(np.float32)
  codes_NJC = codes_NK.reshape(*scale_NJ.shape, -1)
  return np.concatenate([floats.view(np.uint8), codes_NJC], -1)


def group_fields(kind: str, x_PWJI: np.ndarray) -> list[np.ndarray]:
  """Splits group_blocks' result into fields, for U4_64 and such."""
  numbers = 4 * (1 + KINDS[kind].mins)
  codes = turn(x_PWJI[..., numbers:], 'u4')
  if KINDS[kind].bits == 4:
    codes = pair(codes.reshape(*codes.shape[:2], -1, 8, WIDE))
  return [turn(x_PWJI[..., :numbers], 'u4'), codes]


# One program: compiled op by op, its moves take longer than the arithmetic.
@functools.partial(jax.jit, static_argnums=1)
def columns_of(packed: Array, kind: str, ids: Array) -> Array:
  """Reads columns, float32 [K, *ids.shape]: to the bit those in the file."""
  x = _values(kind, _fields(packed, kind, ids))
  return jnp.moveaxis(x.reshape(*ids.shape, -1), -1, 0)


def take(packed: Array, kind: str, ids_R: Array) -> Array:
  """Returns panels with these columns alone."""
  P, B = -(-len(ids_R) // WIDE), packed.shape[1]
  padding, out = ((0, P * WIDE - len(ids_R)), (0, 0), (0, 0)), []
  each = _fields(packed, kind, ids_R)
  for (dtype, _), x_RBI in zip(KINDS[kind].fields, each, strict=True):
    some_RBI = jnp.pad(x_RBI, padding)
    some_PWBUI = some_RBI.reshape(P, WIDE, B, -1, dtype.itemsize)
    x_PBUWI = jnp.moveaxis(some_PWBUI, 1, 3)
    out.append(x_PBUWI.reshape(P, B, -1))
  return jnp.concatenate(out, -1)


def _fields(packed: Array, kind: str, ids: Array) -> list[Array]:
  """Returns columns' fields, each [*ids.shape, K / depth, bytes]."""
  k = KINDS[kind]
  column, fields = (ids % WIDE)[..., None], []
  for (dtype, size), start in zip(k.fields, k.offsets, strict=True):
    i, unit = np.arange(size), dtype.itemsize
    first = start + i // unit * unit * WIDE + i % unit
    at = column * unit + first.reshape((1,) * ids.ndim + (-1,))
    x = packed.at[(ids // WIDE)[..., None], :, at].get(mode='clip')
    fields.append(jnp.swapaxes(x, -1, -2))
  return fields


def broken(packed: np.ndarray, kind: str) -> int:
  """Counts scales in panels that are infinite or no number."""
  k, count = KINDS[kind], 0
  for (dtype, size), start in zip(k.fields, k.offsets, strict=True):
    if dtype.kind == 'f':
      part = packed[..., start : start + size * WIDE]
      numbers = np.ascontiguousarray(part).view(dtype)
      count += np.count_nonzero(~np.isfinite(numbers))
  return int(count)


def shared(
  x: Array,
  packed: Array,
  kind: str,
  columns: int,
  *,
  bits: int = 16,
  order: Array | None = None,
  rows: Array | None = None,
  **around,
) -> list[Array]:
  """Returns [add + act(norm(x) @ matrix + bias), rows], the rounded norm(x).

  packed: the matrix's panels; if gated, those of gate and of up.
  kind: one of KINDS, whose library is loaded (library.quantised).
  bits: in BITS; 16 gives float32's result to about 3e-5 of it, 8 to 7e-3.
  order: [K] int32, row k of the panels is this row of the matrix; None: k.
  rows: what this returned for a matrix of another kind and the same x, norm,
    order and bits, none of which is looked at again; then it returns none.
  x, columns, around: as in calls.linear.
  """
  size = x.size // 32 * (60 + 32 * (bits == 16)) if rows is None else 0
  return calls.product(
    f'specdec_{kind.lower()}',
    x,
    packed,
    columns,
    calls.given(order),
    calls.given(rows),
    also=[jax.ShapeDtypeStruct((size,), jnp.uint8)],
    wide=np.int32(bits == 16),
    **around,
  )
