"""The GGUF container: header, fields, tensor table. Knows no models.

Every count and size is checked against the bytes that are there before anything
is allocated, so a cut or damaged file is one ValueError. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import itertools
import mmap
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

MAGIC = b'GGUF'
VERSIONS = (2, 3)
MOST_TENSORS = 1_000_000
MOST_FIELDS = 100_000
MOST_NAME = 4096

# Type id of a field -> letter, the same for struct and numpy.
_SCALARS = dict(enumerate('BbHhIif')) | {10: 'Q', 11: 'q', 12: 'd'}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclasses.dataclass(frozen=True)
class Tensor:
  """shape is numpy's order, the reverse of the file's."""

  shape: tuple[int, ...]
  kind: gguf.GGMLQuantizationType
  offset: int
  nbytes: int


@dataclasses.dataclass(frozen=True)
class File:
  path: pathlib.Path
  fields: Mapping[str, Any]
  tensors: Mapping[str, Tensor]
  data: mmap.mmap

  def read(self, name: str) -> np.ndarray:
    """One tensor, dequantised: float32, or float64 where stored so.

    Raises:
      ValueError: a storage type that the gguf package cannot dequantise.
    """
    t = self.tensors[name]
    block, size = gguf.GGML_QUANT_SIZES[t.kind]
    raw = np.frombuffer(self.data, np.uint8, t.nbytes, t.offset)
    if t.kind == gguf.GGMLQuantizationType.F32:
      return raw.view(np.float32).reshape(t.shape)
    rows = raw.reshape(*t.shape[:-1], t.shape[-1] // block * size)
    try:
      return gguf.dequantize(rows, t.kind).reshape(t.shape)
    except NotImplementedError as e:
      raise ValueError(
        f'{self.path}: {name} is stored as {t.kind.name}, which the gguf '
        'package cannot dequantise; use a Q8_0, Q4_K or F16 file'
      ) from e


def parse(path: pathlib.Path) -> File:
  """Opens and checks a file; tensors stay on disk until read.

  Raises:
    ValueError: not a GGUF file of version 2 or 3, cut, or damaged.
  """
  try:
    with open(path, 'rb') as f:
      head = f.read(32)
      if head[:4] != MAGIC:
        _refuse_magic(path, head)
      data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as e:
    raise ValueError(f'{path}: cannot be read: {e.strerror or e}') from e
  cursor = _Cursor(path, data)
  cursor.at = 4
  version = cursor.scalar('I')
  if version not in VERSIONS:
    swapped = int.from_bytes(version.to_bytes(4, 'little'), 'big')
    what = 'big-endian' if swapped in VERSIONS else f'version {version}'
    raise ValueError(
      f'{path}: {what} GGUF; allowed are little-endian versions 2 and 3'
    )
  n_tensors, n_fields = cursor.scalar('Q'), cursor.scalar('Q')
  # A tensor's entry takes at least 32 bytes, a field's 13.
  cursor.need(n_tensors * 32 + n_fields * 13, 'its tensor and field tables')
  if n_tensors > MOST_TENSORS or n_fields > MOST_FIELDS:
    raise ValueError(
      f'{path}: {n_tensors} tensors and {n_fields} fields; allowed are '
      f'{MOST_TENSORS} and {MOST_FIELDS}'
    )
  fields: dict[str, Any] = {}
  for _ in range(n_fields):
    name = cursor.name('a field')
    if name in fields:
      raise ValueError(f'{path}: field {name} is given twice')
    fields[name] = cursor.value(cursor.scalar('I'), name)
  tensors = _tensors(cursor, n_tensors, fields)
  return File(path, fields, tensors, data)


def _refuse_magic(path, head: bytes):
  if not head:
    what = 'is empty'
  elif head.startswith(b'version https://git-lfs'):
    what = 'is a Git LFS pointer, not weights; fetch it with `git lfs pull`'
  else:
    what = f'starts with {head[:4]!r}, not {MAGIC!r}: not a GGUF file'
  raise ValueError(f'{path}: {what}')


class _Cursor:
  """Reads forward through the header, never past the end of the file."""

  def __init__(self, path: pathlib.Path, data: mmap.mmap):
    self.path, self.data, self.at = path, data, 0

  def need(self, size: int, what: str) -> None:
    left = len(self.data) - self.at
    if size > left:
      raise ValueError(
        f'{self.path}: cut or damaged: {what} needs {size} bytes at offset '
        f'{self.at}, {left} are left'
      )

  def take(self, size: int, what: str) -> bytes:
    self.need(size, what)
    self.at += size
    return self.data[self.at - size : self.at]

  def scalar(self, letter: str):
    size = struct.calcsize('<' + letter)
    return struct.unpack('<' + letter, self.take(size, 'the header'))[0]

  def string(self, what: str) -> str:
    # Damaged text is replaced rather than refused: a token may be any bytes.
    size = self.scalar('Q')
    return self.take(size, what).decode('utf-8', 'replace')

  def name(self, what: str) -> str:
    at = self.at
    text = self.string(f'the name of {what}')
    if not 0 < len(text) <= MOST_NAME or not text.isprintable():
      raise ValueError(
        f'{self.path}: damaged: the name of {what} at offset {at} is '
        f'{text[:40]!r}'
      )
    return text

  def value(self, kind: int, name: str):
    if kind == _STRING:
      return self.string(name)
    if kind == _BOOL:
      return bool(self.scalar('B'))
    if kind in _SCALARS:
      return self.scalar(_SCALARS[kind])
    if kind == _ARRAY:
      return self.array(name)
    raise ValueError(
      f'{self.path}: damaged: field {name} has type {kind}; allowed are 0 to 12'
    )

  def array(self, name: str):
    kind, count = self.scalar('I'), self.scalar('Q')
    if kind == _STRING:
      self.need(count * 8, f'field {name} of {count} strings')
      return [self.string(name) for _ in range(count)]
    if kind == _BOOL or kind in _SCALARS:
      dtype = np.dtype('<' + _SCALARS.get(kind, 'B'))
      raw = self.take(
        count * dtype.itemsize, f'field {name} of {count} numbers'
      )
      return np.frombuffer(raw, dtype)
    raise ValueError(
      f'{self.path}: field {name} is an array of type {kind}; allowed are '
      'numbers, booleans and strings'
    )


def _tensors(cursor: _Cursor, count: int, fields) -> dict[str, Tensor]:
  """The tensor table, with offsets from the start of the file."""
  path = cursor.path
  entries = {}
  for _ in range(count):
    name = cursor.name('a tensor')
    if name in entries:
      raise ValueError(f'{path}: tensor {name} is given twice')
    ndim = cursor.scalar('I')
    if not 1 <= ndim <= 4:
      raise ValueError(f'{path}: damaged: {name} has {ndim} dimensions')
    shape = tuple(cursor.scalar('Q') for _ in range(ndim))[::-1]
    entries[name] = shape, cursor.scalar('I'), cursor.scalar('Q')
  align = fields.get('general.alignment', 32)
  if type(align) is not int or align < 1 or align & (align - 1):
    raise ValueError(
      f'{path}: general.alignment={align}; a power of two is needed'
    )
  start = -(-cursor.at // align) * align
  tensors, ends = {}, []
  for name, (shape, kind, offset) in entries.items():
    kind, nbytes = _storage(path, name, shape, kind)
    cursor.at = start + offset
    cursor.need(nbytes, f'tensor {name}')
    if offset % align:
      raise ValueError(
        f'{path}: damaged: {name} starts at {offset}, not a multiple of {align}'
      )
    tensors[name] = Tensor(shape, kind, start + offset, nbytes)
    ends.append((start + offset, nbytes, name))
  ends.sort()
  for (at, nbytes, name), (following, _, other) in itertools.pairwise(ends):
    if at + nbytes > following:
      raise ValueError(f'{path}: damaged: {name} and {other} overlap')
  return tensors


def _storage(path, name: str, shape, kind: int):
  """(type, bytes) of a tensor; Python's integers cannot overflow."""
  try:
    kind = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
  except (ValueError, KeyError) as e:
    raise ValueError(
      f'{path}: {name} has storage type {kind}, unknown to gguf'
    ) from e
  count = 1
  for n in shape:
    count *= n
  if not count or shape[-1] % block:
    raise ValueError(
      f'{path}: damaged: {name} of shape {shape} is not made of blocks of '
      f'{block} ({kind.name})'
    )
  return kind, count // block * size
