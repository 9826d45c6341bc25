"""DFlash: drafts a block of masks in one pass from the target's states.

Chen et al. 2026 (https://arxiv.org/abs/2602.06036). In every layer the block
attends to keys and values made from the states of all tokens before it.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import fields, forward, types
from specdec_jax.drafters import branch, method, readings
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.io import load
from specdec_jax.io.published import dflash_folder, eagle_folder
from specdec_jax.models import eagle


@dataclasses.dataclass(frozen=True)
class Settings(method.Published):
  source: str | os.PathLike = fields.setting('', needed=dflash_folder.FORM)


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with a published draft, replicated over the mesh."""
  whole = method.whole(target)
  blocks, params = method.published(FORM, target, settings)
  if gamma > (most := blocks.size - blocks.first):
    raise ValueError(
      f'dflash {settings.source}: drafts {most} tokens in a block, and gamma='
      f'{gamma}; give gamma={most} or less'
    )
  drafter = make(
    blocks,
    target.model,
    gamma=gamma,
    chunk=chunk,
    constrain=whole and whole.constrain,
  )
  return method.Method(drafter, params)


class State(NamedTuple):
  """The drafter's state.

  cache: keys and values of the tokens that the target has read. From the last
    window on they are a block's, which are written again.
  start_B: index of the first token in the window just verified.
  count_B, features_BNE: how many of its tokens may not be in the cache yet, and
    the target's features for them.
  """

  cache: Any
  start_B: types.Array
  count_B: types.Array
  features_BNE: types.Array


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(
  blocks: eagle.Blocks,
  target: types.Model,
  *,
  gamma: int,
  chunk: int = 64,
  constrain: Callable[..., Any] | None = None,
) -> types.Drafter:
  """Drafts gamma tokens with one pass over a block, which is always whole.

  weights.draft holds the parameters from models.eagle.weights. A block has
  gamma drafts or more, and begins with the last committed token, whose state
  the target has not computed yet. q at a position does not depend on the drafts
  before it.

  target: has `embed`, if the draft has no embedding itself. chunk: as in
  drafters.lm.make. constrain: as in models.lm.make, for the draft's cache.
  """

  def commit(state, context, outcome, features_BNE):
    return state._replace(
      # The last token that was emitted has not been read.
      start_B=context.lengths_B - 1 - outcome.emitted_B,
      count_B=outcome.emitted_B,
      features_BNE=features_BNE.astype(state.features_BNE.dtype),
    )

  return types.Drafter(
    'dflash',
    gamma,
    functools.partial(_init, blocks, target, gamma, chunk, constrain),
    functools.partial(_propose, blocks, target, gamma),
    commit,
    taps=blocks.config.taps,
  )


def _room(blocks: eagle.Blocks, length: int) -> int:
  """Counts a cache's slots: a block may end past the buffer. XLA TPU turns a
  whole cache unless its slots are a multiple of 8."""
  return -(-(length + blocks.size) // 8) * 8


def _init(
  blocks, target, gamma, chunk, constrain, weights, context, features_BLE
):
  (B, L), config = context.tokens_BL.shape, blocks.config
  # A prefill returns them in a wider dtype than verification does.
  features_BLE = features_BLE.astype(config.block.activations)
  slots = _room(blocks, L)
  cache = forward.prefill(
    lambda at_T: eagle.reader(config, target, forward.at(features_BLE, at_T)),
    weights.draft,
    jnp.pad(context.tokens_BL, ((0, 0), (0, slots - L))),
    context.lengths_B - 1,
    eagle.init_cache(config, B, slots, constrain),
    chunk=chunk,
  )
  none_B = jnp.zeros_like(context.lengths_B)
  blank_BNE = jnp.zeros_like(
    features_BLE, shape=(B, gamma + 1, config.features)
  )
  return State(cache, none_B, none_B, blank_BNE)


def _propose(
  blocks, target, gamma, weights, state, context, noise, target_cache
):
  config, params = blocks.config, weights.draft
  end_B = context.lengths_B - 1
  slots = _room(blocks, context.tokens_BL.shape[1])
  read = functools.partial(forward.read, params=params, slots=slots)
  _, _, cache = read(
    eagle.reader(config, target, state.features_BNE),
    tokens_BT=jnp.zeros((len(end_B), gamma + 1), jnp.int32),
    start_B=state.start_B,
    cache=state.cache,
    keep_BT=jnp.arange(gamma + 1)[None] < state.count_B[:, None],
  )
  last_B1 = jnp.take_along_axis(context.tokens_BL, end_B[:, None], 1)
  block_BT = jnp.pad(
    last_B1, ((0, 0), (0, blocks.size - 1)), constant_values=blocks.mask
  )

  def first(cache):
    """Lets the whole block's logits stand for each draft's state."""
    hidden_BTH, _, cache = read(
      eagle.reader(config, target),
      tokens_BT=block_BT,
      start_B=end_B,
      cache=cache,
      keep_BT=context.live_B[:, None],
    )
    drafts_BKH = hidden_BTH[:, blocks.first :][:, :gamma]
    return eagle.logits(config, target, params, drafts_BKH).some, cache

  def logits(some_BKR, k):
    some_B1R = jax.lax.dynamic_slice_in_dim(some_BKR, k, 1, 1)
    return eagle.Logits(some_B1R, params.get('ids'), target.vocab)

  stay = lambda cache, tokens_B1, some_BKR, start_B: (some_BKR, cache)
  draft, cache = branch.draft(
    context, noise, cache, first, stay, logits, gamma=gamma
  )
  return draft, state._replace(cache=cache), target_cache


FORM = readings.Form(
  'dflash',
  lambda source: eagle_folder.paths(dflash_folder.find(source)),
  lambda source, target: eagle_folder.questions(
    dflash_folder.find(source), f'dflash {source}', target, dflash_folder.claim
  ),
  dflash_folder.fit,
  lambda blocks, params, model: make(
    blocks, model, gamma=min(readings.DRAFTS, blocks.size - 1)
  ),
)


def recipe(world, gamma: int):
  """Makes a drafter for the certificate: a random layer on the target's first
  layer, which never drafts id 0 of three or more."""
  config, params = eagle_drafter.random_layer(
    world, reads='context', tap_norm='none', last_norm='fed'
  )
  blocks = eagle.Blocks(config, mask=0, size=gamma + 1)
  return make(blocks, world.target, gamma=gamma), params
