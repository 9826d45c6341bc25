"""EAGLE: drafts with one layer over the target's hidden states."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, forward, types
from specdec_jax.drafters import branch, method, readings
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import load
from specdec_jax.io.published import draft_file, eagle_folder
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm


@dataclasses.dataclass(frozen=True)
class Settings(method.Branching, method.Published):
  source: str | os.PathLike = fields.setting(
    '', needed=draft_file.FORMS['eagle']
  )


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with a trained layer from a file, replicated over the mesh."""
  if target.start is not None:
    raise ValueError(
      f'eagle: {target.label} has an encoder, and eagle drafts for a decoder '
      'alone; give lm, lookup or ngram, to the drafters around one as '
      'hybrid.drafter=lm or adaptive.drafter=lookup'
    )
  whole, source = method.whole(target), settings.source
  if eagle_folder.find(source):
    config, params = method.published(FORM, target, settings)
  else:
    config, params = draft_file.eagle_for(source, target)
  of_chains = functools.partial(
    make, config, target.model, chunk=chunk, constrain=whole and whole.constrain
  )
  drafter = of_chains(gamma=gamma, **branch.settings_of(settings.tree))
  q = of_chains(gamma=1) if drafter.tree else None
  return method.Method(drafter, params, q)


class State(NamedTuple):
  """The drafter's state; its cache is the draft's.

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


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(
  config: eagle.EagleConfig,
  target: types.Model,
  *,
  gamma: int,
  chunk: int = 64,
  constrain: Callable[..., Any] | None = None,
  levels: tuple[int, ...] = (),
  best: int = 0,
) -> types.Drafter:
  """Drafts a chain or a tree with gamma tokens from the target's features.

  weights.draft holds the parameters from models.eagle.weights. A window starts
  by reading the tokens committed by the last one, with the target's features;
  later drafts use the draft's own hidden state in place of a feature. EAGLE (Li
  et al. 2024, https://arxiv.org/abs/2401.15077) with the inputs of EAGLE-3
  (https://arxiv.org/abs/2503.01840).

  chunk: as in drafters.lm.make. constrain: as in models.lm.make, for the
  draft's cache. levels, best: as in branch.draft. target: has `embed`, and no
  encoder.
  """
  assert target.embed is not None and target.encode is None, target
  gamma = best or sum(levels) or gamma
  how = dict(gamma=gamma, levels=levels, best=best)

  def commit(state, context, outcome, features_BNE):
    # Of what is not emitted the place is free, and will be written again.
    first_B = context.lengths_B - outcome.emitted_B
    kept_BME = _keep(state.features_BME, first_B, features_BNE)
    return state._replace(features_BME=kept_BME)

  return types.Drafter(
    'eagle',
    gamma,
    functools.partial(_init, config, target, gamma, chunk, constrain),
    functools.partial(_propose, config, target, how),
    commit,
    taps=config.taps,
    tree=levels,
  )


def _keep(kept_BME, first_B, new_BNE):
  """Puts features in the places of the tokens from first_B on."""
  B, M, _ = kept_BME.shape
  at_BN = (first_B[:, None] + jnp.arange(new_BNE.shape[1])[None]) % M
  new_BNE = new_BNE.astype(kept_BME.dtype)
  return kept_BME.at[jnp.arange(B)[:, None], at_BN].set(new_BNE)


def _reader(config, target, params, features_BTE) -> types.Model:
  """Returns the draft as a model, for one call with the target's features."""
  fused_BTD = eagle.features_of(params['layer'], config, features_BTE)
  return eagle.reader(config, target, fused_BTD)


def _init(
  config, target, gamma, chunk, constrain, weights, context, features_BLE
):
  before_B, params = context.lengths_B - 1, weights.draft
  B, L = context.tokens_BL.shape
  # A prefill returns them in a wider dtype than verification does; that of
  # token t - 1 is read with token t.
  features_BLE = features_BLE.astype(config.block.activations)
  shifted_BLE = jnp.pad(features_BLE, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  some = lambda index_T: forward.at(shifted_BLE, index_T)
  cache = forward.prefill(
    lambda index_T: _reader(config, target, params, some(index_T)),
    params,
    context.tokens_BL,
    before_B,
    eagle.init_cache(config, B, L, constrain),
    chunk=chunk,
  )
  features_B1E = jnp.take_along_axis(shifted_BLE, before_B[:, None, None], 1)
  room = B, (gamma + 1) * WINDOWS, features_B1E.shape[-1]
  blank_BME = jnp.zeros(room, features_B1E.dtype)
  return State(cache, before_B, _keep(blank_BME, before_B, features_B1E))


def _propose(config, target, how, weights, state, context, noise, target_cache):
  params = weights.draft
  catch_up = functools.partial(_catch_up, config, target, how['gamma'])
  state, hidden_BD = catch_up(params, state, context)

  def read(cache, tokens_BX, before_BXD, start_B, **tree):
    hidden_BXD, _, cache = forward.read(
      eagle.reader(config, target, before_BXD),
      params,
      tokens_BX,
      start_B,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=context.live_B[:, None],
      **tree,
    )
    return hidden_BXD, cache

  first = lambda cache: (hidden_BD[:, None], cache)
  logits = lambda x_BXD, depth: eagle.logits(config, target, params, x_BXD)
  draft, cache = branch.draft(
    context, noise, state.cache, first, read, logits, **how
  )
  return draft, state._replace(cache=cache), target_cache


def _catch_up(config, target, gamma: int, params, state: State, context):
  """Reads the committed tokens; returns (state, hidden_BD of the last one).
  Only where a row drafts, or its features have no room for another window."""
  lengths_B, live_B = context.lengths_B, context.live_B
  M = state.features_BME.shape[1]
  start_B = state.start_B
  full_B = lengths_B - start_B + gamma + 1 > M
  reads_B = live_B & (full_B | (context.gamma_B > 0))

  def read(carry):
    cache, start_B, hidden_BD = carry
    tokens_BT, index_BT = lm_drafter.span(context, start_B, READ)
    features_BTE = jnp.take_along_axis(
      state.features_BME, index_BT[..., None] % M, 1
    )
    hidden_BTD, _, cache = forward.read(
      _reader(config, target, params, features_BTE),
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

  block = config.block
  blank_BD = jnp.zeros((len(start_B), block.width), block.activations)
  cache, start_B, hidden_BD = jax.lax.while_loop(
    lambda carry: jnp.any(reads_B & (carry[1] < lengths_B)),
    read,
    (state.cache, start_B, blank_BD),
  )
  return state._replace(cache=cache, start_B=start_B), hidden_BD


def _place(source: str | os.PathLike) -> tuple[Any, str]:
  """Returns (a published draft's folder, what errors begin with)."""
  if folder := eagle_folder.find(source):
    return folder, f'eagle {source}'
  raise ValueError(f'eagle {source}: give a folder or hf:org/name')


FORM = readings.Form(
  'eagle',
  lambda source: eagle_folder.paths(_place(source)[0]),
  lambda source, target: eagle_folder.questions(*_place(source), target),
  lambda source, target, reading: eagle_folder.fit(
    *_place(source), target, reading=reading
  ),
  lambda config, params, model: make(config, model, gamma=readings.DRAFTS),
)


def recipe(world, gamma: int):
  """Makes a drafter for the certificate: a random layer on the target's first
  layer, which never drafts id 0 of three or more."""
  config, params = random_layer(world)
  return make(config, world.target, gamma=gamma), params


def random_layer(world, **settings):
  """Draws (config, weights.draft) of a random draft with these settings."""
  target, at = world.target, jax.ShapeDtypeStruct((1, 1), np.int32)
  x_BTD = jax.eval_shape(target.embed, world.weights.target, at, at)
  facts = x_BTD.shape[-1], x_BTD.dtype.name, target.context, world.vocab
  config, params = _random_layer(*facts, **settings)
  return config, params | {'target': world.weights.target}


@functools.cache
def _random_layer(width: int, dtype: str, context: int, vocab: int, **settings):
  """Draws (config, weights.draft without 'target')."""
  sizes: dict[str, Any] = dict(depth=1, heads=2, kv_heads=1, head_dim=4, mlp=8)
  sizes |= dict(width=width, vocab=vocab, context=context, dtype=dtype)
  fused = model_config.Execution(fused=True)
  block = model_config.LMConfig(**sizes, run=fused)
  config = eagle.EagleConfig(block, (0,), **settings)
  layer = lm.nest(jax.device_get(eagle.init(config, 0)))
  # Of two ids it drafts both: what is certain is lawful whatever is reported.
  ids = np.arange(vocab > 2, vocab, dtype=np.int32)
  head = np.random.default_rng(0).normal(size=(width, len(ids)))
  return config, dict(layer=layer, head=head.astype(jnp.dtype(dtype)), ids=ids)
