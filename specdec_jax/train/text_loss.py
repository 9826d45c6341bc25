"""Computes a language model's loss on text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import forward, sharding, types
from specdec_jax.models import config as model_config
from specdec_jax.models import layers, lm
from specdec_jax.train import step as step_lib

Array = jax.Array


def cross_entropy(
  config: model_config.LMConfig,
  *,
  ids: int,
  remat: bool,
  layout: sharding.Layout | None = None,
  dropout: float = 0.0,
) -> step_lib.Loss:
  """Makes the mean of -log q for the next token, in nats.

  Batches have 'tokens' [B, T], 'counted' [B, T], true where the loss includes
  that token's prediction, and for an encoder 'source' [B, I] and
  'source_length' [B].

  config: its dtype is the forward pass's. ids: as for lm.make.
  remat: compute layers again in the backward pass, to save memory.
  """
  model = lm.make(config, ids=ids, constrain=layout and layout.constrain)
  gather = gatherer(layout)

  def states(params, key, *inputs):
    params = gather(params)
    if dropout:  # of embeddings, and of what each part of a layer adds
      params = params | {'dropout': layers.Dropout(key, dropout)}
    return forward.hidden(model, params, *inputs)

  if remat:  # of layers only the residual streams are stored
    policy = jax.checkpoint_policies.save_only_these_names('residual')
    states = jax.checkpoint(states, policy=policy)

  def loss(params, frozen, batch, key):
    params = in_dtype(params | frozen, config.dtype)
    tokens_BT = batch['tokens']
    hidden_BTD = states(params, key, tokens_BT, source_of(batch))
    logits = model.head(gather(params), hidden_BTD[:, :-1])
    log_q = jax.nn.log_softmax(logits, -1)
    found = jnp.take_along_axis(log_q, tokens_BT[:, 1:, None], -1)[..., 0]
    return -mean(found, batch['counted'][:, 1:]), {}

  return loss


def gatherer(layout: sharding.Layout | None) -> Callable[[Any], Any]:
  """Returns Layout.gather, to call where parameters are used: with remat the
  backward pass gathers them again, layer by layer."""
  return (lambda params: params) if layout is None else layout.gather


def source_of(batch) -> types.Source | None:
  """Returns a batch's sources; None if it has none."""
  if 'source' not in batch:
    return None
  return types.Source(batch['source'], batch['source_length'])


def in_dtype(params: types.Params, dtype: str) -> types.Params:
  """Casts parameters to the forward pass's dtype."""
  return jax.tree.map(lambda x: x.astype(dtype), params)


def mean(x_BT: Array, counted_BT: Array) -> Array:
  """Averages x where counted is true; 0 if it never is."""
  count = jnp.maximum(jnp.sum(counted_BT), 1)
  return jnp.sum(jnp.where(counted_BT, x_BT, 0)) / count
