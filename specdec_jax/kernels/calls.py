"""Calls the CPU kernels in rows.c from JAX, in the layout that they read.

A kernel [K, N] is packed into panels [N / WIDE, K, WIDE], N padded with zeros,
so that a product reads it in one stream. A bfloat16 panel pairs the columns i
and i + WIDE / 2. All other arrays are float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.kernels import library

Array = jax.Array

WIDE = library.WIDE
_ACTS = {'none': 0, 'silu': 1, 'gelu_tanh': 2, 'gelu': 3, 'relu': 4}
_NORMS = {'none': 0, 'rms': 1, 'layer': 2}


class Norm(NamedTuple):
  """A norm: its kind, scale [K], shift [K] or None, and epsilon."""

  kind: str
  scale: Array
  shift: Array | None
  eps: float


def pack(kernel_KN: Array, parts: int = 1) -> Array:
  """Packs a kernel; `parts` kernels side by side are padded one by one."""
  K, N = kernel_KN.shape
  each_KPN = kernel_KN.reshape(K, parts, -1)
  padded = jnp.pad(each_KPN, ((0, 0), (0, 0), (0, -(N // parts) % WIDE)))
  if kernel_KN.dtype == jnp.bfloat16:
    x_KPIJ = padded.reshape(K, -1, 2, WIDE // 2)
    return jnp.transpose(x_KPIJ, (1, 0, 3, 2)).reshape(-1, K, WIDE)
  return jnp.moveaxis(padded.reshape(K, -1, WIDE), 1, 0)


def pad(bias_N: Array, parts: int = 1, wide: int = WIDE) -> Array:
  """Pads a bias as pack pads columns, in float32; panels have `wide` each."""
  each_PN = bias_N.reshape(parts, -1)
  padded = jnp.pad(each_PN, ((0, 0), (0, -each_PN.shape[1] % wide)))
  return padded.reshape(-1).astype(jnp.float32)


def places(columns: int, parts: int, padded: int) -> Array:
  """Returns where kernels' columns lie among their panels' columns."""
  first = jnp.arange(parts)[:, None] * (padded // parts)
  return (first + jnp.arange(columns // parts)[None]).reshape(-1)


def columns_of(packed: Array, ids: Array) -> Array:
  """Reads a kernel's columns, [K, *ids.shape], from its panels."""
  packed = jnp.asarray(packed)
  column = ids % WIDE
  if packed.dtype == jnp.bfloat16:
    half = WIDE // 2
    column = column % half * 2 + column // half
  x = packed.at[ids // WIDE, :, column].get(mode='clip')
  return jnp.moveaxis(x, -1, 0)


def given(x: Array | None) -> Array:
  """Replaces None, an argument left out, by no rows."""
  return jnp.zeros((0,), jnp.float32) if x is None else x


def linear(x: Array, packed: Array, columns: int, **around) -> Array:
  """Returns add + act(norm(x) @ kernel + bias), [..., columns] float32.

  x: [..., K] float32.
  around: norm: a Norm, for x. bias: padded as by `pad`. add: a residual stream,
    [..., N]. act: in _ACTS. gated: act(gate) * up, where packed holds both.
  """
  return product('specdec_linear', x, packed, columns, **around)[0]


def product(
  target: str,
  x: Array,
  packed: Array,
  columns: int,
  *arrays: Array,
  also: Sequence[jax.ShapeDtypeStruct] = (),
  norm: Norm | None = None,
  bias: Array | None = None,
  add: Array | None = None,
  act: str = 'none',
  gated: bool = False,
  **more,
) -> list[Array]:
  """Calls the handler with this name, which takes these arrays last, and `more`
  attributes; returns [linear's result, *also]."""
  x_MK = x.reshape(-1, x.shape[-1])
  shape = (x_MK.shape[0], columns)
  made = jax.ShapeDtypeStruct(shape, jnp.float32)
  y_MN, *others = jax.ffi.ffi_call(target, [made, *also])(
    x_MK,
    packed,
    *_arrays(norm),
    given(bias),
    given(None if add is None else add.reshape(shape)),
    *arrays,
    norm=np.int32(_NORMS[norm.kind if norm else 'none']),
    eps=np.float32(norm.eps if norm else 0),
    act=np.int32(_ACTS[act]),
    gated=np.int32(gated),
    **more,
  )
  return [y_MN.reshape(*x.shape[:-1], columns), *others]


def add_norm(x: Array, norm: Norm, add: Array | None = None) -> Array:
  """Returns add + norm(x), or norm(x) alone, [..., K] float32."""
  x_MK = x.reshape(-1, x.shape[-1])
  call = jax.ffi.ffi_call(
    'specdec_norm', jax.ShapeDtypeStruct(x_MK.shape, jnp.float32)
  )
  y_MK = call(
    x_MK,
    *_arrays(norm),
    given(None if add is None else add.reshape(x_MK.shape)),
    norm=np.int32(_NORMS[norm.kind]),
    eps=np.float32(norm.eps),
  )
  return y_MK.reshape(x.shape)


def cache_shapes(B: int, G: int, S: int, C: int):
  """Returns the shapes of keys (panels of slots) and values (of channels)."""
  across, down = -(-S // WIDE), -(-C // WIDE)
  return (B, G, across, C, WIDE), (B, G, down, across * WIDE, WIDE)


def attend(
  qkv_BTF: Array,
  cos: Array | None,
  sin: Array | None,
  slots_BT: Array | None,
  mask_BTS: Array,
  keys: Array,
  values: Array,
  *,
  heads: int,
  scale: float,
  cap: float | None = None,
  norms: tuple[Norm, Norm] | None = None,
  bias_BHTS: Array | None = None,
  at_BS: Array | None = None,
) -> list[Array]:
  """Writes keys and values to the cache and attends, as models.attention.

  Returns [y_BTF, keys, values], without slots_BT [y_BTF].

  qkv_BTF: queries, keys and values, F = (H + 2 G) * C.
  cos, sin: rotary angles, [B, T, 1, C / 2]; None: not rotated.
  slots_BT: where keys and values go; a slot >= S is dropped. None: qkv_BTF has
    only queries, F = H * C, and nothing is written.
  keys, values: one layer's (cache_shapes); their memory is reused.
  scale, cap: multiplies the scores; soft cap of the scaled ones.
  norms: RMS norms for queries and for keys.
  at_BS: each slot's position; None: its index.
  """
  B, T = qkv_BTF.shape[:2]
  C, S = keys.shape[-2], mask_BTS.shape[-1]
  out = [jax.ShapeDtypeStruct((B * T, heads * C), jnp.float32)]
  if slots_BT is None:
    aliases, slots_BT = {}, jnp.zeros((B, T), jnp.int32)
  else:
    aliases = {7: 1, 8: 2}
    out += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)]
  call = jax.ffi.ffi_call('specdec_attend', out, input_output_aliases=aliases)
  y, *cache = call(
    qkv_BTF.reshape(B * T, -1),
    _whole(cos, (B, T, 1, C // 2)),
    _whole(sin, (B, T, 1, C // 2)),
    slots_BT.astype(jnp.int32),
    jnp.broadcast_to(mask_BTS, (B, T, S)),
    *(given(norms[i].scale if norms else None) for i in range(2)),
    keys,
    values,
    _whole(bias_BHTS, (B, heads, T, S)),
    *([] if at_BS is None else [at_BS.astype(jnp.int32)]),
    scale=np.float32(scale),
    cap=np.float32(cap or 0),
    eps=np.float32(norms[0].eps if norms else 0),
  )
  return [y.reshape(B, T, -1), *cache]


def _whole(x: Array | None, shape: tuple[int, ...]) -> Array:
  """Broadcasts an argument, in float32 under x64 too: the kernel reads every
  number."""
  if x is None:
    return given(x)
  return jnp.broadcast_to(x, shape).astype(jnp.float32)


def _arrays(norm: Norm | None) -> tuple[Array, Array]:
  return given(norm and norm.scale), given(norm and norm.shift)
