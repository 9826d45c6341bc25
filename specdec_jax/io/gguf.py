"""Reads a .gguf file of one of ARCHS: the container, settings and weights.

Quantised tensors are dequantised. Q and K of arch llama are put back in Hugging
Face's row order, so that every model here rotates halves. Layout of the file:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. This parser opens a
file in a 24th of the time of the gguf package's own.
"""

import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gguf
import jax
import numpy as np

from specdec_jax.io import names
from specdec_jax.models import attention
from specdec_jax.models import config as model_config

MAGIC = b'GGUF'
VERSIONS = (2, 3)

# Type id of a field -> letter, the same for struct and numpy.
_SCALARS = dict(enumerate('BbHhIif')) | {7: '?', 10: 'Q', 11: 'q', 12: 'd'}
_STRING, _ARRAY = 8, 9


class Tensor(NamedTuple):
  """Where a tensor lies: shape in numpy's order, the reverse of the file's."""

  shape: tuple[int, ...]
  kind: gguf.GGMLQuantizationType
  offset: int
  nbytes: int


@dataclasses.dataclass(frozen=True)
class File:
  """An open file: its fields, and its tensors on disk."""

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

  def field(self, name: str, kind: type, default: Any = None) -> Any:
    """A field of the given Python type; a float may be stored as an integer.

    Raises:
      ValueError: missing without a default, or of another type.
    """
    value = self.fields.get(name, default)
    if value is None:
      raise ValueError(f'{self.path}: field {name} is missing')
    if kind is float and type(value) is int:
      value = float(value)
    if not isinstance(value, kind) or (kind is int and type(value) is bool):
      raise ValueError(
        f'{self.path}: field {name} is {type(value).__name__}; '
        f'{kind.__name__} is needed'
      )
    return value

  def number(self, name: str, kind: type, default: Any = None) -> Any:
    """A field that is a positive int or float.

    Raises:
      ValueError: what `field` refuses, or a number that is not positive.
    """
    value = self.field(name, kind, default)
    # No size is near 2^40: a damaged one must not be allocated.
    if not 0 < value < (1 << 40 if kind is int else math.inf):
      raise ValueError(
        f'{self.path}: {name}={value}; a positive number is needed'
      )
    return value

  def label(self) -> str:
    """'SmolLM2-135M-Instruct (Q4_1, dequantised)': name and commonest type."""
    sizes: dict[str, int] = {}
    for t in self.tensors.values():
      sizes[t.kind.name] = sizes.get(t.kind.name, 0) + t.nbytes
    kind = max(sizes, key=lambda k: sizes[k])
    stem = self.path.stem.removesuffix(f'.{kind}').removesuffix(f'-{kind}')
    exact = kind in ('F32', 'F16', 'BF16')
    return f'{stem} ({kind}{"" if exact else ", dequantised"})'


# --- the container -----------------------------------------------------------


def parse(path: pathlib.Path) -> File:
  """Opens and checks a file; tensors stay on disk until read.

  Every count and size is checked against the bytes that are there before
  anything is allocated, so a cut or damaged file is one ValueError.

  Raises:
    ValueError: not a GGUF file of version 2 or 3, cut, or damaged.
  """
  try:
    with open(path, 'rb') as f:
      head = f.read(32)
      if head[:4] != MAGIC:
        lfs = head.startswith(b'version https://git-lfs')
        raise ValueError(
          f'{path}: not a GGUF file'
          + ('; fetch the weights with `git lfs pull`' if lfs else '')
        )
      data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
  except OSError as e:
    raise ValueError(f'{path}: cannot be read: {e.strerror or e}') from e
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
  return File(path, fields, _tensors(cursor, n_tensors, fields), data)


class _Cursor:
  """Reads forward through the header, never past the end of the file."""

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
  """The tensor table, with offsets from the start of the file."""
  path, entries = cursor.path, {}
  for _ in range(count):
    name = cursor.string('the name of a tensor')
    ndim = cursor.scalar('I')
    cursor.need(ndim * 8, f'the shape of {name}')
    shape = tuple(cursor.scalar('Q') for _ in range(ndim))[::-1]
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
    tensors[name] = Tensor(shape, kind, start + offset, nbytes)
  return tensors


# --- settings and weights ----------------------------------------------------


def open_file(
  path: pathlib.Path, source: str
) -> tuple[model_config.LMConfig, names.Reader, File]:
  """Settings and weights of a file; the weights are read when asked for.

  Raises:
    ValueError: damaged, or a model that models.lm does not have.
  """
  file = parse(path)
  config = read_config(file)
  llama = file.fields['general.architecture'] == 'llama'
  naming = names.GGUF_LLAMA if llama else names.GGUF
  shapes = {name: t.shape for name, t in file.tensors.items()}
  return config, names.Reader(source, naming, shapes, file.read), file


def read_config(file: File) -> model_config.LMConfig:
  """The fields' settings as an LMConfig.

  Raises:
    ValueError: a field that is missing, of the wrong type or unsupported.
  """
  arch = file.field('general.architecture', str)
  if arch not in ARCHS:
    raise ValueError(
      f'{file.path}: architecture {arch!r} is not supported; allowed are '
      f'{sorted(ARCHS)}'
    )
  count = lambda key, default=None: file.number(f'{arch}.{key}', int, default)
  number = lambda key, d=None: file.number(f'{arch}.{key}', float, d)
  for name in ('token_embd.weight', 'blk.0.attn_q.weight'):
    if name not in file.tensors or len(file.tensors[name].shape) != 2:
      raise ValueError(f'{file.path}: {name} is missing or not a matrix')
  heads, width = count('attention.head_count'), count('embedding_length')
  head_dim = count('attention.key_length', max(1, width // heads))
  rotated = count('rope.dimension_count', head_dim)
  if rotated != head_dim:
    raise ValueError(
      f'{file.path}: rope.dimension_count={rotated} of {head_dim} channels; '
      'only rotation of all channels is supported'
    )
  depth = count('block_count')
  if depth > len(file.tensors):
    raise ValueError(
      f'{file.path}: {arch}.block_count={depth}, but the file has only '
      f'{len(file.tensors)} tensors'
    )
  common: dict[str, Any] = dict(
    depth=depth,
    width=width,
    heads=heads,
    kv_heads=count('attention.head_count_kv', heads),
    head_dim=head_dim,
    mlp=count('feed_forward_length'),
    vocab=file.tensors['token_embd.weight'].shape[0],
    context=count('context_length'),
    rope_theta=number('rope.freq_base', 10000.0),
    rope_scaling=_linear(file, arch),
    norm_eps=number('attention.layer_norm_rms_epsilon'),
    tied='output.weight' not in file.tensors,
    qkv_bias='blk.0.attn_q.bias' in file.tensors,
  )
  more = ARCHS[arch](file, common)
  config = model_config.LMConfig(**(common | more))
  if 'rope_freqs.weight' not in file.tensors:
    return config
  return _llama3_scaled(file, config)


def _linear(file: File, arch: str) -> model_config.RopeScaling | None:
  kind = file.field(f'{arch}.rope.scaling.type', str, 'none')
  if kind == 'none':
    return None
  if kind != 'linear':
    raise ValueError(
      f'{file.path}: rope.scaling.type {kind!r} is not supported; allowed: '
      "absent, 'none', 'linear'"
    )
  factor = file.number(f'{arch}.rope.scaling.factor', float)
  return model_config.RopeScaling(factor, original_context=0)


def _llama3_scaled(file: File, config: model_config.LMConfig):
  """Recovers Llama 3's scaling from the divisors of its frequencies.

  The file holds the divisors only. They are accepted when they are those of
  Llama 3.1 and later (low 1, high 4, context 8192) for one factor.
  """
  divisors = np.asarray(file.read('rope_freqs.weight'), np.float64).reshape(-1)
  scaling = model_config.RopeScaling(factor=float(divisors.max()))
  scaled = dataclasses.replace(config, rope_scaling=scaling)
  with jax.transfer_guard('allow'):
    plain, slow = (
      np.asarray(attention.inverse_frequencies(c), np.float64)
      for c in (config, scaled)
    )
  same = divisors.shape == plain.shape
  if not same or not np.allclose(divisors, plain / slow, rtol=1e-4):
    raise ValueError(
      f'{file.path}: rope_freqs.weight is not a Llama 3 scaling (low 1, '
      'high 4, context 8192); use the Hugging Face checkpoint'
    )
  return scaled


def _gemma2(file: File, common: dict[str, Any]) -> dict[str, Any]:
  return _gemma(file, common, 'gemma2', window=4096, period=2, big=46) | dict(
    attn_softcap=_optional(file, 'gemma2.attn_logit_softcapping', 50.0),
    logit_softcap=_optional(file, 'gemma2.final_logit_softcapping', 30.0),
  )


def _gemma3(file: File, common: dict[str, Any]) -> dict[str, Any]:
  return _gemma(file, common, 'gemma3', window=0, period=6, big=62) | dict(
    attn_softcap=_optional(file, 'gemma3.attn_logit_softcapping', None),
    logit_softcap=_optional(file, 'gemma3.final_logit_softcapping', None),
    local_rope_theta=_optional(file, 'gemma3.rope.freq_base_swa', 10000.0),
    qk_norm=True,
  )


def _optional(file: File, name: str, absent: float | None) -> float | None:
  return file.number(name, float) if name in file.fields else absent


def _gemma(file: File, common, arch: str, *, window, period, big: int):
  """Settings that Gemma 2 and 3 share; absent fields are as in llama.cpp.

  window: of local layers, if no field has it. period: every period-th layer is
  global. big: the depth of the 27B model, whose queries are scaled by
  width / heads.
  """
  depth, width = common['depth'], common['width']
  scalar = width / common['heads'] if depth == big else common['head_dim']
  key = f'{arch}.attention.sliding_window'
  window = file.number(key, int) if key in file.fields else window
  period = file.number(f'{key}_pattern', int, period)
  return model_config.gemma(width) | dict(
    norm_eps=common['norm_eps'],
    query_scale=scalar**-0.5,
    windows=tuple(window if (i + 1) % period else 0 for i in range(depth)),
  )


# Architecture -> function(file, common settings) -> settings that it adds.
ARCHS: dict[str, Callable[[File, dict[str, Any]], dict[str, Any]]] = {
  'llama': lambda *_: {},
  'qwen2': lambda *_: {},
  'gemma2': _gemma2,
  'gemma3': _gemma3,
}
