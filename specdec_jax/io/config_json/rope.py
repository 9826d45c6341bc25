"""Reads the rope settings in a config.json: transformers 4 writes rope_scaling
beside rope_theta, 5 rope_parameters. rope_scaling wins over the latter."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from specdec_jax.io.config_json import defaults
from specdec_jax.io.config_json.json_object import Json
from specdec_jax.models import rope as rope_lib

LOCAL, GLOBAL = 'sliding_attention', 'full_attention'


def read(s: Json) -> dict[str, Any]:
  """Returns rope_theta, rope_scaling and, where they limit it, the context."""
  new, old = objects(s)
  nested = [x for x in new.values() if isinstance(x, dict)]
  if old:
    unread = new.get('rope_theta', old.get('rope_theta'))
    if 'rope_theta' not in old and unread not in (None, s.value('rope_theta')):
      s.refuse(
        f'rope_scaling without rope_theta beside rope_theta={unread!r} of '
        'rope_parameters, which transformers would not read,',
        'rope_theta in rope_scaling',
      )
    return one(s, old)
  if nested and (len(nested) < len(new) or any(x != nested[0] for x in nested)):
    what = f'rope settings per layer type ({", ".join(new)})'
    s.refuse(what, 'one set for all layers')
  return one(s, nested[0] if nested else new)


def read_both(s: Json) -> dict[str, Any]:
  """Reads two bases: layers with a window have local_rope_theta."""
  new, old = objects(s)
  if any(not isinstance(new[key] or {}, dict) for key in new):
    s.refuse(f'rope_parameters={new!r}', f'an object for {GLOBAL} and {LOCAL}')
  found = one(s, (new.get(GLOBAL) or {}) | old)
  base = {'rope_theta': s.value('rope_local_base_freq')}
  local = one(s, base | (new.get(LOCAL) or {}))
  if local['rope_scaling'] is not None:
    s.refuse(f'scaled rope settings for {LOCAL}', "rope_type 'default'")
  return found | dict(local_rope_theta=local['rope_theta'])


def objects(s: Json) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns (rope_parameters, rope_scaling), {} if absent."""
  found = []
  for key in ('rope_parameters', 'rope_scaling'):
    rope = s.value(key) or {}
    if not isinstance(rope, dict):
      s.refuse(f'{key}={rope!r}', 'an object')
    found.append(rope)
  return found[0], found[1]


def one(s: Json, rope: Mapping[str, Any]) -> dict[str, Any]:
  """Reads one set of rope settings; returns what `read` does."""
  context = s.integer('max_position_embeddings')
  # A key beside the object wins over one in it.
  first = 'original_max_position_embeddings'
  first = s.integer(first, rope.get(first) or context)
  at = Json(s.path, rope, defaults.ROPE)
  kind = at.value('rope_type') or at.value('type') or 'default'
  if kind not in [*_KINDS]:
    s.refuse(f'rope_type {kind!r}', ', '.join(map(repr, _KINDS)))
  found = dict(rope_theta=at.number('rope_theta', s.number('rope_theta')))
  found |= _KINDS[kind](at, context, first)
  s.check(partial_rotary_factor=(1,))
  at.check_rest(defaults.ROPE_NEUTRAL)
  return found


def _dynamic(at: Json, *_) -> dict[str, Any]:
  """Scales nothing: only beyond the context would frequencies depend on the
  text's length, and every cached key would have to be rotated anew."""
  at.number('factor')
  return dict(rope_scaling=None)


def _yarn(at: Json, context: int, first: int) -> dict[str, Any]:
  factor = at.number('factor', context / first)

  def size(share: float) -> float:
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0

  keys, magnitude = ('mscale', 'mscale_all_dim'), size(1)
  if all([at.value(key) for key in keys]):  # both are read
    shares = [at.number(key) for key in keys]
    magnitude = size(shares[0]) / size(shares[1])
  scaling = rope_lib.Yarn(
    factor=factor,
    original_context=first,
    beta_fast=at.number('beta_fast'),
    beta_slow=at.number('beta_slow'),
    magnitude=at.number('attention_factor', magnitude),
    truncate=at.flag('truncate'),
  )
  return dict(rope_scaling=scaling, context=max(context, scaling.context))


def _longrope(at: Json, context: int, first: int) -> dict[str, Any]:
  """Takes the divisors for short texts, and their length as context: longer
  texts need others for all tokens, earlier ones included."""
  factor = at.number('factor', context / first)
  size = 1.0
  if first < 2:
    at.refuse(f'original_max_position_embeddings={first}', '2 or more')
  if factor > 1:
    size = math.sqrt(1 + math.log(factor) / math.log(first))
  at.seen.add('long_factor')
  divisors = at.value('short_factor')
  if not isinstance(divisors, list) or not all(
    isinstance(x, (int, float)) and x > 0 for x in divisors
  ):
    at.refuse(f'short_factor={divisors!r}', 'a list of positive numbers')
  magnitude = at.number('attention_factor', size)
  scaling = rope_lib.Divided(tuple(map(float, divisors)), magnitude)
  return dict(rope_scaling=scaling, context=min(context, first))


# Each from the rope settings, the context and the training context.
_KINDS: dict[str, Callable[[Json, int, int], dict[str, Any]]] = {
  'default': lambda *_: dict(rope_scaling=None),
  'none': lambda *_: dict(rope_scaling=None),
  'linear': lambda at, *_: dict(
    rope_scaling=rope_lib.RopeScaling(at.number('factor'), original_context=0)
  ),
  'dynamic': _dynamic,
  'llama3': lambda at, _, first: dict(
    rope_scaling=rope_lib.RopeScaling(
      factor=at.number('factor'),
      low_freq_factor=at.number('low_freq_factor'),
      high_freq_factor=at.number('high_freq_factor'),
      original_context=first,
    )
  ),
  'yarn': _yarn,
  'longrope': _longrope,
  'su': _longrope,
}
