"""Drafting with one layer that goes on from the target's features."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import forward, types
from specdec_jax.drafters import lm
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
  config: eagle.EagleConfig,
  target: types.Model,
  *,
  gamma: int,
  min_confidence: float = 0.0,
  chunk: int = 64,
  constrain: Callable[..., Any] | None = None,
) -> types.Drafter:
  """gamma tokens a window from the target's features, in a chain.

  Reads weights.draft (models.eagle.reader). A window starts by reading what
  the last one committed beside the target's own features; each further token is
  drafted from the draft's hidden state in the place of a feature. EAGLE (Li et
  al. 2024, https://arxiv.org/abs/2401.15077) with the inputs of EAGLE-3
  (https://arxiv.org/abs/2503.01840). min_confidence: as drafters.lm has it.
  constrain: as models.lm has it, for the cache.

  Raises:
    ValueError: gamma < 1, min_confidence outside [0, 1), or a target whose
      embedding cannot be read.
  """
  if gamma < 1:
    raise ValueError(f'gamma={gamma}: a drafter proposes at least 1 token')
  lm.check_confidence('min_confidence', min_confidence)
  if target.embed is None:
    raise ValueError('eagle: a target without embed cannot be drafted for')
  constrain = constrain or (lambda x, *axes: x)
  read, read_features = _readers(config, target)

  def init(weights, context, features_BLE):
    B, L = context.tokens_BL.shape
    before_B = context.lengths_B - 1
    shifted_BLE = _shifted(config, features_BLE, B, L)
    axes = ('batch', 'kv_heads', 'slots', None)
    cache = jax.tree.map(
      lambda x: constrain(x, *axes), eagle.init_cache(config, B, L)
    )
    cache = _prefill(
      functools.partial(read_features, weights.draft),
      cache,
      context.tokens_BL,
      shifted_BLE,
      before_B,
      chunk=chunk,
    )
    features_B1E = jnp.take_along_axis(shifted_BLE, before_B[:, None, None], 1)
    features_BNE = jnp.pad(features_B1E, ((0, 0), (0, gamma), (0, 0)))
    return State(cache, before_B, features_BNE)

  def propose(weights, state, context, noise, target_cache):
    live_B1 = context.live_B[:, None]
    cache, hidden_BD = _catch_up(
      functools.partial(read_features, weights.draft), state, context
    )

    def drawn(cache, hidden_BD, offset, going_B):
      logits_B1V = eagle.logits(
        config, weights.draft, hidden_BD[:, None], target.vocab
      )
      return (cache, hidden_BD), *lm.draw(
        noise, context, min_confidence, logits_B1V, offset, going_B
      )

    def extend(memory, tokens_B1, at_B, offset, going_B):
      cache, hidden_BD = memory
      hidden_B1D, cache = read(
        weights.draft, cache, tokens_B1, hidden_BD[:, None], at_B, live_B1
      )
      return drawn(cache, hidden_B1D[:, 0], offset, going_B)

    first = drawn(cache, hidden_BD, 0, context.live_B)
    (cache, _), tokens_KB, q_KBV, count_B = lm.chain(
      extend, first, context.lengths_B, gamma
    )
    draft = types.Draft(tokens_KB.T, jnp.moveaxis(q_KBV, 0, 1), count_B)
    # What this window commits starts here: the next one reads it.
    state = state._replace(cache=cache, start_B=context.lengths_B)
    return draft, state, target_cache

  def commit(state, context, outcome, features_BNE):
    del context, outcome
    if features_BNE is None:  # where only the time is asked for
      return state
    return state._replace(features_BNE=features_BNE)

  return types.Drafter(
    'eagle',
    gamma,
    init,
    propose,
    commit,
    taps=config.taps,
    stops=min_confidence > 0,
  )


def _readers(config: eagle.EagleConfig, target: types.Model):
  """Two of (params, cache, tokens, features, start_B, keep_BT) -> (hidden_BTD,
  cache): beside features of width D, and beside the target's, of width E."""

  def read(params, cache, tokens_BT, features_BTD, start_B, keep_BT):
    hidden_BTD, _, cache = forward.read(
      eagle.reader(config, target, features_BTD),
      params,
      tokens_BT,
      start_B,
      cache,
      slots=cache.k_BGSC.shape[2],
      keep_BT=keep_BT,
    )
    return hidden_BTD, cache

  def read_features(params, cache, tokens_BT, features_BTE, *where):
    features_BTD = eagle.features_of(params['layer'], config, features_BTE)
    return read(params, cache, tokens_BT, features_BTD, *where)

  return read, read_features


def _shifted(config, features_BLE, B: int, L: int):
  """By token what it is read beside: the feature of the one before, or 0."""
  if features_BLE is None:  # where only the time is asked for
    features_BLE = jnp.zeros((B, L, len(config.taps) * config.block.width))
  # A prefill hands them over in a wider type than a window does.
  features_BLE = features_BLE.astype(config.block.dtype)
  return jnp.pad(features_BLE, ((0, 0), (1, 0), (0, 0)))[:, :L]


def _prefill(read, cache, tokens_BL, features_BLE, count_B, *, chunk: int):
  """The cache after the first count_B tokens of every row."""
  B, L = tokens_BL.shape

  def body(carry):
    at, cache = carry
    index_T = at + jnp.arange(chunk)
    inside_T = jnp.minimum(index_T, L - 1)  # what is past the end is not kept
    _, cache = read(
      cache,
      tokens_BL[:, inside_T],
      features_BLE[:, inside_T],
      jnp.full((B,), at, jnp.int32),
      index_T[None] < count_B[:, None],
    )
    return at + chunk, cache

  _, cache = jax.lax.while_loop(
    lambda carry: carry[0] < jnp.max(count_B), body, (jnp.int32(0), cache)
  )
  return cache


def _catch_up(read, state: State, context: types.Context):
  """Reads what was committed last: (cache, hidden_BD of the last token)."""
  N = state.features_BNE.shape[1]
  L = context.tokens_BL.shape[1]
  index_BN = state.start_B[:, None] + jnp.arange(N)[None]
  hidden_BND, cache = read(
    state.cache,
    jnp.take_along_axis(context.tokens_BL, jnp.clip(index_BN, 0, L - 1), 1),
    state.features_BNE,
    state.start_B,
    context.live_B[:, None] & (index_BN < context.lengths_B[:, None]),
  )
  last_B = jnp.clip(context.lengths_B - 1 - state.start_B, 0, N - 1)
  return cache, jnp.take_along_axis(hidden_BND, last_B[:, None, None], 1)[:, 0]


def work(params: Any, state: State, passes: float) -> tuple[int, int]:
  """(parameters times tokens, bytes read) of drafting in a window.

  params: weights.draft. passes: of the draft in a window, gamma where it never
  stops. The first one reads gamma + 1 tokens, the others one each; each applies
  the head once. Bytes are of the weights and the cache in every pass, and of
  what the first one takes from the target. The rows of the embedding are left
  out, as metrics.step_bytes does.
  """
  of = lambda *names: jax.tree.leaves(
    [part for name, part in params['layer'].items() if name in names]
  )
  fuse, head = of('fuse'), [params['head'], *of('norm')]
  block = of('token_norm', 'feature_norm', 'join', 'block')
  size = lambda arrays: sum(x.size for x in arrays)
  read = lambda arrays: sum(x.size * x.dtype.itemsize for x in arrays)
  N, more = state.features_BNE.shape[1], passes - 1
  every = read([*block, *head, params['ids'], *state.cache])
  return (
    round(N * size([*fuse, *block]) + more * size(block) + passes * size(head)),
    round(passes * every) + read([*fuse, state.features_BNE]),
  )


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
      forward.concat(tapped), mode='drop'
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
