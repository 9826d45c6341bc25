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
_GELU = {'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh'}
_GELU |= {'gelu': 'gelu'}


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

  def flag(self, key: str, default: bool = False) -> bool:
    return bool(self.value(key, default))

  def integer(self, key: str, default: int | None = None) -> int:
    value = self.value(key, default)
    # JSON's true is an int in Python, and no size is near 2^40.
    if type(value) is not int or not 0 < value < _MOST:
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
    cap = self.raw.get(key, default)
    return None if cap is None else self.number(key, default)

  def check(self, **allowed: tuple) -> None:
    """Refuses other values than these; None stands for an absent key."""
    for key, values in allowed.items():
      if not any(self.raw.get(key) == v for v in values):
        words = ', '.join('absent' if v is None else repr(v) for v in values)
        self.refuse(f'{key}={self.raw[key]!r}', words)

  def refuse(self, what: str, allowed: str) -> NoReturn:
    raise ValueError(
      f'{self.path}: {what} is not supported; allowed: {allowed}'
    )


def read(path: pathlib.Path) -> tuple[model_config.LMConfig, names.Naming]:
  """(settings, naming of the weights) of a config.json.

  Raises:
    ValueError: a model or setting that models.lm does not support.
  """
  return from_json(files.read_json(path), path)


def from_json(
  raw: dict[str, Any], path: pathlib.Path
) -> tuple[model_config.LMConfig, names.Naming]:
  """The same for the content of a config.json; path: for error messages."""
  kind, s = raw.get('model_type'), Settings(path, raw)
  if not isinstance(kind, str) or kind not in FAMILIES:
    s.refuse(f'model_type {kind!r}', ', '.join(map(repr, sorted(FAMILIES))))
  s.check(quantization_config=(None,))
  settings, naming = FAMILIES[kind]
  config = model_config.LMConfig(**settings(s))
  if naming is names.HF_T5 and config.gated:
    naming = names.HF_T5_GATED
  return config, naming


def _llama(s: Settings) -> dict[str, Any]:
  s.check(hidden_act=('silu', None), use_sliding_window=(False, None))
  sizes, bias = _sizes(s), s.flag('attention_bias')
  _layer_types(s, [_GLOBAL] * sizes['depth'], (_GLOBAL,))
  return dict(
    **sizes,
    **_rope(s, _rope_settings(s), s.number('rope_theta', 10000.0)),
    head_dim=s.integer('head_dim', max(1, sizes['width'] // sizes['heads'])),
    tied=s.flag('tie_word_embeddings'),
    qkv_bias=bias,
    o_bias=bias,
  )


def _qwen2(s: Settings) -> dict[str, Any]:
  # Qwen2 has biases for q, k and v, without a key in its config.
  return _llama(s) | dict(qkv_bias=s.flag('attention_bias', True), o_bias=False)


def _qwen3(s: Settings) -> dict[str, Any]:
  return _llama(s) | dict(qk_norm=True)


def _gemma2(s: Settings) -> dict[str, Any]:
  return dict(
    **_gemma(s, 2),
    **_rope(s, _rope_settings(s), s.number('rope_theta', 10000.0)),
    attn_softcap=s.cap('attn_logit_softcapping', 50.0),
    logit_softcap=s.cap('final_logit_softcapping', 30.0),
  )


def _gemma3(s: Settings) -> dict[str, Any]:
  rope = _rope_settings(s)
  if not any(isinstance(x, dict) for x in rope.values()):
    rope = {_GLOBAL: rope}  # transformers 4: one set, for the global layers
  base = s.number('rope_local_base_freq', 10000.0)
  local = _rope(s, rope.get(_LOCAL) or {}, base)
  if local['rope_scaling'] is not None:
    s.refuse(f'scaled rope settings for {_LOCAL}', "rope_type 'default'")
  period = s.integer('_sliding_window_pattern', 6)
  return dict(
    **_gemma(s, s.integer('sliding_window_pattern', period)),
    **_rope(s, rope.get(_GLOBAL) or {}, s.number('rope_theta', 1000000.0)),
    local_rope_theta=local['rope_theta'],
    attn_softcap=s.cap('attn_logit_softcapping', None),
    logit_softcap=s.cap('final_logit_softcapping', None),
    qk_norm=True,
  )


def _gpt2(s: Settings) -> dict[str, Any]:
  s.check(
    activation_function=(*_GELU, None),
    scale_attn_weights=(True, None),
    scale_attn_by_inverse_layer_idx=(False, None),
    add_cross_attention=(False, None),
  )
  width, heads = s.integer('n_embd'), s.integer('n_head')
  if width % heads:
    raise ValueError(
      f'{s.path}: n_embd={width} must be a multiple of n_head={heads}'
    )
  return model_config.GPT | dict(
    depth=s.integer('n_layer'),
    width=width,
    heads=heads,
    kv_heads=heads,
    head_dim=width // heads,
    mlp=s.integer('n_inner', 4 * width),
    vocab=s.integer('vocab_size'),
    context=s.integer('n_positions'),
    norm_eps=s.number('layer_norm_epsilon', 1e-5),
    act=_GELU[s.value('activation_function', 'gelu_new')],
    tied=s.flag('tie_word_embeddings', True),
  )


def _t5(s: Settings) -> dict[str, Any]:
  """T5 1.0 and 1.1, which differ in their MLP and in their head.

  Whether the head is tied is for the weights to tell: transformers 5 writes
  tie_word_embeddings=true for every T5.
  """
  s.check(
    feed_forward_proj=('relu', 'gated-gelu', None),
    is_encoder_decoder=(True, None),
  )
  width, depth = s.integer('d_model'), s.integer('num_layers')
  gated = s.value('feed_forward_proj', 'relu') == 'gated-gelu'
  count = s.integer('relative_attention_num_buckets', 32)
  far = s.integer('relative_attention_max_distance', 128)
  found = model_config.t5(
    s.integer('num_decoder_layers', depth),
    width=width,
    heads=s.integer('num_heads'),
    head_dim=s.integer('d_kv'),
    mlp=s.integer('d_ff'),
    vocab=s.integer('vocab_size'),
    context=s.integer('n_positions', 512),
    buckets=(count, far),
    act='gelu_tanh' if gated else 'relu',
    gated=gated,
    norm_eps=s.number('layer_norm_epsilon', 1e-6),
  )
  found['encoder'] = dataclasses.replace(found['encoder'], depth=depth)
  scaled = s.flag('scale_decoder_outputs', s.flag('tie_word_embeddings', True))
  start = s.value('decoder_start_token_id', s.value('pad_token_id', 0))
  return found | dict(start=start, head_scale=width**-0.5 if scaled else 1.0)


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
  sizes, bias = _sizes(s), s.flag('attention_bias')
  numbers = range(1, sizes['depth'] + 1)
  kinds = [_LOCAL if i % period else _GLOBAL for i in numbers]
  kinds = _layer_types(s, kinds, (_LOCAL, _GLOBAL))
  window = s.integer('sliding_window', 4096)
  return model_config.gemma(sizes['width']) | dict(
    **sizes,
    head_dim=s.integer('head_dim', 256),
    windows=tuple(window if kind == _LOCAL else 0 for kind in kinds),
    query_scale=s.number('query_pre_attn_scalar', 256) ** -0.5,
    tied=s.flag('tie_word_embeddings', True),
    qkv_bias=bias,
    o_bias=bias,
  )


def _layer_types(s: Settings, default: list[str], allowed: tuple) -> list[str]:
  """The kind of attention of every layer."""
  kinds, depth = s.value('layer_types', default), len(default)
  listed = isinstance(kinds, list) and len(kinds) == depth
  if not listed or any(kind not in allowed for kind in kinds):
    words = ' or '.join(map(repr, allowed))
    s.refuse(f'layer_types={kinds!r}', f'{words} for each of {depth} layers')
  return kinds


def _rope_settings(s: Settings) -> dict[str, Any]:
  """The object of rope settings of transformers 5 or 4."""
  rope = s.raw.get('rope_parameters') or s.raw.get('rope_scaling') or {}
  if not isinstance(rope, dict):
    s.refuse(f'rope settings {rope!r}', 'an object')
  return rope


def _rope(s: Settings, rope: dict[str, Any], theta: float) -> dict[str, Any]:
  """rope_theta and rope_scaling of LMConfig; theta: the default base."""
  extra = [k for k, v in rope.items() if isinstance(v, dict)]
  if extra:
    what = f'rope settings per layer type ({", ".join(extra)})'
    s.refuse(what, 'one set for all layers')
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
    s.refuse(f'rope_type {kind!r}', "'default', 'linear', 'llama3'")
  return dict(rope_theta=at.number('rope_theta', theta), rope_scaling=scaling)


# model_type -> (function from its settings, naming of its weights).
FAMILIES: dict[
  str, tuple[Callable[[Settings], dict[str, Any]], names.Naming]
] = {
  'llama': (_llama, names.HF),
  'qwen2': (_qwen2, names.HF),
  'qwen3': (_qwen3, names.HF),
  'gemma2': (_gemma2, names.HF_GEMMA),
  'gemma3_text': (_gemma3, names.HF_GEMMA),
  'gpt2': (_gpt2, names.HF_GPT2),
  't5': (_t5, names.HF_T5),
}
