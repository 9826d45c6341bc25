"""Rotary positions and grouped-query attention over cached keys and values."""

import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.models import config as model_config

Array = jax.Array
# Tokens of a pass from which cuDNN attends on a GPU: slower than XLA at 64,
# faster at 256 (experiments/gpu).
CUDNN_FROM = 256


class View(NamedTuple):
  """What the layers of one kind share in a forward pass.

  cos, sin: rotary angles, [B, T, 1, C/2]; None for other kinds of positions.
  mask_BTS: true where a token attends to a slot.
  bias_BHTS: added to the scores, for relative positions; or None.
  source: (the source's keys and values in this layer, a mask of its tokens), as
    layers.CrossAttention takes them; None without an encoder.
  dropout: a layers.Dropout in training, or None.
  at_BS: each slot's position, as in types.Model.apply.
  """

  cos: Array | None
  sin: Array | None
  mask_BTS: Array
  bias_BHTS: Array | None = None
  source: Any = None
  dropout: Any = None
  at_BS: Array | None = None


def views(
  config: model_config.LMConfig,
  positions_BT,
  mask_BTS,
  at_BS=None,
  table_XH: Array | None = None,
) -> dict[tuple[int, bool], View]:
  """Returns a View for every kind of layer (config.kinds). table_XH holds T5's
  relative positions: what to add to a score, by bucket and head."""
  view = functools.partial(_view, config, positions_BT, mask_BTS, at_BS)
  found = {kind: view(*kind) for kind in dict.fromkeys(config.kinds)}
  if table_XH is None:
    return found
  slots = mask_BTS.shape[-1]
  distance_BTS = _places(slots, at_BS) - positions_BT[..., None]
  bucket_BTS = buckets(distance_BTS, config)
  bias_BHTS = jnp.moveaxis(table_XH.at[bucket_BTS].get(mode='clip'), -1, 1)
  return {kind: x._replace(bias_BHTS=bias_BHTS) for kind, x in found.items()}


def _places(slots: int, at_BS: Array | None) -> Array:
  """Returns each slot's position, [B or 1, 1, S]: its index in a chain."""
  return jnp.arange(slots)[None, None] if at_BS is None else at_BS[:, None]


def _view(
  config, positions_BT, mask_BTS, at_BS, window: int, rotated: bool
) -> View:
  if window:
    at_X1S = _places(mask_BTS.shape[-1], at_BS)
    mask_BTS = mask_BTS & (at_X1S > positions_BT[..., None] - window)
    if config.local_rope_theta is not None:
      config = dataclasses.replace(
        config, rope_theta=config.local_rope_theta, rope_scaling=None
      )
  if config.position != 'rope':
    return View(None, None, mask_BTS, at_BS=at_BS)
  if not rotated:
    # By no angle, so that views of all kinds can be stacked for a scan.
    positions_BT = jnp.zeros_like(positions_BT)
    config = dataclasses.replace(config, rope_scaling=None)
  return View(*rotation(positions_BT, config), mask_BTS, at_BS=at_BS)


def buckets(distance: Array, config: model_config.LMConfig) -> Array:
  """Sorts distances between query and key into buckets, half for single
  distances, half for ever larger ranges up to the farthest (Raffel et al. 2020,
  https://arxiv.org/abs/1910.10683, section 2.1). Without causal, half of all
  are for keys after the query."""
  count, far = config.buckets
  first = jnp.zeros_like(distance)
  if not config.causal:
    count //= 2
    first = jnp.where(distance > 0, count, 0)
    distance = -jnp.abs(distance)
  back = jnp.maximum(-distance, 0)
  single = count // 2
  # In float32 as in the published models: a bucket's edge is a whole number.
  share = jnp.log(jnp.maximum(back, 1).astype(jnp.float32) / single)
  share /= math.log(far / single)
  range_ = single + (share * (count - single)).astype(jnp.int32)
  range_ = jnp.minimum(range_, count - 1)
  return first + jnp.where(back < single, back, range_)


def precision(dtype):
  """Returns the matmul precision: full for float32, which GPUs and TPUs shorten
  by default. Products in bfloat16 are exact anyway, and libtpu 0.0.42 fails to
  compile some of them at a higher precision."""
  exact = jax.lax.Precision.HIGHEST
  return jax.lax.Precision.DEFAULT if dtype == jnp.bfloat16 else exact


def inverse_frequencies(config: model_config.LMConfig) -> Array:
  """Returns each channel pair's frequency, [C/2], float32 or wider."""
  exponent = jnp.arange(0, config.head_dim, 2, dtype=float) / config.head_dim
  freq = 1.0 / config.rope_theta**exponent
  scaling = config.rope_scaling
  return freq if scaling is None else scaling.scale(freq, config.rope_theta)


def rotation(positions_BT: Array, config: model_config.LMConfig):
  """Returns (cos, sin) of the rotary angles, each [B, T, 1, C/2], times the
  scaling's magnitude. In float32 or wider: bfloat16 rounds position 257 to 256.
  """
  freq = inverse_frequencies(config)
  angle = (
    positions_BT[:, :, None, None].astype(freq.dtype) * freq[None, None, None]
  )
  size = config.rope_scaling.magnitude if config.rope_scaling else 1.0
  return jnp.cos(angle) * size, jnp.sin(angle) * size


def rotate(x_BTHC: Array, cos, sin) -> Array:
  """Rotates each pair of channels (c, c + C/2)."""
  a, b = (y.astype(cos.dtype) for y in jnp.split(x_BTHC, 2, -1))
  y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  return y.astype(x_BTHC.dtype)


def softcap(x: Array, cap: float | None) -> Array:
  """Computes cap * tanh(x / cap) (Gemma 2, 2408.00118, section 2)."""
  return x if cap is None else cap * jnp.tanh(x / cap)


def attend(
  q_BTHC: Array,
  cache,
  mask_BTS: Array,
  *,
  scale: float | None = None,
  cap: float | None = None,
  bias_BHTS: Array | None = None,
) -> Array:
  """Attends, [B, T, H * C]; query head h uses key/value head h // (H / G).

  cache: a models.cache.KVCache.
  mask_BTS: true where a token attends to a slot.
  scale: multiplies the scores before the softmax; None is C**-0.5.
  cap, bias_BHTS: soft cap of the scaled scores, and what is added then.
  """
  B, T, H, C = q_BTHC.shape
  G, S = cache.k_BGSC.shape[1:3]
  if _is_prefill(q_BTHC) and cap is None and bias_BHTS is None:
    with contextlib.suppress(RuntimeError):  # JAX finds no cuDNN
      return _by_cudnn(q_BTHC, cache, mask_BTS, scale)
  wide = jnp.promote_types(q_BTHC.dtype, jnp.float32)
  exact = precision(q_BTHC.dtype)
  # The query heads of a key/value head and their tokens are rows of one matmul.
  q_BGRC = jnp.moveaxis(q_BTHC.reshape(B, T, G, H // G, C), 1, 3)
  q_BGRC = q_BGRC.reshape(B, G, H // G * T, C)
  scores = jnp.einsum(
    'bgrc,bgsc->bgrs',
    q_BGRC,
    cache.k_BGSC,
    preferred_element_type=wide,
    precision=exact,
  ).reshape(B, G, H // G, T, S)
  scores = softcap(scores * (C**-0.5 if scale is None else scale), cap)
  if bias_BHTS is not None:
    scores += bias_BHTS.astype(wide).reshape(B, G, H // G, T, S)
  # Finite: a row where everything is masked must not become NaN.
  scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
  weights = jax.nn.softmax(scores, -1).astype(q_BTHC.dtype)
  out_BGRC = jnp.einsum(
    'bgrs,bgsc->bgrc',
    weights.reshape(q_BGRC.shape[:3] + (S,)),
    cache.v_BGSC,
    preferred_element_type=wide,
    precision=exact,
  ).astype(q_BTHC.dtype)
  out = jnp.moveaxis(out_BGRC.reshape(B, G, H // G, T, C), 3, 1)
  return out.reshape(B, T, H * C)


def _is_prefill(q_BTHC: Array) -> bool:
  """Tells whether cuDNN attends: it never writes scores [T, S] to memory."""
  _, T, _, C = q_BTHC.shape
  known = q_BTHC.dtype in (jnp.bfloat16, jnp.float16) and C in (64, 128)
  return known and T >= CUDNN_FROM and jax.default_backend() == 'gpu'


def _by_cudnn(q_BTHC, cache, mask_BTS, scale: float | None) -> Array:
  B, T = q_BTHC.shape[:2]
  k_BSGC, v_BSGC = (jnp.swapaxes(x, 1, 2) for x in cache)
  mask_BTS = jnp.broadcast_to(mask_BTS, (B, T, mask_BTS.shape[-1]))
  out_BTHC = jax.nn.dot_product_attention(
    q_BTHC,
    k_BSGC,
    v_BSGC,
    mask=mask_BTS[:, None],
    scale=scale,
    implementation='cudnn',
  )
  return out_BTHC.reshape(B, T, -1)
