"""Reads settings and weight names from a .gguf file, for each of ARCHS. Absent
fields mean what they do in llama.cpp. Q and K of llama go back to Hugging
Face's row order, so that every model here rotates halves."""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import gguf
import jax
import numpy as np

from specdec_jax.io import names
from specdec_jax.io.config_json.json_object import Json
from specdec_jax.io.gguf import container
from specdec_jax.models import attention, rope
from specdec_jax.models import config as model_config

# Fields that change nothing here, and others with the values under which they
# do not: 0, false and an empty text if no others are listed. Other values are
# refused where the architecture does not read the field.
_HARMLESS = set(
  'vocab_size tensor_data_layout rope.scaling.finetuned '
  'rope.scaling.original_context_length attention.layer_norm_epsilon '
  'decoder_start_token_id'.split()
)
_NEUTRAL: dict[str, tuple] = {'attention.causal': (True,)} | dict.fromkeys(
  'rope.scaling.attn_factor rope.scaling.yarn_attn_factor '
  'rope.scaling.yarn_ext_factor embedding_scale logit_scale '
  'residual_scale'.split(),
  (0, 1),
)
_WIDTHS = (
  'rope.dimension_count rope.dimension_count_swa attention.value_length '
  'attention.key_length_swa attention.value_length_swa'
).split()
# What absent fields mean: in all architectures, and in each.
_COMMON: dict[str, Any] = {
  'rope.freq_base': 10000.0,
  'rope.scaling.type': 'linear',
  'rope.scaling.yarn_beta_fast': 32.0,
  'rope.scaling.yarn_beta_slow': 1.0,
}
_OWN: dict[str, dict[str, Any]] = {
  'gemma2': {
    'attention.sliding_window': 4096,
    'attention.sliding_window_pattern': 2,
    'attn_logit_softcapping': 50.0,
    'final_logit_softcapping': 30.0,
  },
  'gemma3': {
    'attention.sliding_window_pattern': 6,
    'rope.freq_base_swa': 10000.0,
  },
}


def open_file(
  path: pathlib.Path, source: str
) -> tuple[model_config.LMConfig, names.Reader, container.File]:
  """Reads a file's settings; its weights only when asked for."""
  file = container.parse(path)
  arch = file.field('general.architecture', str)
  if arch not in ARCHS:
    raise ValueError(
      f'{path}: architecture {arch!r} is not supported; allowed are '
      f'{sorted(ARCHS)}'
    )
  naming = names.GGUF_LLAMA if arch == 'llama' else names.GGUF
  shapes = {name: t.shape for name, t in file.tensors.items()}
  matrices = {x: t.kind for x, t in file.tensors.items() if len(t.shape) > 1}
  coded = lambda kind: gguf.GGML_QUANT_SIZES[kind][0] > 1
  kinds = {name: x.name for name, x in matrices.items() if coded(x)}
  narrow = {x.name for x in matrices.values() if not coded(x)} == {'BF16'}
  reader = names.Reader(
    *(source, naming, shapes, file.read),
    kinds=kinds,
    blocks=file.blocks,
    narrow=narrow,
  )
  return _settings(file, arch), reader, file


def _settings(file: container.File, arch: str) -> model_config.LMConfig:
  """Reads the settings; refuses unread fields that would change the model."""
  start = f'{arch}.'
  own = {
    k.removeprefix(start): x.tolist() if isinstance(x, np.ndarray) else x
    for k, x in file.fields.items()
    if k.startswith(start)
  }
  s = Json(file.path, own, _COMMON | _OWN.get(arch, {}))
  common = _common(s, file)
  config = model_config.LMConfig(**common | ARCHS[arch](s, common))
  for key in _WIDTHS:
    found = s.integer(key, config.head_dim)
    if found != config.head_dim:
      raise ValueError(
        f'{file.path}: {key}={found} of {config.head_dim} channels; only '
        'rotation of all channels, and values as wide as keys, are supported'
      )
  rest = sorted(own.keys() - s.seen - _HARMLESS)
  s.check(**{key: _NEUTRAL.get(key, (0, '')) for key in rest})
  if 'rope_freqs.weight' not in file.tensors:
    return config
  return _divided(file, config)


def _common(s: Json, file: container.File) -> dict[str, Any]:
  for name in ('token_embd.weight', 'blk.0.attn_q.weight'):
    if name not in file.tensors or len(file.tensors[name].shape) != 2:
      raise ValueError(f'{s.path}: {name} is missing or not a matrix')
  width = s.integer('embedding_length')
  heads = s.integer('attention.head_count')
  depth, context = s.integer('block_count'), s.integer('context_length')
  if depth > len(file.tensors):
    raise ValueError(
      f'{s.path}: block_count={depth}, but the file has only '
      f'{len(file.tensors)} tensors'
    )
  scaling = _scaling(s, context)
  if isinstance(scaling, rope.Yarn):
    context = max(context, scaling.context)
  return dict(
    depth=depth,
    width=width,
    heads=heads,
    kv_heads=s.integer('attention.head_count_kv', heads),
    head_dim=s.integer('attention.key_length', max(1, width // heads)),
    mlp=s.integer('feed_forward_length'),
    vocab=file.tensors['token_embd.weight'].shape[0],
    context=context,
    rope_theta=s.number('rope.freq_base'),
    rope_scaling=scaling,
    norm_eps=s.number('attention.layer_norm_rms_epsilon'),
    tied='output.weight' not in file.tensors,
    qkv_bias='blk.0.attn_q.bias' in file.tensors,
    o_bias='blk.0.attn_output.bias' in file.tensors,
  )


def _scaling(s: Json, context: int) -> rope.Scaling | None:
  """Returns how frequencies are scaled; a factor without a type is linear."""
  kind = s.value('rope.scaling.type')
  if kind not in ('none', 'linear', 'yarn'):
    s.refuse(f'rope.scaling.type {kind!r}', "absent, 'none', 'linear', 'yarn'")
  # The second is the factor's older name; 0 stands for none.
  keys = ('rope.scaling.factor', 'rope.scale_linear')
  found = [key for key in keys if s.value(key)]
  factor = s.number(found[0]) if found else 1.0
  if kind == 'none' or (kind == 'linear' and factor == 1):
    return None
  if kind == 'linear':
    return rope.RopeScaling(factor, original_context=0)
  return rope.Yarn(
    factor=factor,
    original_context=s.integer('rope.scaling.original_context_length', context),
    beta_fast=s.number('rope.scaling.yarn_beta_fast'),
    beta_slow=s.number('rope.scaling.yarn_beta_slow'),
    magnitude=1 + 0.1 * math.log(max(factor, 1.0)),
  )


def _divided(file: container.File, config: model_config.LMConfig):
  """Adds the scaling that has the frequency divisors in the file: only that of
  Llama 3.1 and later (low 1, high 4, context 8192)."""
  divisors = np.asarray(file.read('rope_freqs.weight'), np.float64).reshape(-1)
  llama3 = rope.RopeScaling(factor=float(divisors.max()))
  scaled = dataclasses.replace(config, rope_scaling=llama3)
  with jax.transfer_guard('allow'):
    plain, slow = (
      np.asarray(attention.inverse_frequencies(c), np.float64)
      for c in (config, scaled)
    )
  good = config.rope_scaling is None and divisors.shape == plain.shape
  if not good or not np.allclose(divisors, plain / slow, rtol=1e-4):
    raise ValueError(
      f'{file.path}: rope_freqs.weight has other divisors than Llama 3.1 and '
      'later have, which are not supported'
    )
  return scaled


def _gemma(s: Json, common: dict[str, Any], big: int) -> dict[str, Any]:
  """Returns settings that Gemma 2 and 3 share. big: the depth of the 27B model,
  which scales queries by width / heads."""
  depth, width = common['depth'], common['width']
  scalar = width // common['heads'] if depth == big else common['head_dim']
  key = 'attention.sliding_window'
  window = 0 if s.value(key) is None else s.integer(key)
  period = s.integer(f'{key}_pattern')
  return model_config.gemma(width) | dict(
    norm_eps=common['norm_eps'],
    query_scale=scalar**-0.5,
    windows=tuple(window if (i + 1) % period else 0 for i in range(depth)),
    local_rope_theta=s.cap('rope.freq_base_swa'),
    logit_softcap=s.cap('final_logit_softcapping'),
  )


def _gemma2(s: Json, common: dict[str, Any]) -> dict[str, Any]:
  cap = s.cap('attn_logit_softcapping')  # of no other architecture
  return _gemma(s, common, big=46) | dict(attn_softcap=cap)


# Architecture -> function(fields, common settings) -> settings that it adds.
ARCHS: dict[str, Callable[[Json, dict[str, Any]], dict[str, Any]]] = {
  'llama': lambda *_: {},
  'qwen2': lambda *_: {},
  'qwen3': lambda *_: dict(qk_norm=True),
  'gemma2': _gemma2,
  'gemma3': lambda *x: _gemma(*x, big=62) | dict(qk_norm=True),
}
