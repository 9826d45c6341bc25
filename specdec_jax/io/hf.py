"""Reads a local Hugging Face folder: config.json and safetensors.

Knows the files of transformers 4 and 5, of models whose shape models.lm has.
Runs no code of the folder, and reads nothing outside it.
"""

import math
import pathlib
from typing import Any, NamedTuple

import numpy as np
import safetensors

from specdec_jax.io import files, names
from specdec_jax.models import config as model_config

# model_type -> what the family fixes. attention_bias: what an absent key means.
FAMILIES: dict[str, dict[str, bool]] = {
  'llama': dict(attention_bias=False, qk_norm=False),
  'qwen2': dict(attention_bias=True, qk_norm=False),
  'qwen3': dict(attention_bias=False, qk_norm=True),
}

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
_MOST = 1 << 40


class Folder(NamedTuple):
  config: model_config.LMConfig
  reader: names.Reader
  weights: tuple[pathlib.Path, ...]


def open_folder(folder: pathlib.Path, source: str) -> Folder:
  """Settings and weights of a folder; the weights are read when asked for.

  Raises:
    ValueError: something is missing, unsupported or damaged.
  """
  config = read_config(folder / 'config.json')
  paths = _weight_files(folder)
  return Folder(config, _reader(paths, source), tuple(paths))


def read_config(path: pathlib.Path) -> model_config.LMConfig:
  """config.json -> LMConfig.

  Raises:
    ValueError: a model or setting that models.lm does not have.
  """
  raw = files.read_json(path)
  kind = raw.get('model_type')
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise ValueError(
      f'{path}: model_type {kind!r} is not supported; allowed are '
      f'{sorted(FAMILIES)}'
    )
  family = FAMILIES[kind]
  _refuse(path, raw)
  _refuse_windows(path, raw)
  theta, scaling = _rope(path, raw)
  heads = _integer(path, raw, 'num_attention_heads')
  width = _integer(path, raw, 'hidden_size')
  bias = raw.get('attention_bias')
  # Qwen2 always has the biases; no key of its config says so.
  bias = family['attention_bias'] if bias is None else bool(bias)
  return model_config.LMConfig(
    depth=_integer(path, raw, 'num_hidden_layers'),
    width=width,
    heads=heads,
    kv_heads=_integer(path, raw, 'num_key_value_heads', heads),
    head_dim=_integer(path, raw, 'head_dim', max(1, width // heads)),
    mlp=_integer(path, raw, 'intermediate_size'),
    vocab=_integer(path, raw, 'vocab_size'),
    context=_integer(path, raw, 'max_position_embeddings'),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=_number(path, raw, 'rms_norm_eps', 1e-6),
    tied=bool(raw.get('tie_word_embeddings', False)),
    qkv_bias=bias,
    qk_norm=family['qk_norm'],
  )


def _refuse(path, raw: dict[str, Any]) -> None:
  """Settings that would change the numbers and that models.lm lacks."""
  allowed = {
    'hidden_act': ('silu', None),
    'use_sliding_window': (False, None),
    'mlp_bias': (False, None),
    'partial_rotary_factor': (1, None),
    'quantization_config': (None,),
  }
  for key, values in allowed.items():
    if not any(raw.get(key) == v for v in values):
      raise ValueError(
        f'{path}: {key}={raw[key]!r} is not supported; allowed: '
        f'{", ".join("absent" if v is None else repr(v) for v in values)}'
      )


def _refuse_windows(path, raw: dict[str, Any]) -> None:
  kinds = raw.get('layer_types') or []
  if any(kind != 'full_attention' for kind in kinds):
    raise ValueError(
      f"{path}: layer_types {sorted(set(kinds))}; allowed is 'full_attention'"
    )


def _rope(path, raw) -> tuple[float, model_config.RopeScaling | None]:
  """rope_theta and scaling, where transformers 4 or 5 keep them."""
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  if not isinstance(rope, dict):
    raise ValueError(f'{path}: rope settings are {rope!r}; an object is needed')
  theta = _number(path, raw | rope, 'rope_theta', 10000.0)
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind in ('default', 'none', None):
    extra = [k for k, v in rope.items() if isinstance(v, dict)]
    if extra:
      raise ValueError(
        f'{path}: rope settings per layer type ({", ".join(extra)}) are not '
        'supported; one set for all layers is'
      )
    return theta, None
  if kind != 'llama3':
    raise ValueError(
      f"{path}: rope_type {kind!r} is not supported; allowed are 'default', "
      "'llama3'"
    )
  return theta, model_config.RopeScaling(
    factor=_number(path, rope, 'factor'),
    low_freq_factor=_number(path, rope, 'low_freq_factor'),
    high_freq_factor=_number(path, rope, 'high_freq_factor'),
    original_context=_integer(path, rope, 'original_max_position_embeddings'),
  )


def _integer(path, raw, key: str, default: int | None = None) -> int:
  value = raw.get(key)
  value = default if value is None else value
  # JSON's true is 1 to Python; nobody means a model of one layer by it.
  if type(value) is bool or not isinstance(value, int) or not 0 < value < _MOST:
    raise ValueError(f'{path}: {key}={value!r}; a positive integer is needed')
  return value


def _number(path, raw, key: str, default: float | None = None) -> float:
  value = raw.get(key)
  value = default if value is None else value
  if not isinstance(value, (int, float)) or not 0 < value < math.inf:
    raise ValueError(f'{path}: {key}={value!r}; a positive number is needed')
  return float(value)


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  index = folder / INDEX
  if not index.exists():
    return [folder / SINGLE]
  shards = files.read_json(index).get('weight_map')
  if not isinstance(shards, dict) or not shards:
    raise ValueError(f'{index}: weight_map is missing or empty')
  chosen = set(map(str, shards.values()))
  for name in chosen:
    # A plain name: an index from elsewhere must not point out of its folder.
    if not name.endswith('.safetensors') or any(c in name for c in '/\\\0'):
      raise ValueError(
        f'{index}: weight_map names {name!r}; allowed are *.safetensors files '
        'of the same folder'
      )
  return [folder / name for name in sorted(chosen)]


def _reader(paths: list[pathlib.Path], source: str) -> names.Reader:
  """All tensors of the files; each opened when read, memory-mapped."""
  shapes: dict[str, tuple[int, ...]] = {}
  where: dict[str, pathlib.Path] = {}
  for path in paths:
    with _open(path) as f:
      for name in f.keys():
        part = f.get_slice(name)
        if part.get_dtype() not in ('F32', 'F16', 'BF16', 'F64'):
          raise ValueError(
            f'{path}: {name} is {part.get_dtype()}; allowed are F32, F16, '
            'BF16, F64 (dequantise the checkpoint first)'
          )
        if name in where:
          raise ValueError(f'{path}: {name} is also in {where[name].name}')
        shapes[name] = tuple(part.get_shape())
        where[name] = path

  def get(name: str) -> np.ndarray:
    with _open(where[name]) as f:
      return f.get_tensor(name)

  return names.Reader(source, names.HF, shapes, get)


def _open(path: pathlib.Path):
  try:
    return safetensors.safe_open(path, 'numpy')
  except FileNotFoundError as e:
    raise ValueError(
      f'{path}: no such file; weights are read from {SINGLE}, or from the '
      f'files that {INDEX} lists'
    ) from e
  except (OSError, safetensors.SafetensorError) as e:
    with open(path, 'rb') as f:
      start = f.read(32)
    what = str(e)
    if start.startswith(b'version https://git-lfs'):
      what = 'a Git LFS pointer; fetch the weights with `git lfs pull`'
    raise ValueError(f'{path}: not a whole safetensors file: {what}') from e
