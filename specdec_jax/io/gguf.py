"""Reads a .gguf file, architectures llama and qwen2: settings and weights.

Quantised tensors are dequantised. Q and K of arch llama are put back in Hugging
Face's row order, so that every model here rotates halves.
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.io import gguf_file, names
from specdec_jax.models import attention
from specdec_jax.models import config as model_config

ROWS = {'llama': names.GGUF_LLAMA, 'qwen2': names.GGUF_QWEN2}


class Model(NamedTuple):
  config: model_config.LMConfig
  reader: names.Reader
  file: gguf_file.File


def open_file(path: pathlib.Path, source: str) -> Model:
  """Settings and weights of a file; the weights are read when asked for.

  Raises:
    ValueError: damaged, or a model that models.lm does not have.
  """
  file = gguf_file.parse(path)
  config = read_config(file)
  shapes = {name: t.shape for name, t in file.tensors.items()}
  rows = ROWS[file.fields['general.architecture']]
  return Model(config, names.Reader(source, rows, shapes, file.read), file)


def label(file: gguf_file.File) -> str:
  """'SmolLM2-135M-Instruct (Q4_1, dequantised)': name and commonest type."""
  sizes: dict[str, int] = {}
  for t in file.tensors.values():
    sizes[t.kind.name] = sizes.get(t.kind.name, 0) + t.nbytes
  kind = max(sizes, key=lambda k: sizes[k])
  stem = file.path.stem
  stem = stem.removesuffix(f'.{kind}').removesuffix(f'-{kind}')
  exact = kind in ('F32', 'F16', 'BF16')
  return f'{stem} ({kind}{"" if exact else ", dequantised"})'


def read_config(file: gguf_file.File) -> model_config.LMConfig:
  """The fields' settings as an LMConfig.

  Raises:
    ValueError: a field that is missing, of the wrong type or unsupported.
  """
  arch = field(file, 'general.architecture', str)
  if arch not in ROWS:
    raise ValueError(
      f'{file.path}: architecture {arch!r} is not supported; allowed are '
      f'{sorted(ROWS)}'
    )
  number = lambda name, default=None: _positive(file, f'{arch}.{name}', default)
  count = lambda name, default=None: _whole(file, f'{arch}.{name}', default)
  scaling = field(file, f'{arch}.rope.scaling.type', str, 'none')
  if scaling != 'none':
    raise ValueError(
      f'{file.path}: rope.scaling.type {scaling!r} is not supported; allowed: '
      "absent, 'none'"
    )
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
  config = model_config.LMConfig(
    depth=count('block_count'),
    width=width,
    heads=heads,
    kv_heads=count('attention.head_count_kv', heads),
    head_dim=head_dim,
    mlp=count('feed_forward_length'),
    vocab=file.tensors['token_embd.weight'].shape[0],
    context=count('context_length'),
    rope_theta=number('rope.freq_base', 10000.0),
    norm_eps=number('attention.layer_norm_rms_epsilon'),
    tied='output.weight' not in file.tensors,
    qkv_bias='blk.0.attn_q.bias' in file.tensors,
  )
  if 'rope_freqs.weight' not in file.tensors:
    return config
  return _llama3_scaled(file, config)


def _llama3_scaled(file, config: model_config.LMConfig):
  """Recovers Llama 3's scaling from the divisors of its frequencies.

  The file holds the divisors only. They are accepted when they are those of
  Llama 3.1 and later (low 1, high 4, context 8192) for one factor.
  """
  divisors = np.asarray(file.read('rope_freqs.weight'), np.float64).reshape(-1)
  factor = float(divisors.max())
  scaled = dataclasses.replace(
    config, rope_scaling=model_config.RopeScaling(factor=factor)
  )
  with jax.transfer_guard('allow'):
    plain, slow = (
      np.asarray(attention.inverse_frequencies(c), np.float64)
      for c in (config, scaled)
    )
  if divisors.shape != plain.shape or not np.allclose(
    divisors, plain / slow, rtol=1e-4
  ):
    raise ValueError(
      f'{file.path}: rope_freqs.weight is not a Llama 3 scaling (low 1, '
      'high 4, context 8192); use the Hugging Face checkpoint'
    )
  return scaled


def field(
  file: gguf_file.File, name: str, kind: type | tuple, default: Any = None
) -> Any:
  """A field of the given Python type.

  Raises:
    ValueError: missing without a default, or of another type.
  """
  value = file.fields.get(name, default)
  if value is None:
    raise ValueError(f'{file.path}: field {name} is missing')
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    wanted = kind if isinstance(kind, tuple) else (kind,)
    raise ValueError(
      f'{file.path}: field {name} is {type(value).__name__}; '
      f'{" or ".join(k.__name__ for k in wanted)} is needed'
    )
  return value


def _whole(file, name: str, default: int | None) -> int:
  value = field(file, name, int, default)
  if not 0 < value < 1 << 40:
    raise ValueError(
      f'{file.path}: {name}={value}; a positive integer is needed'
    )
  return value


def _positive(file, name: str, default: float | None) -> float:
  value = float(field(file, name, (float, int), default))
  if not 0 < value < float('inf'):
    raise ValueError(
      f'{file.path}: {name}={value}; a positive number is needed'
    )
  return value
