"""Drafting with one layer that goes on from the target's features."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import sampling as sampling_lib
from specdec_jax import types, windows
from specdec_jax.models import cache as kv
from specdec_jax.models import eagle


class State(NamedTuple):
  """What the draft has read, and what it reads next.

  start_B: the first token that it has not read beside the target's feature of
  the token before it; features_BNE[:, j] is that of token start_B + j - 1.
  """

  cache: kv.KVCache
  start_B: types.Array
  features_BNE: types.Array


def make(
  config: eagle.EagleConfig, target: types.Model, *, gamma: int, chunk: int = 64
) -> types.Drafter:
  """gamma tokens a window from the target's features, in a chain.

  Reads weights.draft (models.eagle.reader). A window starts by reading what
  the last one committed beside the target's own features; each further token is
  drafted from the draft's hidden state in the place of a feature. EAGLE (Li et
  al. 2024, https://arxiv.org/abs/2401.15077) with the inputs of EAGLE-3
  (https://arxiv.org/abs/2503.01840).

  Raises:
    ValueError: gamma < 1, or a target whose embedding cannot be read.
  """
  if gamma < 1:
    raise ValueError(f'gamma={gamma}: a drafter proposes at least 1 token')
  if target.embed is None:
    raise ValueError('eagle: a target without embed cannot be drafted for')

  width = len(config.taps) * config.block.width

  def read(weights, tokens_BT, features_BTD, start_B, cache, context, keep_BT):
    return windows.read(
      eagle.reader(config, target, features_BTD),
      weights.draft,
      tokens_BT,
      start_B,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=keep_BT,
    )

  def init(weights, context, features_BLE):
    B, L = context.tokens_BL.shape
    before_B = context.lengths_B - 1
    if features_BLE is None:  # where only the time is asked for
      features_BLE = jnp.zeros((B, L, width))
    # Token t goes with the feature of token t - 1; the first has none.
    shifted_BLE = jnp.pad(features_BLE, ((0, 0), (1, 0), (0, 0)))[:, :L]

    def body(carry):
      at, cache = carry
      index_T = jnp.minimum(at + jnp.arange(chunk), L - 1)
      features_BTD = eagle.features_of(
        weights.draft['layer'], config, shifted_BLE[:, index_T]
      )
      _, _, cache = read(
        weights,
        context.tokens_BL[:, index_T],
        features_BTD,
        jnp.full((B,), at, jnp.int32),
        cache,
        context,
        (at + jnp.arange(chunk))[None] < before_B[:, None],
      )
      return at + chunk, cache

    _, cache = jax.lax.while_loop(
      lambda carry: carry[0] < jnp.max(before_B),
      body,
      (jnp.int32(0), eagle.init_cache(config, B, L)),
    )
    last_B11 = before_B[:, None, None]
    features_B1E = jnp.take_along_axis(shifted_BLE, last_B11, 1)
    features_BNE = jnp.pad(features_B1E, ((0, 0), (0, gamma), (0, 0)))
    return State(cache, before_B, features_BNE)

  def propose(weights, state, context, noise, target_cache):
    N = gamma + 1
    L = context.tokens_BL.shape[1]
    index_BN = state.start_B[:, None] + jnp.arange(N)[None]
    tokens_BN = jnp.take_along_axis(
      context.tokens_BL, jnp.clip(index_BN, 0, L - 1), 1
    )
    live_B1 = context.live_B[:, None]
    hidden_BND, _, cache = read(
      weights,
      tokens_BN,
      eagle.features_of(weights.draft['layer'], config, state.features_BNE),
      state.start_B,
      state.cache,
      context,
      live_B1 & (index_BN < context.lengths_B[:, None]),
    )
    last_B = jnp.clip(context.lengths_B - 1 - state.start_B, 0, gamma)
    hidden_BD = jnp.take_along_axis(hidden_BND, last_B[:, None, None], 1)[:, 0]

    def draw(offset, hidden_BD):
      logits_B1V = eagle.logits(
        config, weights.draft, hidden_BD[:, None], target.vocab
      )
      q_BV = sampling_lib.probabilities(logits_B1V, context.sampling)[:, 0]
      return noise.draft(offset, q_BV), q_BV

    def body(carry, offset):
      cache, token_B, hidden_BD = carry
      hidden_B1D, _, cache = read(
        weights,
        token_B[:, None],
        hidden_BD[:, None],
        context.lengths_B - 1 + offset,
        cache,
        context,
        live_B1,
      )
      token_B, q_BV = draw(offset, hidden_B1D[:, 0])
      return (cache, token_B, hidden_B1D[:, 0]), (token_B, q_BV)

    token_B, q_BV = draw(0, hidden_BD)
    # One traced step, not gamma of them: compile time does not grow with gamma.
    (cache, _, _), (tokens_KB, q_KBV) = jax.lax.scan(
      body, (cache, token_B, hidden_BD), jnp.arange(1, gamma)
    )
    draft = types.Draft(
      jnp.concatenate([token_B[None], tokens_KB]).T,
      jnp.moveaxis(jnp.concatenate([q_BV[None], q_KBV]), 0, 1),
      jnp.full_like(context.lengths_B, gamma),
    )
    return draft, State(cache, context.lengths_B, state[2]), target_cache

  def commit(state, context, verdict, features_BNE):
    # propose left the length before this window: the first new token's index.
    if features_BNE is None:
      return state
    return state._replace(features_BNE=features_BNE)

  return types.Drafter('eagle', gamma, init, propose, commit, taps=config.taps)


class Viewed(NamedTuple):
  """The cache of view: the target's, the draft's, and the features by slot."""

  target: Any
  draft: kv.KVCache
  features_BSE: types.Array


@functools.cache
def view(config: eagle.EagleConfig, target: types.Model) -> types.Model:
  """The draft as a model of its own, for alpha: at every position the first
  token of a window that starts there. Its parameters are weights.draft.
  """

  def init_cache(rows: int, slots: int):
    E = len(config.taps) * config.block.width
    return Viewed(
      target.init_cache(rows, slots),
      eagle.init_cache(config, rows, slots),
      jnp.zeros((rows, slots, E), jnp.dtype(config.block.dtype)),
    )

  def apply(
    params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, *, taps=()
  ):
    at = slots_BT, positions_BT, mask_BTS
    _, tapped, target_cache = target.apply(
      params['target'], tokens_BT, *at, cache.target, taps=config.taps
    )
    row_B1 = jnp.arange(tokens_BT.shape[0])[:, None]
    features_BSE = cache.features_BSE.at[row_B1, slots_BT].set(
      windows.concat(tapped), mode='drop'
    )
    before_BT = jnp.maximum(positions_BT - 1, 0)
    first_BT1 = (positions_BT == 0)[..., None]
    features_BTE = jnp.where(first_BT1, 0, features_BSE[row_B1, before_BT])
    fused_BTD = eagle.features_of(params['layer'], config, features_BTE)
    hidden_BTD, _, draft_cache = eagle.reader(config, target, fused_BTD).apply(
      params, tokens_BT, *at, cache.draft
    )
    return hidden_BTD, (), Viewed(target_cache, draft_cache, features_BSE)

  def head(params, hidden):
    return eagle.logits(config, params, hidden, target.vocab)

  return types.Model(apply, head, init_cache, target.vocab, target.context)
