"""Encodes a source, and keeps what the decoder reads of it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from specdec_jax import types
from specdec_jax.models import attention, layers
from specdec_jax.models import cache as kv
from specdec_jax.models import config as model_config

Array = jax.Array


class Cache(NamedTuple):
  """The cache of a decoder with an encoder.

  own: the decoder's, as without an encoder.
  store: the source's keys and values, written once a request: a kv.KVCache with
    I slots a layer, stacked along axis 1 if the layers are scanned.
  mask_B1I: true where the source has a token.
  """

  own: Any
  store: Any = None
  mask_B1I: Array | None = None


def compact(cache: Cache, from_BK: Array, to_BK: Array) -> Cache:
  """Moves slots as types.Model.compact; the source's stay."""
  return cache._replace(own=kv.compact(cache.own, from_BK, to_BK))


def hidden(
  c: model_config.LMConfig,
  modules: Any,
  params: types.Params,
  x_BID: Array,
  mask_B1I: Array,
  dropout: layers.Dropout | None = None,
) -> Array:
  """Computes a source's hidden states, as wide as its mask; 0 past x_BID. x_BID
  embeds the source, or the beginning that has all of it. c, modules (see
  lm._modules) and params are the encoder's."""
  (graphdef, _), (ends_def, _) = modules
  leaves = {name: x for name, x in params.items() if name != 'layers'}
  ends = nnx.merge(ends_def, nnx.State(leaves))
  (B, I, _), slots = x_BID.shape, mask_B1I.shape[-1]
  at_BI = jnp.broadcast_to(jnp.arange(I)[None], (B, I))
  mask_BII = jnp.broadcast_to(mask_B1I[..., :I], (B, I, I))
  views = attention.views(c, at_BI, mask_BII, table_XH=ends.relative[...])
  (view,) = views.values()

  def layer(x_BID, numbered):
    i, layer_params = numbered
    block = nnx.merge(graphdef, nnx.State(layer_params))
    write = kv.Writer(kv.empty(c, B, I), at_BI)
    own = view._replace(dropout=dropout and dropout.at(i))
    return checkpoint_name(block(x_BID, own, write)[0], 'residual'), None

  if c.run.scan_layers:
    numbered = jnp.arange(c.depth), params['layers']
    x_BID, _ = jax.lax.scan(layer, x_BID, numbered)
  else:
    for i in range(c.depth):
      x_BID, _ = layer(x_BID, (i, params['layers'][str(i)]))
  return jnp.pad(ends.norm(x_BID), ((0, 0), (0, slots - I), (0, 0)))


def narrowest(c: model_config.LMConfig, lengths_B: Array, slots: int):
  """Returns a function that calls run(width), wide enough for every source. The
  CPU kernels cost by the row, and most sources are shorter than the buffer,
  which holds the longest: a quarter or a half may do."""
  widths = [slots]
  if c.run.packed:
    widths = sorted({slots // 4 or 1, slots // 2 or 1, slots})
  longest = jnp.max(lengths_B)
  enough = sum(jnp.int32(longest > width) for width in widths[:-1])
  return lambda run: jax.lax.switch(
    enough, [functools.partial(run, width) for width in widths]
  )
