"""Losses of language models: next-token training and distillation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import forward, types
from specdec_jax.distill import divergences
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import step as step_lib

Array = jax.Array
# What a student may share with its teacher, frozen.
SHARED = ('embed', 'head')


def hidden(model: types.Model, params: types.Params, tokens_BT: Array) -> Array:
  """A whole text in one pass: [B, T, D]."""
  B, T = tokens_BT.shape
  start_B = jnp.zeros((B,), jnp.int32)
  cache = model.init_cache(B, T)
  return forward.read(model, params, tokens_BT, start_B, cache, slots=T)[0]


def in_dtype(params: types.Params, dtype: str) -> types.Params:
  """Parameters as the forward pass computes with them; masters stay float32."""
  return jax.tree.map(lambda x: x.astype(dtype), params)


def cross_entropy(
  config: model_config.LMConfig, *, ids: int, remat: bool, constrain=None
) -> step_lib.Loss:
  """The mean of -log q of the next token, in nats.

  ids, constrain: as for lm.make.
  batch: 'tokens' [B, T]; 'counted' [B, T], true where the token counts.
  """
  model = lm.make(config, ids=ids, constrain=constrain)
  read = _remat(lambda p, t: hidden(model, p, t), remat)

  def loss(params, frozen, batch, key):
    del key
    params = in_dtype(params | frozen, config.dtype)
    tokens_BT = batch['tokens']
    logits = model.head(params, read(params, tokens_BT)[:, :-1])
    log_q = jax.nn.log_softmax(logits, -1)
    found = jnp.take_along_axis(log_q, tokens_BT[:, 1:, None], -1)[..., 0]
    return -_mean(found, batch['counted'][:, 1:]), {}

  return loss


def distilled(
  student: types.Model,
  dtype: str,
  teacher: types.Model,
  divergence: divergences.Divergence,
  *,
  temperature: float,
  remat: bool,
  ids: Sequence[int] = (),
) -> step_lib.Loss:
  """The mean divergence from the teacher's law, along the tokens of a batch.

  Both laws at the serving temperature (1 where that is 0, which has no slope);
  no gradient goes through the teacher, or through how tokens were drawn.
  DistillSpec (Zhou et al. 2023, https://arxiv.org/abs/2310.08461), algorithm 1.

  student: a model of the teacher's vocabulary, dtype: what it computes in.
  ids: those that it can propose, all if (); the teacher's law keeps its mass.
  frozen: {'teacher': its parameters, 'shared': what the student has of them}.
  batch: as cross_entropy; with 'features' [B, T, D] and 'mass' [B, T] the
  teacher reads nothing: they are its last layer's as train.teacher.Answers has
  them. teacher: with them and at temperature 1, one that proposes ids alone
  will do. The figures have 'train_alpha', sum min(p, q).
  """
  read = _remat(lambda p, t: hidden(student, p, t), remat)
  t = temperature or 1.0

  def loss(params, frozen, batch, key):
    del key
    tokens_BT = batch['tokens']
    log_p = jax.lax.stop_gradient(_law(teacher, frozen['teacher'], batch, t))
    own = in_dtype(params | frozen['shared'], dtype)
    logits_q = student.head(own, read(own, tokens_BT)[:, :-1])
    log_q = jax.nn.log_softmax(logits_q / t, -1)
    if ids:
      few = jnp.asarray(ids, jnp.int32)
      log_p, log_q = (jnp.take(x, few, axis=-1) for x in (log_p, log_q))
    counted_BT = batch['counted'][:, 1:]
    value = _mean(divergence(log_p, log_q), counted_BT)
    alpha = _mean(divergences.alpha(log_p, log_q), counted_BT)
    return value, {'train_alpha': alpha}

  return loss


def _law(teacher: types.Model, params, batch, temperature: float) -> Array:
  """log p of every next token, [B, T - 1, V], read or recorded."""
  if 'features' not in batch:
    found_BTD = hidden(teacher, params, batch['tokens'])
  else:
    # Wide, as the record is finer than bfloat16 and its mass of the finer one.
    wide = jnp.promote_types(params['head'].dtype, jnp.float32)
    found_BTD = batch['features'].astype(wide)
  logits = teacher.head(params, found_BTD[:, :-1])
  if 'mass' in batch and temperature == 1:
    return logits - batch['mass'][:, :-1, None]
  return jax.nn.log_softmax(logits / temperature, -1)


def pruned(
  config: model_config.LMConfig,
  params: types.Params,
  layers: Sequence[int],
) -> tuple[model_config.LMConfig, types.Params]:
  """(settings, parameters) of a student of some layers of its teacher.

  Raises:
    ValueError: layers that the teacher does not have, or scanned ones.
  """
  if config.scan_layers:
    raise ValueError('pruning takes a teacher loaded with scan_layers=False')
  if not layers or not set(layers) <= set(range(config.depth)):
    raise ValueError(
      f'layers={tuple(layers)}: allowed are those of the teacher, 0 to '
      f'{config.depth - 1}'
    )
  windows_ = tuple(config.windows[i % len(config.windows)] for i in layers)
  if len(set(windows_)) == 1:
    windows_ = windows_[:1]
  kept = {str(n): params['layers'][str(i)] for n, i in enumerate(layers)}
  ends = {name: x for name, x in params.items() if name != 'layers'}
  own = dataclasses.replace(config, depth=len(layers), windows=windows_)
  return own, ends | {'layers': kept}


def shared(params: types.Params, share: bool) -> tuple[Any, Any]:
  """(what is trained, what is not) of a student's parameters."""
  frozen = {n: x for n, x in params.items() if share and n in SHARED}
  return {n: x for n, x in params.items() if n not in frozen}, frozen


def _remat(read, remat: bool):
  """Keeps only the residual stream between layers for the backward pass."""
  if not remat:
    return read
  policy = jax.checkpoint_policies.save_only_these_names('residual')
  return jax.checkpoint(read, policy=policy)


def _mean(x_BT: Array, counted_BT: Array) -> Array:
  count = jnp.maximum(jnp.sum(counted_BT), 1)
  return jnp.sum(jnp.where(counted_BT, x_BT, 0)) / count
