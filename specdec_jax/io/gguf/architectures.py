"""Settings and names of weights of a .gguf file of one of ARCHS.

Absent fields mean what they mean to llama.cpp. Q and K of arch llama are put
back in Hugging Face's row order, so that every model here rotates halves.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import gguf
import jax
import numpy as np

from specdec_jax.io import names
from specdec_jax.io.gguf import parts
from specdec_jax.io.gguf.container import File
from specdec_jax.models import attention, rope
from specdec_jax.models import config as model_config

# Fields that change nothing here, and others with the values under which they
# do not: 0, false and an empty text if no others are listed. Other values are
# refused where the architecture does not read the field.
_HARMLESS = (
  'vocab_size', 'tensor_data_layout', 'rope.scaling.finetuned',
  'rope.scaling.original_context_length', 'attention.layer_norm_epsilon',
  'decoder_start_token_id',
)  # fmt: skip
_NEUTRAL: dict[str, tuple] = {
  'attention.causal': (True,),
  **dict.fromkeys(
    (
      'rope.scaling.attn_factor', 'rope.scaling.yarn_attn_factor',
      'rope.scaling.yarn_ext_factor', 'embedding_scale', 'logit_scale',
      'residual_scale',
    ),
    (0, 1),
  ),
}  # fmt: skip
_WIDTHS = (
  'rope.dimension_count', 'rope.dimension_count_swa', 'attention.value_length',
  'attention.key_length_swa', 'attention.value_length_swa',
)  # fmt: skip


def open_file(
  path: pathlib.Path, source: str
) -> tuple[model_config.LMConfig, names.Reader, File]:
  """Settings and weights of a file; the weights are read when asked for."""
  file = parts.parse(path)
  config = read(file)
  llama = file.fields['general.architecture'] == 'llama'
  naming = names.GGUF_LLAMA if llama else names.GGUF
  shapes = {name: t.shape for name, t in file.tensors.items()}
  reader = names.Reader(source, naming, shapes, file.read)
  kinds = {
    name: t.kind.name
    for name, t in file.tensors.items()
    if len(t.shape) == 2 and gguf.GGML_QUANT_SIZES[t.kind][0] > 1
  }
  return config, reader._replace(kinds=kinds, blocks=file.blocks), file


def read(file: File) -> model_config.LMConfig:
  """The fields' settings as an LMConfig."""
  arch = file.field('general.architecture', str)
  if arch not in ARCHS:
    raise ValueError(
      f'{file.path}: architecture {arch!r} is not supported; allowed are '
      f'{sorted(ARCHS)}'
    )
  common = _common(file, arch)
  config = model_config.LMConfig(**common | ARCHS[arch](file, common))
  _check_widths(file, arch, config.head_dim)
  _check_rest(file, arch)
  if 'rope_freqs.weight' not in file.tensors:
    return config
  return _divided(file, config)


def _common(file: File, arch: str) -> dict[str, Any]:
  """Settings that all architectures share."""
  count = lambda key, default=None: file.number(f'{arch}.{key}', int, default)
  number = lambda key, d=None: file.number(f'{arch}.{key}', float, d)
  for name in ('token_embd.weight', 'blk.0.attn_q.weight'):
    if name not in file.tensors or len(file.tensors[name].shape) != 2:
      raise ValueError(f'{file.path}: {name} is missing or not a matrix')
  heads, width = count('attention.head_count'), count('embedding_length')
  depth, context = count('block_count'), count('context_length')
  if depth > len(file.tensors):
    raise ValueError(
      f'{file.path}: {arch}.block_count={depth}, but the file has only '
      f'{len(file.tensors)} tensors'
    )
  scaling = _scaling(file, arch, context)
  if isinstance(scaling, rope.Yarn):
    # Texts may be `factor` times as long as those of training.
    longest = int(scaling.factor * scaling.original_context)
    context = max(context, longest)
  return dict(
    depth=depth,
    width=width,
    heads=heads,
    kv_heads=count('attention.head_count_kv', heads),
    head_dim=count('attention.key_length', max(1, width // heads)),
    mlp=count('feed_forward_length'),
    vocab=file.tensors['token_embd.weight'].shape[0],
    context=context,
    rope_theta=number('rope.freq_base', 10000.0),
    rope_scaling=scaling,
    norm_eps=number('attention.layer_norm_rms_epsilon'),
    tied='output.weight' not in file.tensors,
    qkv_bias='blk.0.attn_q.bias' in file.tensors,
    o_bias='blk.0.attn_output.bias' in file.tensors,
  )


def _scaling(file: File, arch: str, context: int) -> rope.Scaling | None:
  """The scaling of frequencies; a factor without a type is linear."""
  start = f'{arch}.rope.scaling.'
  kind = file.field(start + 'type', str, 'linear')
  if kind not in ('none', 'linear', 'yarn'):
    raise ValueError(
      f'{file.path}: rope.scaling.type {kind!r} is not supported; allowed: '
      "absent, 'none', 'linear', 'yarn'"
    )
  # The factor's older name; 0 stands for none.
  factors = start + 'factor', f'{arch}.rope.scale_linear'
  file.seen.update(factors)
  found = [name for name in factors if file.fields.get(name)]
  factor = file.number(found[0], float) if found else 1.0
  if kind == 'none' or (kind == 'linear' and factor == 1):
    return None
  if kind == 'linear':
    return rope.RopeScaling(factor, original_context=0)
  number = lambda key, default: file.number(start + key, float, default)
  return rope.Yarn(
    factor=factor,
    original_context=file.number(
      start + 'original_context_length', int, context
    ),
    beta_fast=number('yarn_beta_fast', 32.0),
    beta_slow=number('yarn_beta_slow', 1.0),
    magnitude=1 + 0.1 * math.log(max(factor, 1.0)),
  )


def _check_widths(file: File, arch: str, head_dim: int) -> None:
  """Keys, values and rotated channels must be as many."""
  for key in _WIDTHS:
    found = file.number(f'{arch}.{key}', int, head_dim)
    if found != head_dim:
      raise ValueError(
        f'{file.path}: {key}={found} of {head_dim} channels; only rotation of '
        'all channels, and values as wide as keys, are supported'
      )


def _check_rest(file: File, arch: str) -> None:
  """Refuses fields that would change the model and were not asked for."""
  for name, value in file.fields.items():
    key = name.removeprefix(f'{arch}.')
    if key == name or name in file.seen or key in _HARMLESS:
      continue
    allowed = _NEUTRAL[key] if key in _NEUTRAL else (0, '')
    if isinstance(value, np.ndarray | list) or value not in allowed:
      words = ', '.join(['absent', *map(repr, allowed)])
      raise ValueError(
        f'{file.path}: field {name}={value} is not supported; allowed: {words}'
      )


def _divided(file: File, config: model_config.LMConfig):
  """The settings with the divisors of the frequencies that the file holds.

  Those of Llama 3.1 and later (low 1, high 4, context 8192) for one factor
  become that scaling.
  """
  divisors = np.asarray(file.read('rope_freqs.weight'), np.float64).reshape(-1)
  good = divisors.shape == (config.head_dim // 2,) and divisors.min() > 0
  if not good or config.rope_scaling is not None:
    raise ValueError(
      f'{file.path}: rope_freqs.weight has {len(divisors)} divisors; allowed '
      f'are {config.head_dim // 2} above 0, without a rope.scaling.factor'
    )
  llama3 = rope.RopeScaling(factor=float(divisors.max()))
  scaled = dataclasses.replace(config, rope_scaling=llama3)
  with jax.transfer_guard('allow'):
    plain, slow = (
      np.asarray(attention.inverse_frequencies(c), np.float64)
      for c in (config, scaled)
    )
  if np.allclose(divisors, plain / slow, rtol=1e-4):
    return scaled
  every = rope.Divided(tuple(divisors.tolist()))
  return dataclasses.replace(config, rope_scaling=every)


def _gemma2(file: File, common: dict[str, Any]) -> dict[str, Any]:
  return _gemma(file, common, 'gemma2', window=4096, period=2, big=46) | dict(
    local_rope_theta=_optional(file, 'gemma2.rope.freq_base_swa', None),
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
  scalar = width // common['heads'] if depth == big else common['head_dim']
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
  'qwen3': lambda *_: dict(qk_norm=True),
  'gemma2': _gemma2,
  'gemma3': _gemma3,
}
