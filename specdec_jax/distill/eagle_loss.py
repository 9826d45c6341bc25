"""The loss of an EAGLE draft, over several draft steps.

In decoding only the first token of a window is drafted from the target's
features; later ones are drafted from the draft's own hidden states. Training
does the same: step s reads the hidden states of step s - 1, one token later,
and attends to the keys that its chain of steps would have written (EAGLE-3's
training-time test, https://arxiv.org/abs/2503.01840, section 3.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.distill import divergences, sections
from specdec_jax.models import attention, eagle
from specdec_jax.models import cache as kv
from specdec_jax.train import step as step_lib
from specdec_jax.train import text_loss

Array = jax.Array


def loss(
  config: eagle.EagleConfig,
  target: types.Model,
  settings: sections.Loss,
  gather: Callable[[Any], Any] = lambda params: params,
) -> step_lib.Loss:
  """Makes the mean divergence from the teacher over the steps of a chain.

  Args:
    config: of the draft.
    target: the teacher; only its embedding is run.
    settings: the divergence and the weights of the steps.
    gather: of the draft's parameters; see train.text_loss.gatherer.

  Returns:
    loss(params, frozen, batch, key). frozen: {'target': the teacher's
    parameters, 'head': its columns for the draft's vocabulary}. batch: of
    teacher.rows, with the features of config.taps. Its figures 'train_alpha'
    and 'train_top' (the argmax agrees) have one entry for each step of the
    chain.
  """
  embed = target.embed
  assert embed is not None
  divergence = divergences.divergence_of(settings.divergence)
  temperature = settings.temperature or 1.0

  def value(params, frozen, batch, key):
    params = gather(eagle.cast(config, params))
    tokens_BT = batch['tokens']
    features_BTE = batch['features'].astype(jnp.float32)
    positions_BT = jnp.broadcast_to(
      jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape
    )
    tokens_BTD = embed(frozen['target'], tokens_BT, positions_BT)
    log_p_BTR = teacher_log_p(config, frozen, batch, temperature)
    if settings.noise:
      noise = jax.random.uniform(key, features_BTE.shape, minval=-1, maxval=1)
      features_BTE += settings.noise * noise
    weights = {'layer': params, 'head': frozen['head']}
    # Index t predicts the token at t + 1.
    mean = lambda x_BT: text_loss.mean(x_BT[:, :-1], batch['counted'][:, 1:])
    total, norm, alphas, tops = jnp.zeros(()), 0.0, [], []
    for step, hidden_BTD in enumerate(
      steps(config, params, tokens_BTD, features_BTE, settings.unroll)
    ):
      logits_BTR = eagle.reduced(config, weights, hidden_BTD)
      log_q_BTR = jax.nn.log_softmax(logits_BTR / temperature, -1)
      total += settings.decay**step * mean(divergence(log_p_BTR, log_q_BTR))
      norm += settings.decay**step
      alphas.append(mean(divergences.alpha(log_p_BTR, log_q_BTR)))
      tops.append(mean(jnp.argmax(log_q_BTR, -1) == jnp.argmax(log_p_BTR, -1)))
    figures = {'train_alpha': jnp.stack(alphas), 'train_top': jnp.stack(tops)}
    return total / norm, figures

  return value


def teacher_log_p(
  config: eagle.EagleConfig, frozen, batch, temperature: float
) -> Array:
  """log p of the draft's vocabulary after every token, [B, T, R].

  The recorded mass belongs to temperature 1. At another one p is normalised
  over the draft's vocabulary instead.
  """
  head = {'layer': {'norm': frozen['target']['norm']}, 'head': frozen['head']}
  features_BTE = batch['features'].astype(jnp.float32)
  last_BTD = jnp.split(features_BTE, len(config.taps), -1)[-1]
  logits_BTR = eagle.reduced(config, head, last_BTD)
  if temperature != 1:
    return jax.nn.log_softmax(logits_BTR / temperature, -1)
  return logits_BTR - batch['mass'][..., None]


def steps(
  config: eagle.EagleConfig,
  layer: types.Params,
  tokens_BTD: Array,
  features_BTE: Array,
  count: int,
) -> list[Array]:
  """Computes the draft's hidden states at each of `count` steps: [B, T, D].

  layer: the draft's parameters. tokens_BTD, features_BTE: the target's
  embedding and features of every token.

  Worked example, step 1 (the second token of a window) at index 5: it reads
  token 5 and step 0's hidden state of index 4, and attends to step 0's keys of
  indices 0 to 4 and to its own key of index 5.
  """
  module = eagle.merge(config, layer)
  B, T, _ = tokens_BTD.shape
  positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
  shift = lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :T]
  feature_BTD, out = module.fused(shift(features_BTE)), []
  writes = [_Keys([]) for _ in range(config.block.depth)]
  for step in range(count):
    mask_TS = _mask(T, step, 0 if config.reads_first else 1)
    mask_BTS = jnp.broadcast_to(mask_TS[None], (B, *mask_TS.shape))
    views = attention.views(config.block, positions_BT, mask_BTS)
    hidden_BTD, _ = module(tokens_BTD, feature_BTD, views, writes)
    out.append(hidden_BTD)
    feature_BTD = shift(hidden_BTD)
  return out


class _Keys(NamedTuple):
  """What a layer attends to: the keys and values of every step so far."""

  each: list[tuple[Array, Array]]

  def __call__(self, k_BTGC: Array, v_BTGC: Array):
    self.each.append((k_BTGC, v_BTGC))
    k, v = (jnp.concatenate(x, 1) for x in zip(*self.each, strict=True))
    return None, kv.KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))


def _mask(T: int, step: int, first: int) -> Array:
  """[T, T * (step + 1)]: the keys of each step that an index attends to.

  first: the first index that others attend to.
  """
  query_T1, key_1T = jnp.arange(T)[:, None], jnp.arange(T)[None]
  visible = [
    (key_1T <= query_T1 - step) & (key_1T >= jnp.minimum(first, query_T1))
  ]
  visible += [key_1T == query_T1 - step + back for back in range(1, step + 1)]
  return jnp.concatenate(visible, 1)
