"""Reads config.json of a Hugging Face folder into an LMConfig.

Each family has one function. Keys are those of transformers 4 and 5. Refuses
settings that models.lm does not support, and other families' keys that would
change the model there.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from specdec_jax.io import names
from specdec_jax.io.config_json import defaults, rope
from specdec_jax.io.config_json.json_object import Json
from specdec_jax.models import config as model_config

_LOCAL, _GLOBAL = rope.LOCAL, rope.GLOBAL
_ACTS = {
  'silu': 'silu', 'swish': 'silu', 'relu': 'relu', 'gelu': 'gelu',
  'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh',
}  # fmt: skip

# model_type of a model with images -> that of its text_config.
_WITH_IMAGES = {'gemma3': 'gemma3_text', 'mistral3': 'mistral'}


def from_json(
  raw: dict[str, Any], path: pathlib.Path
) -> tuple[model_config.LMConfig, names.Naming]:
  """Reads the config.json at `path` into (settings, naming for weights)."""
  raw = _text(raw)
  kind = raw.get('model_type')
  if not isinstance(kind, str) or kind not in FAMILIES:
    Json(path, raw, {}).refuse(
      f'model_type {kind!r}', ', '.join(map(repr, sorted(FAMILIES)))
    )
  s = Json(path, raw, defaults.of(kind))
  settings, naming = FAMILIES[kind]
  config = model_config.LMConfig(**settings(s))
  s.check_rest(defaults.NEUTRAL)
  if naming is names.HF_T5 and config.gated:
    naming = names.HF_T5_GATED
  return config, naming


def _text(raw: dict[str, Any]) -> dict[str, Any]:
  """Takes the text settings out of a model that sees images too."""
  kind, own = raw.get('model_type'), raw.get('text_config')
  if kind == 'mimo':  # with a module that drafts (io.published.eagle_folder)
    return raw | dict(model_type='qwen2')
  if kind not in [*_WITH_IMAGES] or not isinstance(own, dict):
    return raw
  # Both classes tie their heads where the file does not say.
  same = dict(quantization_config=None, tie_word_embeddings=True)
  outer = {key: raw.get(key, absent) for key, absent in same.items()}
  return {'model_type': _WITH_IMAGES[kind]} | own | outer


def _llama(s: Json) -> dict[str, Any]:
  if s.raw.get('use_sliding_window') is False:
    s.seen.add('sliding_window')  # of a Qwen stored as a Llama; not used
  return _decoder(s) | _alike(s, None)


def _mistral(s: Json) -> dict[str, Any]:
  return _decoder(s) | _alike(s, _window(s))


def _phi3(s: Json) -> dict[str, Any]:
  said = [x.get(key) for x in rope.objects(s) for key in ('type', 'rope_type')]
  if 'yarn' in said:
    s.refuse("rope_scaling type 'yarn' of a Phi-3", "'longrope'")
  return _mistral(s)


def _qwen2(s: Json) -> dict[str, Any]:
  # Qwen2 has biases for q, k and v, without a key in its config.
  return _qwen3(s) | dict(qk_norm=False, o_bias=False)


def _qwen3(s: Json) -> dict[str, Any]:
  window = _window(s) if s.flag('use_sliding_window') else None
  first, depth = s.value('max_window_layers'), s.integer('num_hidden_layers')
  if type(first) is not int or first < 0:
    s.refuse(f'max_window_layers={first!r}', 'a number of layers')
  far = depth if window is None else min(first, depth)
  kinds = [_GLOBAL] * far + [_LOCAL] * (depth - far)
  s.seen.add('sliding_window')
  return _decoder(s) | _windows(s, kinds, window) | dict(qk_norm=True)


def _olmo2(s: Json) -> dict[str, Any]:
  norms = dict(pre_norm=False, post_norm=True, wide_norm=True)
  return _llama(s) | norms | dict(qk_norm=True, joint_qk_norm=True)


def _smollm3(s: Json) -> dict[str, Any]:
  depth = s.integer('num_hidden_layers')
  every = s.integer('no_rope_layer_interval')
  rotated = s.value('no_rope_layers')  # 1 where a layer has rope
  if rotated is None:
    rotated = [i % every > 0 for i in range(1, depth + 1)]
  listed = isinstance(rotated, list) and len(rotated) >= depth
  if not listed or any(x not in (0, 1) for x in rotated):
    s.refuse(
      f'no_rope_layers={rotated!r}', f'0 or 1 for each of {depth} layers'
    )
  rotated = [bool(x) for x in rotated[:depth]]
  window = _window(s)
  near = s.flag('use_sliding_window') and window is not None
  kinds = [_LOCAL if near and not x else _GLOBAL for x in rotated]
  found = _decoder(s) | _windows(s, kinds, window)
  return found | dict(rotated=model_config.shared(rotated))


def _granite(s: Json) -> dict[str, Any]:
  return _llama(s) | dict(
    embed_scale=s.number('embedding_multiplier'),
    query_scale=s.number('attention_multiplier'),
    residual_scale=s.number('residual_multiplier'),
    head_scale=1 / s.number('logits_scaling'),
  )


def _gemma(s: Json) -> dict[str, Any]:
  s.check(hidden_activation=('gelu_pytorch_tanh',))
  found: dict[str, Any] = _llama(s)
  # Files that say gelu mean its approximation, as transformers takes them.
  act = 'gelu_tanh' if found['act'] == 'gelu' else found['act']
  own = model_config.gemma(found['width'])
  return own | found | dict(act=act, post_norm=False, query_scale=None)


def _gemma2(s: Json) -> dict[str, Any]:
  cap = s.cap('attn_logit_softcapping')  # of no other family
  return _gemmas(s, 2) | rope.read(s) | dict(attn_softcap=cap)


def _gemma3(s: Json) -> dict[str, Any]:
  period = s.integer('sliding_window_pattern')
  return _gemmas(s, period) | rope.read_both(s) | dict(qk_norm=True)


def _gemmas(s: Json, period: int) -> dict[str, Any]:
  """Returns what Gemma 2 and 3 share. Every period-th layer is global, unless
  layer_types says which."""
  s.seen.add('hidden_act')  # hidden_activation takes its place
  found: dict[str, Any] = _sizes(s) | dict(act=_act(s, 'hidden_activation'))
  numbers = range(1, found['depth'] + 1)
  kinds = [_LOCAL if i % period else _GLOBAL for i in numbers]
  found = model_config.gemma(found['width']) | found
  found |= _windows(s, kinds, _window(s))
  return found | dict(
    query_scale=s.number('query_pre_attn_scalar') ** -0.5,
    logit_softcap=s.cap('final_logit_softcapping'),
  )


def _gpt2(s: Json) -> dict[str, Any]:
  s.check(scale_attn_weights=(True,))
  width, heads = s.integer('n_embd'), s.integer('n_head')
  return model_config.GPT | dict(
    depth=s.integer('n_layer'),
    width=width,
    heads=heads,
    kv_heads=heads,
    head_dim=width // heads,
    mlp=s.integer('n_inner', 4 * width),
    vocab=s.integer('vocab_size'),
    context=s.integer('n_positions'),
    norm_eps=s.number('layer_norm_epsilon'),
    act=_act(s, 'activation_function'),
    tied=s.flag('tie_word_embeddings'),
  )


def _t5(s: Json) -> dict[str, Any]:
  """Reads T5 1.0 and 1.1, which differ in MLP and head. The weights tell if it
  is tied: transformers 5 writes tie_word_embeddings=true for every T5."""
  s.check(feed_forward_proj=('relu', 'gated-gelu'), is_encoder_decoder=(True,))
  width, depth = s.integer('d_model'), s.integer('num_layers')
  gated = s.value('feed_forward_proj') == 'gated-gelu'
  count = s.integer('relative_attention_num_buckets')
  far = s.integer('relative_attention_max_distance')
  found = model_config.t5(
    s.integer('num_decoder_layers', depth),
    width=width,
    heads=s.integer('num_heads'),
    head_dim=s.integer('d_kv'),
    mlp=s.integer('d_ff'),
    vocab=s.integer('vocab_size'),
    context=s.integer('n_positions'),
    buckets=(count, far),
    act='gelu_tanh' if gated else 'relu',
    gated=gated,
    norm_eps=s.number('layer_norm_epsilon'),
  )
  found['encoder'] = dataclasses.replace(found['encoder'], depth=depth)
  ends = s.value('scale_decoder_outputs'), s.value('tie_word_embeddings')
  scaled = next((x for x in ends if x is not None), True)
  start = s.value('decoder_start_token_id')
  start = s.value('pad_token_id') if start is None else start
  return found | dict(start=start, head_scale=width**-0.5 if scaled else 1.0)


# --- what families share ------------------------------------------------------


def _decoder(s: Json) -> dict[str, Any]:
  return _sizes(s) | dict(act=_act(s, 'hidden_act')) | rope.read(s)


def _sizes(s: Json) -> dict[str, Any]:
  width, heads = s.integer('hidden_size'), s.integer('num_attention_heads')
  bias, kv_heads = s.flag('attention_bias'), s.nullable('num_key_value_heads')
  return dict(
    depth=s.integer('num_hidden_layers'),
    width=width,
    heads=heads,
    kv_heads=heads if kv_heads is None else s.integer('num_key_value_heads'),
    head_dim=s.integer('head_dim', max(1, width // heads)),
    mlp=s.integer('intermediate_size'),
    vocab=s.integer('vocab_size'),
    context=s.integer('max_position_embeddings'),
    norm_eps=s.number('rms_norm_eps'),
    tied=s.flag('tie_word_embeddings'),
    qkv_bias=bias,
    o_bias=bias,
    mlp_bias=s.flag('mlp_bias'),
  )


def _act(s: Json, key: str) -> str:
  act = s.value(key)
  if not isinstance(act, str) or act not in _ACTS:
    s.refuse(f'{key}={act!r}', ', '.join(map(repr, _ACTS)))
  return _ACTS[act]


def _window(s: Json) -> int | None:
  empty = s.nullable('sliding_window') is None
  return None if empty else s.integer('sliding_window')


def _alike(s: Json, window: int | None) -> dict[str, Any]:
  """Gives all layers the same window, or none."""
  kind = _GLOBAL if window is None else _LOCAL
  return _windows(s, [kind] * s.integer('num_hidden_layers'), window, (kind,))


def _windows(
  s: Json, kinds: list[str], window: int | None, allowed: tuple = ()
) -> dict[str, Any]:
  """Returns each layer's window. kinds: what attention each has, if the file
  does not say. allowed: what it may say; (): either, if there is a window."""
  allowed = allowed or (_GLOBAL, _LOCAL)[: 1 if window is None else 2]
  depth, kinds = len(kinds), s.value('layer_types', kinds)
  listed = isinstance(kinds, list) and len(kinds) == depth
  if not listed or any(kind not in allowed for kind in kinds):
    words = ' or '.join(map(repr, allowed))
    s.refuse(f'layer_types={kinds!r}', f'{words} for each of {depth} layers')
  windows = [(window or 0) if x == _LOCAL else 0 for x in kinds]
  return dict(windows=model_config.shared(windows))


# model_type -> (function from its settings, naming of its weights).
FAMILIES: dict[str, tuple[Callable[[Json], dict[str, Any]], names.Naming]] = {
  'llama': (_llama, names.HF),
  'mistral': (_mistral, names.HF),
  'qwen2': (_qwen2, names.HF),
  'qwen3': (_qwen3, names.HF),
  'phi3': (_phi3, names.HF_PHI3),
  'olmo2': (_olmo2, names.HF_OLMO2),
  'smollm3': (_smollm3, names.HF),
  'granite': (_granite, names.HF),
  'gemma': (_gemma, names.HF_GEMMA1),
  'gemma2': (_gemma2, names.HF_GEMMA),
  'gemma3_text': (_gemma3, names.HF_GEMMA),
  'gpt2': (_gpt2, names.HF_GPT2),
  't5': (_t5, names.HF_T5),
}
