"""The encoder of an encoder-decoder, and what the decoder keeps of a source."""

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

  own: the decoder's keys and values, as of a model without an encoder.
  store: keys and values of the source: a kv.KVCache of I slots for each layer,
    stacked along axis 1 if the layers are scanned. Written once a request.
  mask_B1I: true where the source has a token.
  """

  own: Any
  store: Any = None
  mask_B1I: Array | None = None


def compact(cache: Cache, from_BK: Array, to_BK: Array) -> Cache:
  """Moves slots as types.Model.compact; those of the source stay."""
  return cache._replace(own=kv.compact(cache.own, from_BK, to_BK))


def hidden(
  c: model_config.LMConfig,
  modules: Any,
  params: types.Params,
  x_BID: Array,
  mask_B1I: Array,
  dropout: layers.Dropout | None = None,
) -> Array:
  """Computes hidden states of a source, as wide as its mask; 0 past x_BID.

  c, modules, params: of the encoder; see lm._modules.
  x_BID: embeddings of the source, or of the beginning that has all of it.
  mask_B1I: true where it has a token.
  """
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
  """Returns a function that calls run(width) with a width for every source.

  A pass of the CPU kernels costs by the row, and most sources are shorter than
  the buffer, which holds the longest: a quarter or a half of it may do.
  """
  widths = [slots]
  if c.run.packed:
    widths = sorted({slots // 4 or 1, slots // 2 or 1, slots})
  longest = jnp.max(lengths_B)
  enough = sum(jnp.int32(longest > width) for width in widths[:-1])
  return lambda run: jax.lax.switch(
    enough, [functools.partial(run, width) for width in widths]
  )
