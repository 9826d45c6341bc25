"""Losses for drafts on the teacher's hidden states.

In decoding only a window's first token is drafted from the target's features;
EAGLE and MTP draft later ones from their own hidden states. Training does the
same: step s reads the hidden states of step s - 1, one token later, and attends
to the keys that its chain of steps would have written (EAGLE-3's training-time
test, https://arxiv.org/abs/2503.01840, section 3.2). DFlash drafts a window
from masks in one pass, and trains on blocks of a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.distill import sections, students
from specdec_jax.models import attention, eagle, lm
from specdec_jax.models import cache as kv
from specdec_jax.train import step as step_lib

Array = jax.Array


def drafting(config: eagle.EagleConfig, params, gather) -> dict[str, Any]:
  """Casts what is trained to the computing dtype: 'layer', perhaps 'head'."""
  layer = {n: x for n, x in params.items() if n != 'head'}
  own = {n: params[n].astype(config.block.dtype) for n in {*params} - {*layer}}
  cast = lambda x, s: x.astype(s.dtype)
  layer = jax.tree.map(cast, layer, lm.nest(eagle.shapes(config)))
  return gather(own) | {'layer': gather(layer)}


def unrolled(
  config: eagle.EagleConfig,
  target: types.Model,
  settings: sections.Loss,
  gather: Callable[[Any], Any] = lambda params: params,
) -> step_lib.Loss:
  """Makes the mean divergence from the teacher over a chain's steps.

  The teacher, `target`, runs only its embedding and last norm.

  frozen: {'target': the teacher's, 'head': its columns for the draft's ids}.
  batch: teacher.rows', with features of config.taps and the last layer.
  """
  embed = target.embed
  assert embed is not None

  def value(params, frozen, batch, key):
    weights = frozen | drafting(config, params, gather)
    tokens_BT = batch['tokens']
    features_BTE = students.features(batch, settings.noise, key)
    tokens_BTD = embed(frozen['target'], tokens_BT, _positions(tokens_BT))
    log_p_BTR = teacher_log_p(config, frozen, batch, settings.temperature)
    read_BTE = features_BTE[..., : config.features]
    counted = batch['counted'][:, 1:]
    if config.tap_norm == 'none':  # an MTP reads what the teacher's head reads
      assert target.norm is not None
      read_BTE = target.norm(frozen['target'], read_BTE)
    # Index t predicts the token at t + 1.
    each = (
      (eagle.reduced(config, weights, hidden_BTD[:, :-1]), log_p_BTR, counted)
      for hidden_BTD in steps(
        config, weights['layer'], tokens_BTD, read_BTE, settings.unroll
      )
    )
    return students.over_steps(settings, each)

  return value


def _positions(tokens_BT: Array) -> Array:
  """Numbers each row's tokens, 0 to T - 1: [B, T]."""
  return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)


def teacher_log_p(
  config: eagle.EagleConfig, frozen, batch, temperature: float
) -> Array:
  """Computes the draft ids' log p after tokens but the last: [B, t, R]."""
  head = {'layer': {'norm': frozen['target']['norm']}, 'head': frozen['head']}
  last_BTD = batch['features'][:, :-1, -config.features // len(config.taps) :]
  teacher = dataclasses.replace(config, last_norm='head')
  logits_BTR = eagle.reduced(teacher, head, last_BTD.astype(jnp.float32))
  return students.log_p(logits_BTR, batch, temperature)


def steps(
  config: eagle.EagleConfig,
  layer: types.Params,
  tokens_BTD: Array,
  features_BTE: Array,
  count: int,
) -> list[Array]:
  """Computes the draft's hidden states at each of `count` steps: [B, T, D].

  tokens_BTD, features_BTE: every token's embedding and features in the target.

  Worked example, step 1 (a window's second token) at index 5: it reads token 5
  and step 0's hidden state at index 4, and attends to step 0's keys at indices
  0 to 4 and to its own key at index 5.
  """
  module = eagle.merge(config, layer)
  B, T, _ = tokens_BTD.shape
  positions_BT = _positions(tokens_BTD[..., 0])
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
  """Keeps what a layer attends to: every step's keys and values so far."""

  each: list[tuple[Array, Array]]

  def __call__(self, k_BTGC: Array, v_BTGC: Array):
    self.each.append((k_BTGC, v_BTGC))
    k, v = (jnp.concatenate(x, 1) for x in zip(*self.each, strict=True))
    return None, kv.KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))


def _mask(T: int, step: int, first: int) -> Array:
  """Marks the keys that each index attends to: [T, T * (step + 1)].

  first: the first index that others attend to.
  """
  query_T1, key_1T = jnp.arange(T)[:, None], jnp.arange(T)[None]
  visible = [
    (key_1T <= query_T1 - step) & (key_1T >= jnp.minimum(first, query_T1))
  ]
  visible += [key_1T == query_T1 - step + back for back in range(1, step + 1)]
  return jnp.concatenate(visible, 1)


# --- DFlash -------------------------------------------------------------------


def masked(
  blocks: eagle.Blocks,
  target: types.Model,
  settings: sections.Loss,
  gather: Callable[[Any], Any] = lambda params: params,
) -> step_lib.Loss:
  """Makes the mean divergence from the teacher over the masks in blocks.

  Each step cuts every row at a random place into blocks that touch, so that all
  tokens are read, each as any mask of a block. Args as for `unrolled`.
  """
  config, size = blocks.config, blocks.size

  def value(params, frozen, batch, key):
    weights = frozen | drafting(config, params, gather)
    key, key_cut = jax.random.split(key)
    tokens_BT, counted_BT = batch['tokens'], batch['counted']
    B, T = tokens_BT.shape
    start_B = jax.random.randint(key_cut, (B,), 0, size)
    taps_BTE = students.features(batch, settings.noise, key)
    taps_BTE = _raw_taps(config, taps_BTE, batch)
    states_BASH = in_blocks(
      blocks, target, weights, tokens_BT, taps_BTE, start_B
    )
    log_p_BTR = teacher_log_p(config, frozen, batch, settings.temperature)

    def of_mask(k: int):
      at_BA = start_B[:, None] + size * jnp.arange(states_BASH.shape[1])[None]
      at_BA += k
      token_BA = jnp.minimum(at_BA, T - 1)
      counted_BA = jnp.take_along_axis(counted_BT, token_BA, 1) & (at_BA < T)
      # Index t has the distribution of the token at t + 1.
      log_p = jnp.take_along_axis(log_p_BTR, token_BA[..., None] - 1, 1)
      logits = eagle.reduced(config, weights, states_BASH[:, :, k])
      return logits, log_p, counted_BA

    return students.over_steps(settings, map(of_mask, range(1, size)))

  return value


def _raw_taps(config: eagle.EagleConfig, features_BTE: Array, batch) -> Array:
  """Returns the taps as the teacher gave them, before they were normed."""
  scale_BTn = batch['scale'][..., : len(config.taps)]
  size = config.features // len(config.taps)
  return features_BTE[..., : config.features] / jnp.repeat(scale_BTn, size, -1)


def in_blocks(
  blocks: eagle.Blocks,
  target: types.Model,
  weights: types.Params,
  tokens_BT: Array,
  features_BTE: Array,
  start_B: Array,
) -> Array:
  """Computes the states in the blocks that a row is cut into: [B, A, S, H].

  The last block may end behind the row. start_B: the token that a row's first
  block begins with. weights: 'layer' and 'target' of models.eagle.weights.

  Worked example, two blocks of three from token 1: the first is token 1 and two
  masks, in the places of tokens 1 to 3, and each of them attends to all three
  and to token 0's features; the next is token 4 and two masks, which attend to
  each other and to the features of tokens 0 to 3.
  """
  config, size, (B, T) = blocks.config, blocks.size, tokens_BT.shape
  block_Q, within_Q = jnp.divmod(jnp.arange(-(-T // size) * size), size)
  at_BQ = start_B[:, None] + (block_Q * size + within_Q)[None]
  tokens_BQ = jnp.take_along_axis(tokens_BT, jnp.minimum(at_BQ, T - 1), 1)
  tokens_BQ = jnp.where(within_Q[None] == 0, tokens_BQ, blocks.mask)
  begin_BQ = at_BQ - within_Q[None]
  before_BQT = jnp.arange(T)[None, None] < begin_BQ[..., None]
  same_QQ = block_Q[:, None] == block_Q[None]
  same_BQQ = jnp.broadcast_to(same_QQ[None], (B, *same_QQ.shape))
  module = eagle.merge(config, weights['layer'])
  keys = [_Keys([]) for _ in range(config.block.depth)]
  views = attention.views(
    config.block, _positions(tokens_BT), jnp.ones((B, T, T), bool)
  )
  module.remember(module.fused(features_BTE), views, keys)
  seen = jnp.concatenate([before_BQT, same_BQQ], -1)
  views = attention.views(config.block, at_BQ, seen)
  e_BQH = eagle.embed(target, weights, tokens_BQ, at_BQ)
  e_BQH = e_BQH.astype(config.block.activations)
  states_BQH, _ = module(e_BQH, None, views, keys)
  return states_BQH.reshape(B, -1, size, states_BQH.shape[-1])
