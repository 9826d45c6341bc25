"""EAGLE: drafting with one layer over the target's hidden states."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, forward, types
from specdec_jax.drafters import branch, draft_file, method
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import load
from specdec_jax.io.published import eagle_folder, readings
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm


@dataclasses.dataclass(frozen=True)
class Settings(method.Branching, method.Published):
  source: str | os.PathLike = fields.setting('', needed=draft_file.EAGLE.form)


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with a trained layer from a file, replicated over the mesh.

  Raises:
    ValueError: a target with an encoder, or a draft that does not fit it.
  """
  if target.start is not None:
    raise ValueError(
      f'eagle: {target.label} has an encoder, and eagle drafts for a decoder '
      'alone; give lm, lookup or ngram, to the drafters around one as '
      'hybrid.drafter=lm or adaptive.drafter=lookup'
    )
  whole = method.whole(target)
  put, source = whole and whole.sharding(), settings.source
  found = check(target, source, put) if settings.check == 'auto' else None
  reading = readings.judge(f'eagle {source}', target, found)
  config, params = draft_file.eagle_for(source, target, put, reading)
  drafter = make(
    config,
    target.model,
    gamma=gamma,
    min_confidence=settings.min_confidence,
    chunk=chunk,
    constrain=whole and whole.constrain,
    **branch.settings_of(settings.tree),
  )
  return method.Method(drafter, params, view(config, target.model))


def check(
  target: load.LanguageModel, source: str | os.PathLike, put=None
) -> readings.Result | None:
  """How a published draft agrees with a target; None of a draft from here.

  put: the sharding of the draft's parameters.
  """
  folder = eagle_folder.find(source)
  if folder is None:
    return None
  where = f'eagle {source}'
  fit = functools.partial(eagle_folder.fit, folder, where, target, put)

  def drafter(reading: readings.Reading):
    config, params = fit(reading=reading)
    return make(config, target.model, gamma=readings.DRAFTS), params

  return readings.find(
    target,
    eagle_folder.stamp(folder),
    lambda: eagle_folder.digest(folder),
    lambda: eagle_folder.questions(folder, where, target),
    drafter,
  )


class State(NamedTuple):
  """The state of the drafter.

  cache: the draft's keys and values.
  start_B: index of the first token that the draft has not yet read with the
    target's own feature of the token before it.
  features_BME: the target's feature of the token before each token i from
    start_B on, at i % M.
  """

  cache: Any
  start_B: types.Array
  features_BME: types.Array


# Tokens that one pass reads, and the windows without a draft whose features are
# kept. Most windows emit no more, and a wider pass takes longer.
READ, WINDOWS = 4, 4


class _Setup(NamedTuple):
  """The arguments of make."""

  config: eagle.EagleConfig
  target: types.Model
  gamma: int
  min_confidence: float
  chunk: int
  constrain: Callable[..., Any] | None
  levels: tuple[int, ...]
  best: int

  def reader(self, params, features_BTE) -> types.Model:
    """The draft as a model, for one call with the target's features."""
    return eagle.reader(
      self.config,
      self.target,
      eagle.features_of(params['layer'], self.config, features_BTE),
    )


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(
  config: eagle.EagleConfig,
  target: types.Model,
  *,
  gamma: int,
  min_confidence: float = 0.0,
  chunk: int = 64,
  constrain: Callable[..., Any] | None = None,
  levels: tuple[int, ...] = (),
  best: int = 0,
) -> types.Drafter:
  """Drafts a chain or a tree of gamma tokens from the target's features.

  weights.draft holds the parameters of models.eagle.weights. A window starts by
  reading the tokens committed by the last one, with the target's features;
  later drafts use the draft's own hidden state in place of a feature. EAGLE (Li
  et al. 2024, https://arxiv.org/abs/2401.15077) with the inputs of EAGLE-3
  (https://arxiv.org/abs/2503.01840).

  Args:
    config: of the draft.
    target: a model with `embed`.
    gamma, min_confidence, chunk: as in drafters.lm.make.
    constrain: as in models.lm.make, for the draft's cache.
    levels: the nodes of each level of a tree, gamma in all; () is a chain.
    best: propose the likeliest of these nodes alone, so many.

  Raises:
    ValueError: a target without `embed`, or with an encoder.
  """
  if target.embed is None or target.encode is not None:
    why = 'without embed cannot be drafted for, nor one with an encoder'
    raise ValueError(f'eagle: a target {why}')
  gamma = best or sum(levels) or gamma
  how = gamma, min_confidence, chunk, constrain, levels, best
  setup = _Setup(config, target, *how)

  def commit(state, context, outcome, features_BNE):
    old_BME = state.features_BME
    B, M, _ = old_BME.shape
    # Of what is not emitted the place is free, and will be written again.
    first_B = context.lengths_B - outcome.emitted_B
    at_BN = (first_B[:, None] + jnp.arange(gamma + 1)[None]) % M
    new_BNE = features_BNE.astype(old_BME.dtype)
    new_BME = old_BME.at[jnp.arange(B)[:, None], at_BN].set(new_BNE)
    return state._replace(features_BME=new_BME)

  return types.Drafter(
    'eagle',
    gamma,
    functools.partial(_init, setup),
    functools.partial(_branch if levels else _propose, setup),
    commit,
    taps=config.taps,
    stops=min_confidence > 0,
    tree=levels,
  )


def _init(setup: _Setup, weights, context, features_BLE):
  config, before_B = setup.config, context.lengths_B - 1
  B, L = context.tokens_BL.shape
  # A prefill returns them in a wider dtype than verification does; that of
  # token t - 1 is read with token t.
  features_BLE = features_BLE.astype(config.block.activations)
  shifted_BLE = jnp.pad(features_BLE, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  cache = eagle.init_cache(config, B, L, setup.constrain)
  cache, _ = forward.prefill(
    lambda index_T: setup.reader(
      weights.draft, forward.at(shifted_BLE, index_T)
    ),
    weights.draft,
    context.tokens_BL,
    before_B,
    cache,
    chunk=setup.chunk,
  )
  features_B1E = jnp.take_along_axis(shifted_BLE, before_B[:, None, None], 1)
  M = (setup.gamma + 1) * WINDOWS
  blank_BME = jnp.zeros((B, M, features_B1E.shape[-1]), features_B1E.dtype)
  at_B1 = before_B[:, None] % M
  features_BME = blank_BME.at[jnp.arange(B)[:, None], at_B1].set(features_B1E)
  return State(cache, before_B, features_BME)


def _propose(setup: _Setup, weights, state, context, noise, target_cache):
  config, target = setup.config, setup.target
  state, hidden_BD = _catch_up(setup, weights.draft, state, context)

  def drawn(cache, hidden_BD, offset, going_B):
    hidden_B1D = hidden_BD[:, None]
    logits = eagle.logits(config, target, weights.draft, hidden_B1D)
    return (cache, hidden_BD), *lm_drafter.draw(
      noise, context, setup.min_confidence, logits, offset, going_B
    )

  def extend(memory, tokens_B1, at_B, offset, going_B):
    cache, hidden_BD = memory
    hidden_B1D, _, cache = forward.read(
      eagle.reader(config, target, hidden_BD[:, None]),
      weights.draft,
      tokens_B1,
      at_B,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=context.live_B[:, None],
    )
    return drawn(cache, hidden_B1D[:, 0], offset, going_B)

  def first(memory, going_B):
    cache, hidden_BD = memory
    return drawn(cache, hidden_BD, 0, going_B)

  (cache, _), draft = lm_drafter.chain(
    first, extend, (state.cache, hidden_BD), context, setup.gamma
  )
  return draft, state._replace(cache=cache), target_cache


def _branch(setup: _Setup, weights, state, context, noise, target_cache):
  """Drafts a tree; see drafters.branch."""
  config, target, params = setup.config, setup.target, weights.draft
  state, hidden_BD = _catch_up(setup, params, state, context)

  def read(cache, tokens_BX, parents_BXD, tree, begin: int):
    hidden_BXD, _, cache = forward.read(
      eagle.reader(config, target, parents_BXD),
      params,
      tokens_BX,
      context.lengths_B - 1,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=context.live_B[:, None],
      tree=tree,
      begin=begin,
    )
    return hidden_BXD, cache

  logits = lambda x_BXD, depth: eagle.logits(config, target, params, x_BXD)
  first = lambda cache: (hidden_BD, cache)
  draw = branch.Draw(setup.levels, read, logits, setup.best)
  draft, cache = branch.draft(draw, context, noise, state.cache, first)
  return draft, state._replace(cache=cache), target_cache


def _catch_up(setup: _Setup, params, state: State, context: types.Context):
  """Reads the committed tokens; (state, hidden_BD of the last one).

  Only where a row drafts, or its features have no room for another window.
  """
  lengths_B, live_B = context.lengths_B, context.live_B
  M = state.features_BME.shape[1]
  start_B = state.start_B
  full_B = lengths_B - start_B + setup.gamma + 1 > M
  reads_B = live_B & (full_B | (context.gamma_B > 0))

  def read(carry):
    cache, start_B, hidden_BD = carry
    tokens_BT, index_BT = lm_drafter.span(context, start_B, READ)
    features_BTE = jnp.take_along_axis(
      state.features_BME, index_BT[..., None] % M, 1
    )
    hidden_BTD, _, cache = forward.read(
      setup.reader(params, features_BTE),
      params,
      tokens_BT,
      start_B,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=live_B[:, None] & (index_BT < lengths_B[:, None]),
    )
    last_B = lengths_B - 1 - start_B
    at_B11 = jnp.clip(last_B, 0, READ - 1)[:, None, None]
    found_BD = jnp.take_along_axis(hidden_BTD, at_B11, 1)[:, 0]
    here_B1 = ((last_B >= 0) & (last_B < READ))[:, None]
    end_B = jnp.minimum(start_B + READ, lengths_B)
    return cache, end_B, jnp.where(here_B1, found_BD, hidden_BD)

  block = setup.config.block
  blank_BD = jnp.zeros((len(start_B), block.width), block.activations)
  cache, start_B, hidden_BD = jax.lax.while_loop(
    lambda carry: jnp.any(reads_B & (carry[1] < lengths_B)),
    read,
    (state.cache, start_B, blank_BD),
  )
  return state._replace(cache=cache, start_B=start_B), hidden_BD


class Viewed(NamedTuple):
  """The cache of `view`.

  target: the target's cache.
  draft: the draft's cache.
  features_BSE: the target's features by slot.
  """

  target: Any
  draft: Any
  features_BSE: types.Array


@functools.cache
def view(config: eagle.EagleConfig, target: types.Model) -> types.Model:
  """The draft as a separate model, to measure alpha teacher-forced.

  Its distribution at each position is that of the first draft token of a window
  that starts there. Its parameters are weights.draft.
  """

  def init_cache(rows: int, slots: int):
    E = config.features
    return Viewed(
      target.init_cache(rows, slots),
      eagle.init_cache(config, rows, slots),
      jnp.zeros((rows, slots, E), jnp.dtype(config.block.activations)),
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
    return eagle.logits(config, target, params, hidden).whole()

  return types.Model(apply, head, init_cache, target.vocab, target.context)


def recipe(world, gamma: int):
  """A drafter for the certificate: a random layer on the target's first layer,
  which never drafts id 0."""
  config, params = random_layer(world)
  return make(config, world.target, gamma=gamma), params


def random_layer(world, **settings):
  """(config, weights.draft) of a random draft with these settings."""
  target, at = world.target, jax.ShapeDtypeStruct((1, 1), np.int32)
  x_BTD = jax.eval_shape(target.embed, world.weights.target, at, at)
  facts = x_BTD.shape[-1], x_BTD.dtype.name, target.context, world.vocab
  config, params = _random_layer(*facts, **settings)
  return config, params | {'target': world.weights.target}


@functools.cache
def _random_layer(width: int, dtype: str, context: int, vocab: int, **settings):
  """(config, weights.draft without 'target') of a random draft."""
  sizes: dict[str, Any] = dict(depth=1, heads=2, kv_heads=1, head_dim=4, mlp=8)
  sizes |= dict(width=width, vocab=vocab, context=context, dtype=dtype)
  fused = model_config.Execution(fused=True)
  block = model_config.LMConfig(**sizes, run=fused)
  config = eagle.EagleConfig(block, (0,), **settings)
  layer = lm.nest(jax.device_get(eagle.init(config, 0)))
  ids = np.arange(1, vocab, dtype=np.int32)
  head = np.random.default_rng(0).normal(size=(width, len(ids)))
  return config, dict(layer=layer, head=head.astype(jnp.dtype(dtype)), ids=ids)
