"""Norms, projections and the transformer block, as Flax NNX modules.

Modules hold parameters only: no sharding, caches or loading. Kernels are
[in, out], so that `x @ kernel` reads them at memory speed, stored as in
models.weights. A packed block makes five calls to specdec_jax.kernels, which
include norms, activations and residual streams.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specdec_jax.kernels import calls
from specdec_jax.models import attention, weights
from specdec_jax.models import cache as kv
from specdec_jax.models import config as model_config

Array = jax.Array


class Norm(nnx.Module):
  """Norms the last axis in float32 or wider: x / rms(x) * scale (Zhang &
  Sennrich 2019), or (x - mean) / deviation * scale + bias (Ba et al. 2016).

  x / rms(x) is rounded to x's dtype before the scale is applied, or after if
  the scale has a wider dtype than x.
  """

  def __init__(self, c: model_config.LMConfig, width: int):
    dtype = jnp.dtype(c.activations)
    if c.wide_norm:
      dtype = jnp.promote_types(dtype, jnp.float32)
    self.scale = nnx.Param(jnp.ones((width,), dtype))
    layer = c.norm == 'layer'
    self.bias = nnx.Param(jnp.zeros((width,), dtype)) if layer else None
    self.eps = c.norm_eps

  def __call__(self, x: Array) -> Array:
    last = lambda p: p[...].reshape((1,) * (x.ndim - 1) + (-1,))
    y, scale = x.astype(jnp.promote_types(x.dtype, jnp.float32)), self.scale
    if self.bias is not None:
      y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
    if self.bias is not None:
      return (y * last(scale) + last(self.bias)).astype(x.dtype)
    y = y.astype(jnp.promote_types(x.dtype, scale.dtype))
    return (y * last(scale)).astype(x.dtype)

  def packed(self, factor: float = 1.0) -> calls.Norm:
    """Returns the norm as the kernels take it, its scale times a factor."""
    shift = None if self.bias is None else self.bias[...]
    kind, scale = 'rms' if shift is None else 'layer', self.scale[...]
    return calls.Norm(kind, _scaled(scale, factor), shift, self.eps)


ACTS = {
  'silu': jax.nn.silu,
  'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
  'gelu': functools.partial(jax.nn.gelu, approximate=False),
  'relu': jax.nn.relu,
}


class Linear(nnx.Module):
  """Computes x @ kernel (+ bias); weights.pack keeps its `parts` apart."""

  def __init__(
    self,
    c: model_config.LMConfig,
    width_in: int,
    width_out: int,
    bias: bool = False,
    parts: int = 1,
  ):
    kernel = jnp.zeros((width_in, width_out), c.dtype)
    ends = jnp.zeros((width_out,), c.activations)
    if c.run.packed:
      kernel, ends = weights.pack(kernel, parts), calls.pad(ends, parts)
    self.packed = c.run.packed
    self.kernel = nnx.Param(kernel)
    self.bias = nnx.Param(ends) if bias else None

  def __call__(self, x: Array, norm=None, **more) -> Array:
    """Multiplies norm(x), or x, by the kernel. For `more` see weights."""
    if norm is not None and self.packed:
      more['norm'] = norm.packed()
    elif norm is not None:
      x = norm(x)
    bias = None if self.bias is None else self.bias[...]
    return weights.of(self.kernel.get_value()).linear(x, bias, **more)


def head(
  c: model_config.LMConfig,
  norm: Norm | None,
  hidden: Array,
  kernel: Any,
) -> Array:
  """Computes the logits after norm(hidden), float32 or wider. With norm None
  `hidden`, [..., D], is normed already; kernel is a matrix of models.weights.
  """
  matrix = weights.of(kernel)
  if c.run.packed:
    logits = matrix.linear(hidden, norm=norm and norm.packed())
  else:
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    x = _normed(norm, hidden).astype(hidden.dtype)
    logits = matrix.linear(x, dtype=wide)
  return attention.softcap(_scaled(logits, c.head_scale), c.logit_softcap)


class Attention(nnx.Module):
  """Attention up to the input of `o`, reading `reads` channels (0: c.width)."""

  def __init__(self, c: model_config.LMConfig, reads: int = 0):
    self.config, reads = c, reads or c.width
    widths = [n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)]
    if c.run.fused:
      self.qkv = Linear(c, reads, sum(widths), c.qkv_bias)
    else:
      self.q, self.k, self.v = (
        Linear(c, reads, width, c.qkv_bias) for width in widths
      )
    self.o = Linear(c, c.heads * c.head_dim, c.width, c.o_bias)
    self.q_norm, self.k_norm = (
      Norm(c, width if c.joint_qk_norm else c.head_dim) if c.qk_norm else None
      for width in widths[:2]
    )

  def __call__(self, x_BTD: Array, view: attention.View, write, norm=None):
    """Returns (input to `o`, cache), from norm(x); `write` as in Block."""
    c, (B, T, _) = self.config, x_BTD.shape
    H, G, C = c.heads, c.kv_heads, c.head_dim
    if c.run.packed:
      return self._packed(self.qkv(x_BTD, norm), view, write)
    x_BTD = _normed(norm, x_BTD)
    if c.run.fused:
      qkv = jnp.split(self.qkv(x_BTD), (H * C, (H + G) * C), -1)
    else:
      qkv = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
    q_norm, k_norm = self.q_norm, self.k_norm
    if c.joint_qk_norm:
      qkv = _normed(q_norm, qkv[0]), _normed(k_norm, qkv[1]), qkv[2]
    q_BTHC = qkv[0].reshape(B, T, H, C)
    k_BTGC, v_BTGC = (y.reshape(B, T, G, C) for y in qkv[1:])
    if not c.joint_qk_norm:
      q_BTHC, k_BTGC = _normed(q_norm, q_BTHC), _normed(k_norm, k_BTGC)
    if view.cos is not None:
      q_BTHC = attention.rotate(q_BTHC, view.cos, view.sin)
      k_BTGC = attention.rotate(k_BTGC, view.cos, view.sin)
    cache, layer = write(k_BTGC, v_BTGC)
    y_BTF = attention.attend(
      q_BTHC,
      layer,
      view.mask_BTS,
      scale=c.query_scale,
      cap=c.attn_softcap,
      bias_BHTS=view.bias_BHTS,
    )
    return y_BTF, cache

  def _packed(self, qkv_BTF: Array, view: attention.View, write: kv.Writer):
    c = self.config
    norms = None
    if self.q_norm is not None and self.k_norm is not None:
      norms = self.q_norm.packed(), self.k_norm.packed()
    if norms and c.joint_qk_norm:
      ends = c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim
      *qk, v_BTF = jnp.split(qkv_BTF, ends, -1)
      qk = [calls.add_norm(x, n) for x, n in zip(qk, norms, strict=True)]
      qkv_BTF, norms = jnp.concatenate([*qk, v_BTF], -1), None
    y_BTF, *cache = calls.attend(
      qkv_BTF,
      view.cos,
      view.sin,
      write.slots_BT,
      view.mask_BTS,
      *write.cache,
      heads=c.heads,
      scale=c.query_scale or c.head_dim**-0.5,
      cap=c.attn_softcap,
      norms=norms,
      bias_BHTS=view.bias_BHTS,
      at_BS=view.at_BS,
    )
    return y_BTF, kv.Panels(*cache)


class CrossAttention(nnx.Module):
  """A decoder's attention to what its encoder left, but for `o`."""

  def __init__(self, c: model_config.LMConfig):
    self.config, wide = c, c.heads * c.head_dim
    self.q, self.k, self.v = (Linear(c, c.width, wide) for _ in 'qkv')
    self.o = Linear(c, wide, c.width)

  def store(self, hidden_BID: Array, slots: int) -> kv.KVCache | kv.Panels:
    """Computes a source's keys and values; slots from I on are zero."""
    c, (B, I, _) = self.config, hidden_BID.shape

    def split(y_BIF):
      y_BHIC = jnp.swapaxes(y_BIF.reshape(B, I, c.heads, c.head_dim), 1, 2)
      return jnp.pad(y_BHIC, ((0, 0), (0, 0), (0, slots - I), (0, 0)))

    cache = kv.KVCache(split(self.k(hidden_BID)), split(self.v(hidden_BID)))
    return kv.panels(cache) if c.run.packed else cache

  def __call__(self, x_BTD: Array, norm, store: Any, mask_B1I: Array):
    """Returns the input to `o`, from norm(x)."""
    c, (B, T, _), q_BTF = self.config, x_BTD.shape, self.q(x_BTD, norm)
    if c.run.packed:
      scale = c.query_scale or c.head_dim**-0.5
      return calls.attend(
        q_BTF, None, None, None, mask_B1I, *store, heads=c.heads, scale=scale
      )[0]
    q_BTHC = q_BTF.reshape(B, T, c.heads, c.head_dim)
    return attention.attend(q_BTHC, store, mask_B1I, scale=c.query_scale)


class Dropout(NamedTuple):
  """Zeroes a share `rate` of a layer's numbers (Srivastava et al. 2014)."""

  key: Array
  rate: float

  def at(self, number) -> 'Dropout':
    """Returns the dropout for one part of a model, by its number."""
    return self._replace(key=jax.random.fold_in(self.key, number))


def drop(dropout: Dropout | None, part: int, x: Array) -> Array:
  """Drops numbers from x, with its own draws for each part; None drops none."""
  if dropout is None:
    return x
  keep = 1.0 - dropout.rate
  kept = jax.random.bernoulli(dropout.at(part).key, keep, x.shape)
  return jnp.where(kept, x / keep, 0).astype(x.dtype)


class MLP(nnx.Module):
  """Computes down(act(gate(x)) * up(x)) (Shazeer 2020), or down(act(up(x)))."""

  def __init__(self, c: model_config.LMConfig):
    self.config, bias = c, c.mlp_bias
    if c.gated and c.run.fused:
      self.gate_up = Linear(c, c.width, 2 * c.mlp, bias, parts=2)
    else:
      self.up = Linear(c, c.width, c.mlp, bias)
    if c.gated and not c.run.fused:
      self.gate = Linear(c, c.width, c.mlp, bias)
    self.down = Linear(c, c.mlp, c.width, bias)

  def __call__(self, x: Array, norm=None) -> Array:
    """Returns the input to `down`, from norm(x)."""
    c = self.config
    if c.run.packed:
      up = self.gate_up if c.gated else self.up
      return up(x, norm, gated=c.gated, act=c.act)
    x, act = _normed(norm, x), ACTS[c.act]
    if not c.gated:
      return act(self.up(x))
    if c.run.fused:
      gate, up = jnp.split(self.gate_up(x), 2, -1)
    else:
      gate, up = self.gate(x), self.up(x)
    return act(gate) * up


class Block(nnx.Module):
  """A transformer layer with norms before its parts, after them, or both.

  write(k_BTGC, v_BTGC) -> (cache, layer) puts this call's keys and values in
  the cache; `layer` is the KVCache to attend over. `reads` counts channels in
  read_BTE, if attention reads that and not the stream's norm; else 0.
  """

  def __init__(self, c: model_config.LMConfig, reads: int = 0):
    some = lambda wanted: Norm(c, c.width) if wanted else None
    self.config = c
    self.attn_norm = some(c.pre_norm and not reads)
    self.mlp_norm = some(c.pre_norm)
    self.attn, self.mlp = Attention(c, reads), MLP(c)
    if c.encoder is not None:
      self.cross_norm, self.cross_attn = Norm(c, c.width), CrossAttention(c)
    self.attn_post_norm = some(c.post_norm)
    self.mlp_post_norm = some(c.post_norm)

  def __call__(self, x_BTD: Array, view: attention.View, write, read_BTE=None):
    scale = self.config.residual_scale

    def add(x_BTD, part: int, linear: Linear, y_BTF, norm=None, scale=1.0):
      """Returns x + scale * norm(linear(y)), with dropout."""
      packed = self.config.run.packed
      if packed and norm is None and scale == 1:
        return linear(y_BTF, add=x_BTD)
      if packed and norm is not None:
        return calls.add_norm(linear(y_BTF), norm.packed(scale), x_BTD)
      y_BTD = _scaled(_normed(norm, linear(y_BTF)), scale)
      return x_BTD + drop(view.dropout, part, y_BTD)

    read_BTE = x_BTD if read_BTE is None else read_BTE
    y_BTF, cache = self.attn(read_BTE, view, write, self.attn_norm)
    x_BTD = add(x_BTD, 0, self.attn.o, y_BTF, self.attn_post_norm, scale)
    if view.source is not None:
      y_BTF = self.cross_attn(x_BTD, self.cross_norm, *view.source)
      x_BTD = add(x_BTD, 1, self.cross_attn.o, y_BTF)
    y_BTF = self.mlp(x_BTD, self.mlp_norm)
    return add(x_BTD, 2, self.mlp.down, y_BTF, self.mlp_post_norm, scale), cache


def _normed(norm, x: Array) -> Array:
  return x if norm is None else norm(x)


def _scaled(x: Array, scale: float) -> Array:
  return x if scale == 1 else x * scale
