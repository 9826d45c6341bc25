"""Reads config.json of a Hugging Face folder into an LMConfig.

There is one function for each family of models. Keys are those of transformers
4 and 5. A setting that models.lm does not support is refused.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from specdec_jax.io import files, names
from specdec_jax.models import config as model_config

_MOST = 1 << 40
_LOCAL, _GLOBAL = 'sliding_attention', 'full_attention'


class Settings(NamedTuple):
  """Checked access to config.json; null counts as an absent key.

  path: of the file, for error messages.
  raw: its content.
  """

  path: pathlib.Path
  raw: dict[str, Any]

  def value(self, key: str, default: Any = None) -> Any:
    found = self.raw.get(key)
    return default if found is None else found

  def integer(self, key: str, default: int | None = None) -> int:
    value = self.value(key, default)
    # JSON's true would pass as 1.
    whole = isinstance(value, int) and type(value) is not bool
    if not whole or not 0 < value < _MOST:
      raise ValueError(
        f'{self.path}: {key}={value!r}; a positive integer is needed'
      )
    return value

  def number(self, key: str, default: float | None = None) -> float:
    value = self.value(key, default)
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
      raise ValueError(
        f'{self.path}: {key}={value!r}; a positive number is needed'
      )
    return float(value)

  def cap(self, key: str, default: float | None) -> float | None:
    """A soft cap: None if the key is null, the default if it is absent."""
    if self.raw.get(key, default) is None:
      return None
    return self.number(key, default)

  def word(self, key: str, default: str, meaning: dict[str, str]) -> str:
    """The value of a key, translated by `meaning`."""
    value = self.value(key, default)
    if not isinstance(value, str) or value not in meaning:
      self.refuse(key, tuple(meaning))
    return meaning[value]

  def check(self, **allowed: tuple) -> None:
    """Refuses other values than these; None stands for an absent key."""
    for key, values in allowed.items():
      if not any(self.raw.get(key) == v for v in values):
        self.refuse(key, values)

  def refuse(self, key: str, allowed: tuple) -> NoReturn:
    raise ValueError(
      f'{self.path}: {key}={self.raw[key]!r} is not supported; allowed: '
      f'{", ".join("absent" if v is None else repr(v) for v in allowed)}'
    )


class Family(NamedTuple):
  """A model_type.

  settings(config.json) -> LMConfig.
  rows: the table of its weight names.
  """

  settings: Callable[[Settings], model_config.LMConfig]
  rows: tuple[names.Row, ...]


def read(
  path: pathlib.Path,
) -> tuple[model_config.LMConfig, tuple[names.Row, ...]]:
  """(config, table of weight names) of a config.json.

  Raises:
    ValueError: a model or setting that models.lm does not support.
  """
  raw = files.read_json(path)
  kind = raw.get('model_type')
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise ValueError(
      f'{path}: model_type {kind!r} is not supported; allowed are '
      f'{sorted(FAMILIES)}'
    )
  s = Settings(path, raw)
  s.check(quantization_config=(None,))
  return FAMILIES[kind].settings(s), FAMILIES[kind].rows


def _llama(s: Settings) -> model_config.LMConfig:
  s.check(hidden_act=('silu', None), use_sliding_window=(False, None))
  kinds = s.value('layer_types', [])
  if any(kind != _GLOBAL for kind in kinds):
    raise ValueError(
      f'{s.path}: layer_types {sorted(set(kinds))}; allowed is {_GLOBAL!r}'
    )
  width, heads = s.integer('hidden_size'), s.integer('num_attention_heads')
  bias = bool(s.value('attention_bias', False))
  return model_config.LMConfig(
    **_sizes(s),
    **_rope(s, _rope_settings(s), s.number('rope_theta', 10000.0)),
    head_dim=s.integer('head_dim', max(1, width // heads)),
    tied=bool(s.value('tie_word_embeddings', False)),
    qkv_bias=bias,
    o_bias=bias,
  )


def _qwen2(s: Settings) -> model_config.LMConfig:
  # Qwen2 has biases for q, k and v, without a key in its config.
  bias = bool(s.value('attention_bias', True))
  return dataclasses.replace(_llama(s), qkv_bias=bias, o_bias=False)


def _qwen3(s: Settings) -> model_config.LMConfig:
  return dataclasses.replace(_llama(s), qk_norm=True)


def _gemma2(s: Settings) -> model_config.LMConfig:
  return model_config.LMConfig(
    **_gemma(s, 2),
    **_rope(s, _rope_settings(s), s.number('rope_theta', 10000.0)),
    attn_softcap=s.cap('attn_logit_softcapping', 50.0),
    logit_softcap=s.cap('final_logit_softcapping', 30.0),
  )


def _gemma3(s: Settings) -> model_config.LMConfig:
  rope = _rope_settings(s)
  if not any(isinstance(x, dict) for x in rope.values()):
    rope = {_GLOBAL: rope}  # transformers 4: one set, for the global layers
  local = _rope(
    s,
    rope.get(_LOCAL) or {},
    s.number('rope_local_base_freq', 10000.0),
  )
  if local['rope_scaling'] is not None:
    raise ValueError(
      f'{s.path}: scaled rope settings for {_LOCAL} are not supported; allowed '
      "is rope_type 'default'"
    )
  period = s.integer(
    'sliding_window_pattern', s.integer('_sliding_window_pattern', 6)
  )
  return model_config.LMConfig(
    **_gemma(s, period),
    **_rope(s, rope.get(_GLOBAL) or {}, s.number('rope_theta', 1000000.0)),
    local_rope_theta=local['rope_theta'],
    attn_softcap=s.cap('attn_logit_softcapping', None),
    logit_softcap=s.cap('final_logit_softcapping', None),
    qk_norm=True,
  )


def _gpt2(s: Settings) -> model_config.LMConfig:
  s.check(
    scale_attn_weights=(True, None),
    scale_attn_by_inverse_layer_idx=(False, None),
    add_cross_attention=(False, None),
  )
  width, heads = s.integer('n_embd'), s.integer('n_head')
  if width % heads:
    raise ValueError(
      f'{s.path}: n_embd={width} must be a multiple of n_head={heads}'
    )
  acts = dict(gelu_new='gelu_tanh', gelu_pytorch_tanh='gelu_tanh', gelu='gelu')
  return model_config.LMConfig(
    depth=s.integer('n_layer'),
    width=width,
    heads=heads,
    kv_heads=heads,
    head_dim=width // heads,
    mlp=s.integer('n_inner', 4 * width),
    vocab=s.integer('vocab_size'),
    context=s.integer('n_positions'),
    position='learned',
    norm='layer',
    norm_eps=s.number('layer_norm_epsilon', 1e-5),
    act=s.word('activation_function', 'gelu_new', acts),
    gated=False,
    tied=bool(s.value('tie_word_embeddings', True)),
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
  )


def _sizes(s: Settings) -> dict[str, Any]:
  """The sizes, whose keys Llama, Qwen and Gemma share."""
  s.check(mlp_bias=(False, None), partial_rotary_factor=(1, None))
  heads = s.integer('num_attention_heads')
  return dict(
    depth=s.integer('num_hidden_layers'),
    width=s.integer('hidden_size'),
    heads=heads,
    kv_heads=s.integer('num_key_value_heads', heads),
    mlp=s.integer('intermediate_size'),
    vocab=s.integer('vocab_size'),
    context=s.integer('max_position_embeddings'),
    norm_eps=s.number('rms_norm_eps', 1e-6),
  )


def _gemma(s: Settings, period: int) -> dict[str, Any]:
  """Settings common to Gemma 2 and 3.

  Without layer_types, every period-th layer is a global one.
  """
  s.check(
    hidden_activation=('gelu_pytorch_tanh', None),
    use_bidirectional_attention=(False, None),
  )
  sizes = _sizes(s)
  kinds = s.value(
    'layer_types',
    [_LOCAL if (i + 1) % period else _GLOBAL for i in range(sizes['depth'])],
  )
  known = isinstance(kinds, list) and all(k in (_LOCAL, _GLOBAL) for k in kinds)
  if not known or len(kinds) != sizes['depth']:
    raise ValueError(
      f'{s.path}: layer_types={kinds!r}; needs {_LOCAL!r} or {_GLOBAL!r} for '
      f'each of {sizes["depth"]} layers'
    )
  window = s.integer('sliding_window', 4096)
  bias = bool(s.value('attention_bias', False))
  return sizes | dict(
    head_dim=s.integer('head_dim', 256),
    embed_scale=sizes['width'] ** 0.5,
    windows=tuple(window if kind == _LOCAL else 0 for kind in kinds),
    query_scale=s.number('query_pre_attn_scalar', 256) ** -0.5,
    tied=bool(s.value('tie_word_embeddings', True)),
    act='gelu_tanh',
    post_norm=True,
    wide_norm=True,
    qkv_bias=bias,
    o_bias=bias,
  )


def _rope_settings(s: Settings) -> dict[str, Any]:
  """The object of rope settings of transformers 5 or 4."""
  rope = s.raw.get('rope_parameters') or s.raw.get('rope_scaling') or {}
  if not isinstance(rope, dict):
    raise ValueError(
      f'{s.path}: rope settings are {rope!r}; an object is needed'
    )
  return rope


def _rope(s: Settings, rope: dict[str, Any], theta: float) -> dict[str, Any]:
  """rope_theta and rope_scaling of LMConfig; theta: the default base."""
  extra = [k for k, v in rope.items() if isinstance(v, dict)]
  if extra:
    raise ValueError(
      f'{s.path}: rope settings per layer type ({", ".join(extra)}) are not '
      'supported; one set for all layers is'
    )
  at = Settings(s.path, rope)
  at.check(partial_rotary_factor=(1, None))
  kind = at.value('rope_type', at.value('type', 'default'))
  if kind in ('default', 'none'):
    scaling = None
  elif kind == 'linear':
    scaling = model_config.RopeScaling(at.number('factor'), original_context=0)
  elif kind == 'llama3':
    scaling = model_config.RopeScaling(
      factor=at.number('factor'),
      low_freq_factor=at.number('low_freq_factor'),
      high_freq_factor=at.number('high_freq_factor'),
      original_context=at.integer('original_max_position_embeddings'),
    )
  else:
    raise ValueError(
      f"{s.path}: rope_type {kind!r} is not supported; allowed are 'default', "
      "'linear', 'llama3'"
    )
  return dict(rope_theta=at.number('rope_theta', theta), rope_scaling=scaling)


# By model_type.
FAMILIES = {
  'llama': Family(_llama, names.HF),
  'qwen2': Family(_qwen2, names.HF),
  'qwen3': Family(_qwen3, names.HF),
  'gemma2': Family(_gemma2, names.HF_GEMMA),
  'gemma3_text': Family(_gemma3, names.HF_GEMMA),
  'gpt2': Family(_gpt2, names.HF_GPT2),
}
