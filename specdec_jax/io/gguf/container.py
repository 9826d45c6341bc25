"""Reads a .gguf file: its fields, and tensors dequantised or as stored.

See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for the layout.
Opens a file in a 24th of the time that the gguf package takes.
"""

import dataclasses
import math
import mmap
import pathlib
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gguf
import numpy as np

from specdec_jax.io import files

MAGIC = b'GGUF'
VERSIONS = (2, 3)

# Type id of a field -> letter, the same for struct and numpy.
_SCALARS = dict(enumerate('BbHhIif')) | {7: '?', 10: 'Q', 11: 'q', 12: 'd'}
_STRING, _ARRAY = 8, 9


class Tensor(NamedTuple):
  """A tensor on disk. shape: in numpy's order, the reverse of the file's. raw:
  its bytes, mapped."""

  shape: tuple[int, ...]
  kind: gguf.GGMLQuantizationType
  raw: np.ndarray


@dataclasses.dataclass(frozen=True)
class File:
  """An open file: fields, and tensors on disk. parts: the paths, if several
  files hold one model."""

  path: pathlib.Path
  fields: Mapping[str, Any]
  tensors: Mapping[str, Tensor]
  parts: Sequence[pathlib.Path] = ()

  def read(self, name: str) -> np.ndarray:
    """Dequantises one tensor: to float32, or float64 where stored so."""
    t = self.tensors[name]
    if t.kind == gguf.GGMLQuantizationType.F32:
      return t.raw.view(np.float32).reshape(t.shape)
    block, size = gguf.GGML_QUANT_SIZES[t.kind]
    rows = t.raw.reshape(*t.shape[:-1], t.shape[-1] // block * size)
    try:
      return gguf.dequantize(rows, t.kind).reshape(t.shape)
    except NotImplementedError as e:
      raise ValueError(
        f'{self.path}: {name} is stored as {t.kind.name}, which the gguf '
        'package cannot dequantise; use a Q8_0, Q4_K or F16 file'
      ) from e

  def blocks(self, name: str) -> np.ndarray:
    """Returns a matrix as stored: uint8 [rows, blocks, bytes per block]."""
    t = self.tensors[name]
    return t.raw.reshape(t.shape[0], -1, gguf.GGML_QUANT_SIZES[t.kind][1])

  def field(self, name: str, kind: type, default: Any = None) -> Any:
    value = self.fields.get(name, default)
    if value is None:
      raise ValueError(f'{self.path}: field {name} is missing')
    if not isinstance(value, kind) or (kind is int and type(value) is bool):
      raise ValueError(
        f'{self.path}: field {name} is {type(value).__name__}; '
        f'{kind.__name__} is needed'
      )
    return value

  def label(self) -> tuple[str, str]:
    """Returns (name, the type with most bytes): ('SmolLM2-135M-Instruct',
    'Q4_1'); ('SmolLM2-135M-Instruct (F16)', '') if not quantised."""
    sizes: dict[str, int] = {}
    for t in self.tensors.values():
      sizes[t.kind.name] = sizes.get(t.kind.name, 0) + t.raw.size
    kind = max(sizes, key=lambda k: sizes[k])
    stem = re.sub(r'-\d{5}-of-\d{5}$', '', self.path.stem)
    stem = stem.removesuffix(f'.{kind}').removesuffix(f'-{kind}')
    exact = kind in ('F32', 'F16', 'BF16')
    return (f'{stem} ({kind})', '') if exact else (stem, kind)


def parse(path: pathlib.Path) -> File:
  """Opens a file, or the first of several, with the tensors of all.

  gguf-split cuts a model into NAME-00001-of-00003.gguf and so on. As in
  llama.cpp (src/llama-model-loader.cpp), the first has the settings, and the
  names of the others follow from its own.
  """
  file = _parse(path)
  count = file.field('split.count', int, 1)
  if not 1 < count < 1 << 16:
    return file
  each = [f'-{i + 1:05d}-of-{count:05d}.gguf' for i in range(count)]
  stem = re.sub(r'-\d{5}-of-\d{5}$', '', path.stem)
  paths = [path.with_name(stem + end) for end in each]
  missing = [x.name for x in paths if not x.exists()]
  if missing or path != paths[0]:
    raise ValueError(
      f'{path}: is one of {count} parts: give the first, {paths[0].name}, with '
      f'all others beside it; missing are {missing}'
    )
  tensors: dict[str, Tensor] = {}
  for i, part in enumerate([file, *map(_parse, paths[1:])]):
    found = part.fields.get('split.no'), part.fields.get('split.count')
    twice = sorted(tensors.keys() & part.tensors.keys())
    if found != (i, count) or twice:
      raise ValueError(
        f'{part.path}: is not part {i + 1} of {count} of {paths[0].name}: it '
        f'says {found} and has {twice} again'
      )
    tensors |= part.tensors
  return dataclasses.replace(file, tensors=tensors, parts=paths)


def _parse(path: pathlib.Path) -> File:
  """Opens and checks a file; tensors stay on disk until read. Checks every
  count and size against the bytes there before it allocates anything: a cut or
  damaged file is one ValueError."""
  if files.head(path)[:4] != MAGIC:
    raise ValueError(f'{path}: not a GGUF file')
  with open(path, 'rb') as f:
    data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
  cursor = _Cursor(path, data)
  version = cursor.scalar('I')
  if version not in VERSIONS:
    raise ValueError(
      f'{path}: GGUF version {version}; allowed are little-endian 2 and 3'
    )
  n_tensors, n_fields = cursor.scalar('Q'), cursor.scalar('Q')
  # A tensor's entry takes at least 32 bytes, a field's 13.
  cursor.need(n_tensors * 32 + n_fields * 13, 'its tensor and field tables')
  fields: dict[str, Any] = {}
  for _ in range(n_fields):
    name = cursor.string('the name of a field')
    fields[name] = cursor.value(cursor.scalar('I'), f'field {name}')
  return File(path, fields, _tensors(cursor, n_tensors, fields))


class _Cursor:
  """Reads forward through the header, never past the file's end."""

  def __init__(self, path: pathlib.Path, data: mmap.mmap):
    self.path, self.data, self.at = path, data, len(MAGIC)

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

  def value(self, kind: int, what: str):
    if kind == _STRING:
      return self.string(what)
    if kind in _SCALARS:
      return self.scalar(_SCALARS[kind])
    if kind != _ARRAY:
      raise ValueError(f'{self.path}: damaged: {what} has type {kind}')
    kind, count = self.scalar('I'), self.scalar('Q')
    if kind == _STRING:
      self.need(count * 8, what)
      return [self.string(what) for _ in range(count)]
    if kind not in _SCALARS:
      raise ValueError(f'{self.path}: damaged: {what} is an array of {kind}')
    dtype = np.dtype('<' + _SCALARS[kind])
    return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)


def _tensors(cursor: _Cursor, count: int, fields) -> dict[str, Tensor]:
  """Reads the tensor table, with offsets from the file's start."""
  path, entries = cursor.path, {}
  for _ in range(count):
    name = cursor.string('the name of a tensor')
    ndim = cursor.scalar('I')
    cursor.need(ndim * 8, f'the shape of {name}')
    shape = tuple(cursor.scalar('Q') for _ in range(ndim))[::-1]
    if name in entries:
      raise ValueError(f'{path}: damaged: two tensors are called {name}')
    entries[name] = shape, cursor.scalar('I'), cursor.scalar('Q')
  align = fields.get('general.alignment', 32)
  if type(align) is not int or align < 1 or align & (align - 1):
    raise ValueError(
      f'{path}: general.alignment={align}; a power of two is needed'
    )
  start = -(-cursor.at // align) * align
  tensors = {}
  for name, (shape, kind, offset) in entries.items():
    try:
      kind = gguf.GGMLQuantizationType(kind)
      block, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as e:
      raise ValueError(
        f'{path}: {name} has storage type {kind}, unknown to gguf'
      ) from e
    count = math.prod(shape)  # Python's integers cannot overflow
    if not shape or not count or shape[-1] % block or offset % align:
      raise ValueError(
        f'{path}: damaged: {name} of shape {shape} at {offset} is not made of '
        f'blocks of {block} ({kind.name}), or not aligned to {align}'
      )
    cursor.at, nbytes = start + offset, count // block * size
    cursor.need(nbytes, f'tensor {name}')
    raw = np.frombuffer(cursor.data, np.uint8, nbytes, cursor.at)
    tensors[name] = Tensor(shape, kind, raw)
  return tensors
