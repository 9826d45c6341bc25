"""Norms, projections and the transformer block, as Flax NNX modules.

Modules hold parameters only: no sharding, caches or loading. Kernels are
[in, out], so that `x @ kernel` reads them at memory speed.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from specdec_jax.models import attention
from specdec_jax.models import config as model_config

Array = jax.Array


def matmul(x: Array, kernel: Array, dtype=None) -> Array:
  """x @ kernel, accumulated in float32 or wider, cast to dtype (None: x's)."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  dot = functools.partial(
    jnp.matmul,
    preferred_element_type=wide,
    precision=attention.precision(x.dtype),
  )
  rows = x.shape[:-1]
  x = x.reshape(-1, x.shape[-1])
  one = x.shape[0] == 1 and x.dtype == jnp.bfloat16
  if one and jax.default_backend() == 'cpu':
    # For one bf16 row XLA CPU takes a path 10 to 20 times slower than for two.
    y = dot(jnp.pad(x, ((0, 1), (0, 0))), kernel)[:1]
  else:
    y = dot(x, kernel)
  return y.astype(dtype or x.dtype).reshape(*rows, kernel.shape[1])


class RMSNorm(nnx.Module):
  """x / rms(x) * scale, in float32 or wider (Zhang & Sennrich 2019).

  It is rounded to x's dtype before the scale is applied, or after if the scale
  has a wider dtype than x.
  """

  def __init__(self, width: int, eps: float, dtype):
    self.scale = nnx.Param(jnp.ones((width,), dtype))
    self.eps = eps

  def __call__(self, x: Array) -> Array:
    scale = self.scale[...]
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    y = y.astype(jnp.promote_types(x.dtype, scale.dtype))
    return (y * _last(scale, x.ndim)).astype(x.dtype)


class LayerNorm(nnx.Module):
  """(x - mean) / deviation * scale + bias (Ba et al. 2016), in float32 or
  wider."""

  def __init__(self, width: int, eps: float, dtype):
    self.scale = nnx.Param(jnp.ones((width,), dtype))
    self.bias = nnx.Param(jnp.zeros((width,), dtype))
    self.eps = eps

  def __call__(self, x: Array) -> Array:
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    scale, bias = (_last(p[...], x.ndim) for p in (self.scale, self.bias))
    return (y * scale + bias).astype(x.dtype)


def norm(c: model_config.LMConfig, width: int) -> nnx.Module:
  """The norm layer of these settings, over `width` channels."""
  dtype = jnp.dtype(c.dtype)
  if c.wide_norm:
    dtype = jnp.promote_types(dtype, jnp.float32)
  return NORMS[c.norm](width, c.norm_eps, dtype)


NORMS = {'rms': RMSNorm, 'layer': LayerNorm}
ACTS = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
}


def _last(x: Array, ndim: int) -> Array:
  """A vector reshaped to the last of ndim axes; rank promotion is refused."""
  return x.reshape((1,) * (ndim - 1) + (-1,))


class Linear(nnx.Module):
  """x @ kernel (+ bias)."""

  def __init__(self, width_in: int, width_out: int, dtype, bias: bool = False):
    self.kernel = nnx.Param(jnp.zeros((width_in, width_out), dtype))
    self.bias = nnx.Param(jnp.zeros((width_out,), dtype)) if bias else None

  def __call__(self, x: Array) -> Array:
    y = matmul(x, self.kernel[...])
    if self.bias is None:
      return y
    return y + _last(self.bias[...], y.ndim)


class Attention(nnx.Module):
  """Attention with its projections; `write` updates the cache (see Block)."""

  def __init__(self, c: model_config.LMConfig):
    self.config = c
    dtype, bias = jnp.dtype(c.dtype), c.qkv_bias
    widths = [n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)]
    if c.fused:
      self.qkv = Linear(c.width, sum(widths), dtype, bias)
    else:
      self.q, self.k, self.v = (
        Linear(c.width, width, dtype, bias) for width in widths
      )
    self.o = Linear(c.heads * c.head_dim, c.width, dtype, c.o_bias)
    self.q_norm, self.k_norm = (
      norm(c, c.head_dim) if c.qk_norm else None for _ in 'qk'
    )

  def __call__(self, x_BTD: Array, view: attention.View, write):
    c, (B, T, _) = self.config, x_BTD.shape
    H, G, C = c.heads, c.kv_heads, c.head_dim
    if c.fused:
      qkv = jnp.split(self.qkv(x_BTD), (H * C, (H + G) * C), -1)
    else:
      qkv = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
    q_BTHC = qkv[0].reshape(B, T, H, C)
    k_BTGC, v_BTGC = (y.reshape(B, T, G, C) for y in qkv[1:])
    if self.q_norm is not None and self.k_norm is not None:
      q_BTHC, k_BTGC = self.q_norm(q_BTHC), self.k_norm(k_BTGC)
    if view.cos is not None:
      q_BTHC = attention.rotate(q_BTHC, view.cos, view.sin, c.rope_pairs)
      k_BTGC = attention.rotate(k_BTGC, view.cos, view.sin, c.rope_pairs)
    cache, layer = write(k_BTGC, v_BTGC)
    y_BTF = attention.attend(
      q_BTHC, layer, view.mask_BTS, scale=c.query_scale, cap=c.attn_softcap
    )
    return self.o(y_BTF), cache


class MLP(nnx.Module):
  """down(act(gate(x)) * up(x)) (Shazeer 2020), or down(act(up(x)))."""

  def __init__(self, c: model_config.LMConfig):
    dtype, bias = jnp.dtype(c.dtype), c.mlp_bias
    self.config = c
    if c.gated and c.fused:
      self.gate_up = Linear(c.width, 2 * c.mlp, dtype, bias)
    else:
      self.up = Linear(c.width, c.mlp, dtype, bias)
    if c.gated and not c.fused:
      self.gate = Linear(c.width, c.mlp, dtype, bias)
    self.down = Linear(c.mlp, c.width, dtype, bias)

  def __call__(self, x: Array) -> Array:
    act = ACTS[self.config.act]
    if not self.config.gated:
      return self.down(act(self.up(x)))
    if self.config.fused:
      gate, up = jnp.split(self.gate_up(x), 2, -1)
    else:
      gate, up = self.gate(x), self.up(x)
    return self.down(act(gate) * up)


class Block(nnx.Module):
  """A pre-norm transformer layer; with post_norm, norms after each part too.

  write(k_BTGC, v_BTGC) -> (cache, layer): puts this call's keys and values in
  the cache; `layer` is the KVCache to attend over.
  """

  def __init__(self, c: model_config.LMConfig):
    self.attn_norm, self.mlp_norm = norm(c, c.width), norm(c, c.width)
    self.attn, self.mlp = Attention(c), MLP(c)
    self.attn_post_norm, self.mlp_post_norm = (
      norm(c, c.width) if c.post_norm else None for _ in range(2)
    )

  def __call__(self, x_BTD: Array, view: attention.View, write):
    y_BTD, cache = self.attn(self.attn_norm(x_BTD), view, write)
    if self.attn_post_norm is not None:
      y_BTD = self.attn_post_norm(y_BTD)
    x_BTD = x_BTD + y_BTD
    y_BTD = self.mlp(self.mlp_norm(x_BTD))
    if self.mlp_post_norm is not None:
      y_BTD = self.mlp_post_norm(y_BTD)
    return x_BTD + y_BTD, cache
