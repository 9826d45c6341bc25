"""The loss of a language model that learns from a teacher, and its start."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.distill import divergences
from specdec_jax.models import config as model_config
from specdec_jax.train import lm_loss as text_loss
from specdec_jax.train import step as step_lib

Array = jax.Array
# What a student may share with its teacher, frozen.
SHARED = ('embed', 'head')


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
  read = text_loss.remat_layers(
    lambda p, t: text_loss.hidden(student, p, t), remat
  )
  t = temperature or 1.0

  def loss(params, frozen, batch, key):
    del key
    tokens_BT = batch['tokens']
    log_p = jax.lax.stop_gradient(_law(teacher, frozen['teacher'], batch, t))
    own = text_loss.in_dtype(params | frozen['shared'], dtype)
    logits_q = student.head(own, read(own, tokens_BT)[:, :-1])
    log_q = jax.nn.log_softmax(logits_q / t, -1)
    if ids:
      few = jnp.asarray(ids, jnp.int32)
      log_p, log_q = (jnp.take(x, few, axis=-1) for x in (log_p, log_q))
    counted_BT = batch['counted'][:, 1:]
    value = text_loss.mean(divergence(log_p, log_q), counted_BT)
    alpha = text_loss.mean(divergences.alpha(log_p, log_q), counted_BT)
    return value, {'train_alpha': alpha}

  return loss


def _law(teacher: types.Model, params, batch, temperature: float) -> Array:
  """log p of every next token, [B, T - 1, V], read or recorded."""
  if 'features' not in batch:
    found_BTD = text_loss.hidden(teacher, params, batch['tokens'])
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
