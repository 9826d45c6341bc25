"""Repacks files' matrices as panels of kernels.quantised, to the bit.

Blocks are stored as in https://github.com/ggml-org/ggml, src/ggml-common.h. The
functions take x as [panels, columns of one, blocks, bytes of a block]. They
turn codes to [panels, blocks, ..., quads of k, columns], four to a number, and
work on all columns of a panel at once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax.kernels import quantised
from specdec_jax.kernels.quantised import beside, pair, turn

_EACH = 0x01010101  # of four codes, the lowest bit of each
# The numbers that the codes of IQ4_NL stand for, and 128.
_NL = np.array(
  [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241],
  np.uint8,
)


class Kept(NamedTuple):
  """The kind of panels that keep a file's blocks; x -> their fields."""

  kind: str
  fields: Callable[[np.ndarray], Sequence[np.ndarray]]


def pack(blocks: np.ndarray, stored: str) -> np.ndarray:
  """Packs a matrix [K, N] into panels, from its columns' blocks, stored as one
  of KEPT: uint8 [N, K / depth, size]."""
  return quantised.pack(*KEPT[stored], blocks)


def _shifts(bits: int, of: int = 8) -> np.ndarray:
  """Lists where parts of so many bits lie in a number of `of` bits."""
  return np.arange(0, of, bits, dtype=np.uint32)[:, None]


def _spread(x: np.ndarray, bits: int, quads: int = 8) -> np.ndarray:
  """Unpacks numbers of so many bits, 32 at a time: [P, B, -1, 8, W]. Each
  `quads` quads of bytes give their lowest bits first, then the next ones."""
  words = turn(x, 'u4')
  P, B, _, W = words.shape
  parts = words.reshape(P, B, -1, 1, quads, W) >> _shifts(bits)[..., None]
  return (parts & _EACH * ((1 << bits) - 1)).reshape(P, B, -1, 8, W)


def _gather(codes: np.ndarray, bits: int) -> np.ndarray:
  """Packs quads of codes, [..., 8, W], 8 / bits quads into one."""
  parts = codes.reshape(*codes.shape[:-2], bits, 8 // bits, -1)
  return np.bitwise_or.reduce(parts << _shifts(bits), -2)


def _fifth(x: np.ndarray) -> np.ndarray:
  """Reads the fifth bits of 32 codes, which a file keeps in one number."""
  quads = turn(x, 'u4') >> _shifts(4, of=32) & 15
  return _gather(quads * 0x00204081 & _EACH, 1)  # bit i goes to byte i


def _head(x: np.ndarray) -> np.ndarray:
  """Reads d and -dmin."""
  head = turn(x, 'u2')
  head[:, :, 1] ^= 0x8000
  return head


def _q4_k(x: np.ndarray) -> list[np.ndarray]:
  """Returns d, -dmin; for each 32 numbers their codes, and two whole numbers of
  6 bits, which multiply d and dmin. Q5_K has fifth bits before the others."""
  a, b, c = np.split(turn(x[..., 4:16], 'u1'), 3, 2)
  scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], 2)
  mins = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], 2)
  codes = [pair(_spread(x[..., -128:], 4))]
  if x.shape[-1] > 144:
    codes += [_gather(_spread(x[..., 16:48], 1), 1)]
  return [_head(x[..., :4]), beside([*codes, scales, mins], 3)]


def _q2_k(x: np.ndarray) -> list[np.ndarray]:
  """Returns d, -dmin; for each 32 numbers their codes of 2 bits, and what
  multiplies d, then dmin, for the first 16 and the others."""
  scales = turn(x[..., :16], 'u1')
  codes = _gather(_spread(x[..., 16:80], 2), 2)
  two = (s.reshape(*codes.shape[:3], -1) for s in (scales & 15, scales >> 4))
  return [_head(x[..., 80:]), beside([codes, *two], 3)]


def _q6_k(x: np.ndarray) -> list[np.ndarray]:
  codes = _spread(x[..., :128], 4, quads=16) | _spread(x[..., 128:192], 2) << 4
  return _six(x[..., 208:], codes, turn(x[..., 192:208], 'u1'))


def _q3_k(x: np.ndarray) -> list[np.ndarray]:
  """Keeps codes of 3 bits less 4, and scales of 6 bits less 32, as Q6_K."""
  codes = _spread(x[..., 32:96], 2) | _spread(x[..., :32], 1) << 2
  low, high = turn(x[..., 96:104], 'u1'), turn(x[..., 104:108], 'u1')
  scales = np.concatenate([low & 15, low >> 4], 2)
  scales |= np.concatenate([high >> n & 3 for n in (0, 2, 4, 6)], 2) << 4
  return _six(x[..., 108:], codes + _EACH * (32 - 4), scales - 32)


def _six(d: np.ndarray, codes: np.ndarray, scales: np.ndarray):
  """Returns Q6_K: d; for each 32 numbers their codes' low and high bits, and
  what multiplies d for the first 16 and the others."""
  two = scales.reshape(*codes.shape[:3], -1)
  high = _gather(codes >> 4 & _EACH * 3, 2)
  return [turn(d, 'u2'), beside([pair(codes), high, two], 3)]


def _iq4_nl(x: np.ndarray) -> list[np.ndarray]:
  codes = np.concatenate([x[..., 2:] & 15, x[..., 2:] >> 4], -1)
  return [turn(_NL[codes], 'u4'), turn(x[..., :2], 'u2')]


def _own(x: np.ndarray) -> list[np.ndarray]:
  """Reorders kinds of 32 numbers: codes, fifth bits if any, then float16s."""
  size = x.shape[-1]
  halves = size - 16 if size < 22 else size - 20
  fifth = [_fifth(x[..., halves:-16])] if size > 20 else []
  return [turn(x[..., -16:], 'u4'), *fifth, turn(x[..., :halves], 'u2')]


def _q8_0(x: np.ndarray) -> list[np.ndarray]:
  """Turns a file's signed bytes to unsigned ones."""
  return [turn(x[..., 2:] ^ 128, 'u4'), turn(x[..., :2], 'u2')]


# What a .gguf file stores -> how it is kept.
GGUF = {
  **{x: Kept(x, _own) for x in ('Q4_0', 'Q4_1', 'Q5_0', 'Q5_1')},
  'Q8_0': Kept('Q8_0', _q8_0),
  'Q2_K': Kept('Q2_K', _q2_k),
  'Q4_K': Kept('Q4_K', _q4_k),
  'Q5_K': Kept('Q5_K', _q4_k),
  'Q6_K': Kept('Q6_K', _q6_k),
  'Q3_K': Kept('Q6_K', _q3_k),
  'IQ4_NL': Kept('Q8_0', _iq4_nl),
}
# And groups of integers (io.quantised.form.blocks).
KEPT = GGUF | {
  kind: Kept(kind, functools.partial(quantised.group_fields, kind))
  for kind, x in quantised.KINDS.items()
  if x.scales == quantised.GROUP
}
