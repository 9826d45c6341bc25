"""One form for every quantised matrix; unpacks codes, checks stored parts."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from specdec_jax.io.arrays.stored import Stored
from specdec_jax.kernels import quantised

FLOATS = ('F32', 'F16', 'BF16', 'F64')


class Form(NamedTuple):
  """A matrix [out, in]: ((table[codes] - zero) * scale + minimum) * unit.

  codes: 8-bit integers [R, C], which is [out, in] if `shape` is None.
  scale: [R / block[0], C / block[1]], rounded up; float32.
  block: rows and columns of codes that share a scale.
  zero: integers, as many as scales, or one [1, 1] for all; None is 0.
  minimum: float32, as many as scales; None is 0.
  table: the value of each code, float32; None: the code itself.
  shape: of the matrix, whose rows follow each other in codes.
  unit: applied last, in a rounding of its own.
  """

  codes: np.ndarray
  scale: np.ndarray
  block: tuple[int, int]
  zero: np.ndarray | None = None
  minimum: np.ndarray | None = None
  table: np.ndarray | None = None
  shape: tuple[int, int] | None = None
  unit: float = 1.0


def dequantise(form: Form) -> np.ndarray:
  """Returns the matrix in float32; each operation rounds once."""
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
  return x if form.shape is None else x.reshape(form.shape)


def blocks(form: Form, group: int) -> np.ndarray:
  """Makes quantised.group_blocks, in which the CPU kernels keep a matrix. Equal
  to dequantise to the bit if scales have 16 bits, as published ones do; else
  scale * code rounds, by at most 2^-16 of a scale.

  form: integers, whose order stays; or codes in the table NF4.
  group: how many codes get a scale and a minimum; divides form's block.
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
  """Unpacks codes of 1 to 8 bits along the last axis of little-endian words, as
  uint8. Code i starts at bit i * bits and may cross words."""
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


# --- a matrix in a checkpoint ------------------------------------------------


class Plan(NamedTuple):
  """How a matrix will be read.

  kind: what it is stored as, 'GPTQ 4-bit'. shape: [out, in]. form: reads it.
  parts: those it may have; others of the module have no place.
  stored: the kind of panels that keeps it, or what has no such kind.
  order: column j of its Form is column order[j] of the matrix; None is j.
  """

  kind: str
  shape: tuple[int, int]
  parts: tuple[str, ...]
  form: Callable[[], Form]
  stored: str
  order: np.ndarray | None = None


def integers(
  kind: str, shape: tuple[int, int], parts, form, bits: int, group: int, *order
) -> Plan:
  """Plans integers whose scales each serve `group` inputs."""
  depth = math.gcd(group, shape[1], 128)
  stored = f'U{4 if bits <= 4 else 8}_{depth}'
  stored = stored if depth >= 32 else f'{kind} in groups of {group}'
  return Plan(kind, shape, parts, form, stored, *order)


@dataclasses.dataclass(frozen=True)
class Module:
  """A matrix in a checkpoint.

  source, name: the checkpoint's and its own, 'model.layers.0.mlp.up_proj'.
  parts: its arrays, by how their names end: 'qweight', 'weight.absmax'.
  settings: from quantization_config.
  """

  source: str
  name: str
  parts: Mapping[str, Stored]
  settings: Mapping[str, Any]

  def get(self, part: str) -> np.ndarray:
    return self.parts[part].read()

  def kind(self, part: str) -> tuple[str, tuple[int, ...]] | None:
    """Returns a part's (dtype, shape), None if it is absent."""
    return self.parts[part][:2] if part in self.parts else None

  def refuse(self, why: str) -> NoReturn:
    raise ValueError(f'{self.source}: {self.name}: {why}')

  def misfit(self, why: str) -> NoReturn:
    """Refuses parts that do not fit together; lists them."""
    each = (
      f'{k} {x.dtype} {[*x.shape]}' for k, x in sorted(self.parts.items())
    )
    self.refuse(f'{why}: {", ".join(each)}')

  def matrix(self, part: str, *dtypes: str) -> tuple[int, int]:
    """Returns a part's shape; refuses what is no matrix in these dtypes."""
    if part not in self.parts:
      self.refuse(f'no {part} beside {", ".join(sorted(self.parts))}')
    dtype, shape, _ = self.parts[part]
    if dtype not in dtypes or len(shape) != 2 or 0 in shape:
      what = f'{dtype} {[*shape]}, not a matrix of {" or ".join(dtypes)}'
      self.refuse(f'{part} is {what}')
    return shape[0], shape[1]

  def floats(self, part: str) -> np.ndarray:
    return self.get(part).astype(np.float32)

  def stated(self, *keys: str) -> list[Any]:
    """Returns what settings say about weights; in config_groups, too."""
    groups = self.settings.get('config_groups')
    groups = groups.values() if isinstance(groups, dict) else ()
    inner = [x.get('weights') for x in groups if isinstance(x, dict)]
    places = [self.settings, *(x for x in inner if isinstance(x, dict))]
    return [x[key] for x in places for key in keys if x.get(key) is not None]

  def block(
    self, part: str, shape: tuple[int, int], stated: list[Any]
  ) -> tuple[int, int]:
    """Tells the rows and columns that share a scale by the scales' shape."""
    tensor = self.parts.get(part)
    if tensor is None or tensor.dtype not in FLOATS:
      self.misfit(f'no {part} of {" or ".join(FLOATS)}')
    (O, I), scales = shape, tensor.shape
    if math.prod(scales) == 1:
      return O, I
    if scales in ((O,), (O, 1)):
      return 1, I
    listed = (x for x in stated if isinstance(x, list) and len(x) == 2)
    pairs = (x for x in listed if all(type(i) is int and i > 0 for i in x))
    for tall, wide in (*pairs, (128, 128)):
      if scales == (-(-O // tall), -(-I // wide)):
        return tall, wide
    if len(scales) != 2 or not all(scales) or O % scales[0] or I % scales[1]:
      self.misfit(f'{part} fits no blocks of a matrix {[O, I]}')
    return O // scales[0], I // scales[1]

  def scales(self, part: str, shape, block) -> np.ndarray:
    """Returns these blocks' scales, as a matrix in float32."""
    return self.floats(part).reshape(-(-shape[0] // block[0]), -1)

  def order(self, part: str, I: int, group: int) -> np.ndarray | None:
    """Returns the order that sorts inputs by group; None if they are sorted.
    part: the group of each input; negative ones stand for none."""
    if part not in self.parts:
      return None
    groups, want = self.get(part).reshape(-1), np.arange(I) // group
    if (groups < 0).any() or np.array_equal(groups, want):
      return None
    order = np.argsort(groups, kind='stable')
    if not np.array_equal(groups[order], want):
      self.refuse(f'{part} does not give {group} inputs to each group')
    return order
