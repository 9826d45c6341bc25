"""The loss of an EAGLE draft over several of its own steps.

In decoding only the first token of a window is drafted from the target's
feature; the others from the draft's own hidden state. Training does the same:
step s reads the hidden states of step s - 1, one token on, and attends to the
keys of the steps that its chain would have come by (EAGLE-3's training-time
test, https://arxiv.org/abs/2503.01840, section 3.2).
"""

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.distill import divergences
from specdec_jax.models import attention, eagle
from specdec_jax.models import cache as kv
from specdec_jax.models import config as model_config

Array = jax.Array


def steps(
  config: eagle.EagleConfig,
  layer: types.Params,
  tokens_BTD: Array,
  features_BTE: Array,
  count: int,
) -> list[Array]:
  """The draft's hidden states at each of `count` steps, [B, T, D] each.

  Args:
    config: of the draft.
    layer: its parameters (weights.draft['layer']).
    tokens_BTD: the target's embedding of every token.
    features_BTE: the target's features of every token.
    count: draft tokens in a chain, at least 1.

  Worked example, step 1 (the second token of a window) at index 5: it reads
  token 5 and step 0's hidden state of index 4, and sees step 0's keys of
  indices 0 to 4 and its own key of index 5.
  """
  module = eagle.merge(config, layer)
  B, T, _ = tokens_BTD.shape
  positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
  after = lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :T]
  feature_BTD, keys, out = module.fused(after(features_BTE)), [], []
  for step in range(count):
    mask_BTS = jnp.broadcast_to(_mask(T, step)[None], (B, T, T * (step + 1)))

    def write(k_BTGC, v_BTGC):
      keys.append((k_BTGC, v_BTGC))
      k, v = (jnp.concatenate(x, 1) for x in zip(*keys, strict=True))
      return None, kv.KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))

    view = _view(config.block, positions_BT, mask_BTS)
    hidden_BTD, _ = module(tokens_BTD, feature_BTD, view, write)
    out.append(hidden_BTD)
    feature_BTD = after(hidden_BTD)
  return out


def _mask(T: int, step: int) -> Array:
  """[T, T * (step + 1)]: which keys of which step an index sees."""
  query_T1, key_1T = jnp.arange(T)[:, None], jnp.arange(T)[None]
  seen = [key_1T <= query_T1 - step]
  seen += [key_1T == query_T1 - step + back for back in range(1, step + 1)]
  return jnp.concatenate(seen, 1)


def _view(config: model_config.LMConfig, positions_BT, mask_BTS):
  if config.position == 'learned':
    return attention.View(None, None, mask_BTS)
  return attention.View(*attention.rotation(positions_BT, config), mask_BTS)


def teacher_law(
  config: eagle.EagleConfig,
  head: types.Params,
  features_BTE: Array,
  mass_BT: Array,
  temperature: float,
) -> Array:
  """log p of the draft's vocabulary after every token, [B, T, R].

  head: the target's, as parameters that eagle.reduced reads ({'layer':
  {'norm'}, 'head'}). mass_BT: log-sum-exp of all its logits at temperature 1;
  at another temperature p is normalised on the draft's vocabulary.
  """
  last_BTD = jnp.split(features_BTE, len(config.taps), -1)[-1]
  logits = eagle.reduced(config, head, last_BTD)
  if temperature != 1:
    return jax.nn.log_softmax(logits / temperature, -1)
  return logits - mass_BT[..., None]


def loss(
  config: eagle.EagleConfig,
  divergence: divergences.Divergence,
  weights: dict[str, Array],
  log_p_BTR: Array,
  hidden: list[Array],
  counted_BT: Array,
  *,
  temperature: float,
  decay: float,
):
  """(loss, alpha of each step, top of each step): means over what is counted.

  log_p_BTR and counted_BT are of the token read; decay: what a step weighs, of
  the one before.
  """
  total, count = jnp.zeros(()), jnp.maximum(jnp.sum(counted_BT), 1)
  mean = lambda x_BT: jnp.sum(jnp.where(counted_BT, x_BT, 0)) / count
  alphas, tops = [], []
  best_BT = jnp.argmax(log_p_BTR, -1)
  for step, hidden_BTD in enumerate(hidden):
    logits = eagle.reduced(config, weights, hidden_BTD)
    log_q_BTR = jax.nn.log_softmax(logits / temperature, -1)
    total += decay**step * mean(divergence(log_p_BTR, log_q_BTR))
    alphas.append(mean(divergences.alpha(log_p_BTR, log_q_BTR)))
    tops.append(mean(jnp.argmax(log_q_BTR, -1) == best_BT))
  norm = sum(decay**step for step in range(len(hidden)))
  return total / norm, jnp.stack(alphas), jnp.stack(tops)
