"""The one form of every quantised matrix, and how codes are unpacked."""

from typing import NamedTuple

import numpy as np

from specdec_jax.kernels import quantised


class Form(NamedTuple):
  """A matrix [out, in]: ((table[codes] - zero) * scale + minimum) * unit.

  codes: 8-bit integers [R, C], which is [out, in] if `shape` is None.
  scale: [R / block[0], C / block[1]], rounded up; float32.
  block: the rows and columns of codes that share a scale.
  zero: integers, as many as scales, or one [1, 1] for all; None is 0.
  minimum: float32, as many as scales; None is 0.
  table: the value of each code, float32; None: the code itself.
  order: column j of codes is column order[j] of the matrix; None is j.
  shape: of the matrix, whose elements codes have one row after the other.
  unit: applied last, in a rounding of its own.
  """

  codes: np.ndarray
  scale: np.ndarray
  block: tuple[int, int]
  zero: np.ndarray | None = None
  minimum: np.ndarray | None = None
  table: np.ndarray | None = None
  order: np.ndarray | None = None
  shape: tuple[int, int] | None = None
  unit: float = 1.0


def dequantise(form: Form) -> np.ndarray:
  """The matrix in float32; each operation rounds once."""
  codes, (tall, wide) = form.codes, form.block
  R, C = codes.shape
  if R % tall or C % wide:
    codes = np.pad(codes, ((0, -R % tall), (0, -C % wide)))
  # Afterwards all is done in place: a head has 10^9 bytes.
  x = codes.astype(np.float32) if form.table is None else form.table[codes]
  blocks = x.reshape(x.shape[0] // tall, tall, x.shape[1] // wide, wide)
  each = lambda y: y[:, None, :, None]
  if form.zero is not None:
    blocks -= each(form.zero.astype(np.float32))
  blocks *= each(form.scale)
  if form.minimum is not None:
    blocks += each(form.minimum)
  if form.unit != 1:
    blocks *= np.float32(form.unit)
  x = x[:R, :C]
  if form.shape is not None:
    x = x.reshape(form.shape)
  if form.order is not None:
    out = np.empty_like(x)
    out[:, form.order] = x
    return out
  return x


def blocks(form: Form, group: int) -> np.ndarray:
  """The matrix as kernels.quantised keeps it: quantised.group_blocks.

  Its values are dequantise's to the bit if scales have 16 bits, as published
  ones do. Elsewhere scale * code rounds, by 2^-16 of a scale at most.

  form: of integers, which stay in their order; or of the table NF4.
  group: codes that a scale and a minimum are stored for, of a block's.
  """
  codes, (tall, wide) = form.codes, form.block
  O, I = codes.shape
  scale = form.scale * np.float32(form.unit)

  def each(x: np.ndarray) -> np.ndarray:
    return x.repeat(tall, 0)[:O].repeat(wide // group, 1)[:, : I // group]

  if form.table is not None:
    flat = quantised.group_blocks(codes, each(scale))
    return flat.reshape(*(form.shape or codes.shape)[:1], -1, flat.shape[-1])
  zero = np.float32(0) if form.zero is None else form.zero.astype(np.float32)
  if codes.dtype == np.int8:
    codes, zero = codes.view(np.uint8) ^ 128, zero + 128
  least = -zero * scale
  if form.minimum is not None:
    least += form.minimum
  return quantised.group_blocks(codes, each(scale), each(least))


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
  """Codes of little-endian words, of 1 to 8 bits along the last axis, as uint8.

  Code i has the bits from i * bits on, across words if need be.
  """
  raw = np.ascontiguousarray(words).view(np.uint8)
  if extra := -raw.shape[-1] % bits:
    raw = np.pad(raw, ((0, 0), (0, extra)))
  # Eight codes are `bits` bytes.
  raw = raw.reshape(len(raw), -1, bits)
  out = np.empty((*raw.shape[:-1], 8), np.uint8)
  for i in range(8):
    byte, shift = divmod(i * bits, 8)
    code = raw[..., byte] >> shift
    if shift + bits > 8:
      code |= raw[..., byte + 1] << (8 - shift)
    out[..., i] = code & ((1 << bits) - 1)
  return out.reshape(len(raw), -1)
