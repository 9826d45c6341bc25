"""Mechanical mutants that change nothing anyone can see, and why."""

from typing import NamedTuple


class Equivalent(NamedTuple):
  """before, after: the changed lines, as the table of survivors prints them."""

  path: str
  before: str
  after: str
  reason: str


_SAMPLING = 'specdec_jax/sampling.py'
_DECODE = 'specdec_jax/decode.py'
_CHAIN = 'specdec_jax/verify/chain.py'
_COUPLED = 'specdec_jax/verify/coupled.py'

_LAST = 'the array has two axes: 1 is -1'
_CLAMPED = 'the axis has no such entry: a static index past the end is clamped'
_COST = 'costs time and changes no number: rows without top-p keep their bits'

EQUIVALENT = (
  Equivalent(
    _SAMPLING,
    't_B11 = spread(jnp.where(is_greedy(sampling), 1, sampling.temperature_B))',
    't_B11 = spread(jnp.where(is_greedy(sampling), 2, sampling.temperature_B))',
    'keeps greedy rows from dividing by 0; what they get is replaced',
  ),
  Equivalent(
    _SAMPLING,
    'jnp.any(sampling.top_p_B < 1),',
    'jnp.any(sampling.top_p_B < 2),',
    _COST,
  ),
  Equivalent(
    _SAMPLING,
    'jnp.any(sampling.top_p_B < 1),',
    'jnp.any(sampling.top_p_B <= 1),',
    _COST,
  ),
  Equivalent(
    _SAMPLING,
    'V = weights_BV.shape[-1]',
    'V = weights_BV.shape[+1]',
    _LAST,
  ),
  Equivalent(
    _SAMPLING,
    'return largest(scores_BV)[1][:, 0]',
    'return largest(scores_BV)[1][:, 1]',
    _CLAMPED,
  ),
  Equivalent(
    _SAMPLING,
    'keys = (key_2[0], key_2[1], key_2[0] ^ key_2[1] ^ u32(0x1BD11BDA))',
    'keys = (key_2[0], key_2[2], key_2[0] ^ key_2[1] ^ u32(0x1BD11BDA))',
    _CLAMPED,
  ),
  Equivalent(
    _DECODE,
    'request.lengths_B - 1,',
    'request.lengths_B + 1,',
    'the first window overwrites both slots before anything sees them',
  ),
  Equivalent(
    _DECODE,
    'p_BV = jnp.take_along_axis(p_BNV, take, 1)[:, 0]',
    'p_BV = jnp.take_along_axis(p_BNV, take, 1)[:, 1]',
    _CLAMPED,
  ),
  Equivalent(
    _DECODE,
    'empty_B1 = ~(jnp.sum(verdict.weights_BV, -1, keepdims=True) > 0)',
    'empty_B1 = ~(jnp.sum(verdict.weights_BV, +1, keepdims=True) > 0)',
    _LAST,
  ),
  Equivalent(_DECODE, '..., 0', '..., 1', _CLAMPED),
  Equivalent(
    _DECODE,
    'narrow: bool = True',
    'narrow: bool = False',
    'costs time and changes no token; build.default_options sets it',
  ),
  Equivalent(
    _CHAIN,
    'return jnp.cumprod(ok_BK.astype(jnp.int32), -1).sum(-1, dtype=jnp.int32)',
    'return jnp.cumprod(ok_BK.astype(jnp.int32), +1).sum(-1, dtype=jnp.int32)',
    _LAST,
  ),
  Equivalent(
    _CHAIN,
    'return jnp.take_along_axis('
    'p_BNV[:, :K], tokens_BK[..., None], -1)[..., 0]',
    'return jnp.take_along_axis('
    'p_BNV[:, :K], tokens_BK[..., None], -1)[..., 1]',
    _CLAMPED,
  ),
  Equivalent(
    _COUPLED,
    'ok_BK = jnp.stack(agrees, 1) if K else jnp.zeros((B, 0), bool)',
    'ok_BK = jnp.stack(agrees, 1) if K else jnp.zeros((B, 1), bool)',
    'meets [B, 0] in the next line, and an axis of 1 broadcasts to 0',
  ),
)
