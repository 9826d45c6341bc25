"""Reads a .gguf file of one of ARCHS: settings and weights.

Quantised tensors are dequantised. Q and K of arch llama are put back in Hugging
Face's row order, so that every model here rotates halves.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.io import gguf_file, names
from specdec_jax.models import attention
from specdec_jax.models import config as model_config


class Arch(NamedTuple):
  """more(file, common settings) -> those that this architecture adds."""

  rows: tuple[names.Row, ...]
  more: Callable[[gguf_file.File, dict[str, Any]], dict[str, Any]]


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
  rows = ARCHS[file.fields['general.architecture']].rows
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
  if arch not in ARCHS:
    raise ValueError(
      f'{file.path}: architecture {arch!r} is not supported; allowed are '
      f'{sorted(ARCHS)}'
    )
  number = lambda name, default=None: _positive(file, f'{arch}.{name}', default)
  count = lambda name, default=None: _whole(file, f'{arch}.{name}', default)
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
  config = model_config.LMConfig(**(common | ARCHS[arch].more(file, common)))
  if 'rope_freqs.weight' not in file.tensors:
    return config
  return _llama3_scaled(file, config)


def _linear(file, arch: str) -> model_config.RopeScaling | None:
  kind = field(file, f'{arch}.rope.scaling.type', str, 'none')
  if kind == 'none':
    return None
  if kind != 'linear':
    raise ValueError(
      f'{file.path}: rope.scaling.type {kind!r} is not supported; allowed: '
      "absent, 'none', 'linear'"
    )
  factor = _positive(file, f'{arch}.rope.scaling.factor', None)
  return model_config.RopeScaling(factor, original_context=0)


def _gemma2(file, common: dict[str, Any]) -> dict[str, Any]:
  return _gemma(
    file, common, 'gemma2', window=4096, period=2, big=46, caps=(50.0, 30.0)
  )


def _gemma3(file, common: dict[str, Any]) -> dict[str, Any]:
  return _gemma(
    file, common, 'gemma3', window=0, period=6, big=62, caps=(None, None)
  ) | dict(
    local_rope_theta=_positive(file, 'gemma3.rope.freq_base_swa', 10000.0),
    qk_norm=True,
  )


def _gemma(
  file, common, arch: str, *, window: int, period: int, big: int, caps: tuple
):
  """What Gemma 2 and 3 share; what no field says is as llama.cpp has it.

  window, caps (of attention, of logits): those of absent fields. period: of
  layers without a window. big: the depth of the 27B model, whose queries are
  scaled by width / heads.
  """
  named = lambda key: f'{arch}.{key}'
  cap = lambda name, absent: (
    _positive(file, name, None) if name in file.fields else absent
  )
  depth, width = common['depth'], common['width']
  scalar = width / common['heads'] if depth == big else common['head_dim']
  if named('attention.sliding_window') in file.fields:
    window = _whole(file, named('attention.sliding_window'), None)
  period = _whole(file, named('attention.sliding_window_pattern'), period)
  return dict(
    embed_scale=width**0.5,
    windows=tuple(window if (i + 1) % period else 0 for i in range(depth)),
    query_scale=scalar**-0.5,
    act='gelu_tanh',
    post_norm=True,
    wide_norm=True,
    attn_softcap=cap(named('attn_logit_softcapping'), caps[0]),
    logit_softcap=cap(named('final_logit_softcapping'), caps[1]),
  )


def _as_it_is(file, common: dict[str, Any]) -> dict[str, Any]:
  return {}


ARCHS = {
  'llama': Arch(names.GGUF_LLAMA, _as_it_is),
  'qwen2': Arch(names.GGUF_QWEN2, _as_it_is),
  'gemma2': Arch(names.GGUF_GEMMA, _gemma2),
  'gemma3': Arch(names.GGUF_GEMMA, _gemma3),
}


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
