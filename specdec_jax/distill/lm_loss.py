"""The distillation loss of a language model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import forward, types
from specdec_jax.distill import divergences
from specdec_jax.distill import settings as settings_lib
from specdec_jax.train import lm_loss as text_loss
from specdec_jax.train import step as step_lib

Array = jax.Array


def distilled(
  student: types.Model,
  dtype: str,
  teacher: types.Model,
  settings: settings_lib.Loss,
  *,
  remat: bool,
  ids: Sequence[int] = (),
  gather: Callable[[Any], Any] = lambda params: params,
) -> step_lib.Loss:
  """The mean divergence from the teacher's distributions along a text.

  No gradient flows through the teacher, or through how the text was sampled.
  DistillSpec (Zhou et al. 2023, https://arxiv.org/abs/2310.08461), algorithm 1.

  Args:
    student: a model of the teacher's vocabulary, or of `ids` alone; so too the
      teacher where only these columns of its head are needed.
    dtype: of the student's forward pass.
    teacher: reads every batch. Where the batch has its 'features' [B, T, D] and
      'mass' [B, T] (see teacher.Answers), only its last norm and head are run,
      and at temperature 1 its head needs only the columns of `ids`.
    settings: the divergence and its temperature.
    remat: keep only the residual stream between layers for the backward pass.
    ids: ids that the student can propose, () for all; p is not renormalised.
    gather: of the student's parameters; see train.lm_loss.gatherer.

  Returns:
    loss(params, frozen, batch, key). frozen: {'teacher': its parameters,
    'shared': those that the student takes from it}. batch: as for
    train.lm_loss.cross_entropy; each model reads the sources with its own
    encoder. Its figure 'train_alpha' is sum min(p, q).
  """
  divergence = divergences.divergence_of(settings.divergence)
  temperature = settings.temperature or 1.0
  read = text_loss.remat_layers(
    lambda params, *inputs: forward.hidden(student, gather(params), *inputs),
    remat,
  )

  def loss(params, frozen, batch, key):
    del key
    log_p = jax.lax.stop_gradient(
      teacher_log_p(teacher, frozen['teacher'], batch, temperature)
    )
    params = text_loss.in_dtype(params | frozen['shared'], dtype)
    source = text_loss.source_of(batch)
    hidden_BTD = read(params, batch['tokens'], source)
    logits_q = student.head(gather(params), hidden_BTD[:, :-1])
    log_q = jax.nn.log_softmax(logits_q / temperature, -1)
    log_p, log_q = (_of(ids, x) for x in (log_p, log_q))
    counted_BT = batch['counted'][:, 1:]
    value = text_loss.mean(divergence(log_p, log_q), counted_BT)
    alpha = text_loss.mean(divergences.alpha(log_p, log_q), counted_BT)
    return value, {'train_alpha': alpha}

  return loss


def _of(ids: Sequence[int], x: Array) -> Array:
  """The columns of these ids, () for all; x itself if it has no others."""
  if len(ids) in (0, x.shape[-1]):
    return x
  return jnp.take(x, jnp.asarray(ids, jnp.int32), axis=-1)


def teacher_log_p(
  teacher: types.Model, params: types.Params, batch, temperature: float
) -> Array:
  """log p of every next token, [B, T - 1, V], from a pass or from a record."""
  if 'features' not in batch:
    source = text_loss.source_of(batch)
    hidden_BTD = forward.hidden(teacher, params, batch['tokens'], source)
  else:
    # Features are float16, finer than bfloat16; mass was computed in float32.
    wide = jnp.promote_types(params['head'].dtype, jnp.float32)
    hidden_BTD = batch['features'].astype(wide)
  logits = teacher.head(params, hidden_BTD[:, :-1])
  if 'mass' in batch and temperature == 1:
    return logits - batch['mass'][:, :-1, None]
  return jax.nn.log_softmax(logits / temperature, -1)
