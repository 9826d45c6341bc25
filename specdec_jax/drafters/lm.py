"""Drafts with a smaller language model."""

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from specdec_jax import fields, forward, types
from specdec_jax.drafters import branch, method
from specdec_jax.io import load, sources
from specdec_jax.io.published import draft_file
from specdec_jax.models import convert

SECTION = 'draft'


@dataclasses.dataclass(frozen=True)
class Settings(method.Stopping):
  source: str | os.PathLike | load.LanguageModel = fields.setting(
    '', needed='a model, such as hf:org/name'
  )
  dtype: str = fields.setting(
    convert.STORED, allowed=convert.DTYPES, help='as target.dtype'
  )
  tensor_parallel: int = fields.setting(
    0, low=0, help='devices of mesh.model that share one copy; 0: all'
  )

  def __post_init__(self):
    super().__post_init__()
    loaded = isinstance(self.source, load.LanguageModel)
    if loaded and (self.dtype, self.tensor_parallel) != (convert.STORED, 0):
      raise ValueError(
        f'dtype, tensor_parallel: {self.source} is loaded; give them to '
        'specdec_jax.load'
      )


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with the model in settings.source, loaded once for a target, on its
  mesh. A draft_file's shares the target's arrays, and has its dtype, or int8 on
  the CPU kernels."""
  draft = _draft(target, settings)
  if draft.context < target.context:
    logging.log_first_n(
      logging.WARNING,
      'draft %s reads texts of up to %d tokens, target %s of %d: past that '
      'nothing is drafted',
      1,
      *(draft.label, draft.context, target.label, target.context),
    )
  method.check_pair(target, draft)
  q, params = draft.draft_model(target), draft.as_draft[1]
  levels = branch.levels_of(settings.tree)
  if levels and q.compact is None:
    raise ValueError(f'draft {draft.label}: has no `compact`; leave tree out')
  drafter = make(
    q,
    gamma=gamma,
    min_confidence=settings.min_confidence,
    chunk=chunk,
    shared=_shared(params, target),
    levels=levels,
  )
  return method.Method(drafter, params, q, draft=draft)


def is_model(source: str | os.PathLike) -> bool:
  """Tells whether a source is a whole model, not layers for one."""
  text = os.fspath(source)
  return not text.startswith('zoo:') and not text.endswith('.safetensors')


def _draft(
  target: load.LanguageModel, settings: Settings
) -> load.LanguageModel:
  source = settings.source
  if isinstance(source, load.LanguageModel):
    return source
  if not is_model(source):
    return draft_file.layers_for(source, target)
  key = source, settings.dtype, settings.tensor_parallel

  def loaded() -> load.LanguageModel:
    opened: Any = os.fspath(source)
    if not sources.FUNCTION.fullmatch(opened):  # else a user's own model
      known = ('opened', opened) in target.drafts
      opened = method.opened(target, opened)
      if not known:  # else settings.load has checked it
        method.check_pair(target, opened)
    return method.load_beside(target, opened, *key[1:])

  return target.once(key, loaded)


def _shared(params: Any, target: load.LanguageModel) -> tuple[str, ...]:
  """Names what encodes a source, if a draft has the target's own arrays: a
  draft_file of layers has them, on one device."""
  if target.start is None or target.layout:
    return ()
  names = 'encoder', 'embed' if 'embed' in params else 'head'
  same = all(params[n] is target.params.get(n) for n in names)
  return names if same else ()


def recipe(world, gamma: int):
  return make(world.draft, gamma=gamma), world.weights.draft


# Tokens of one pass over those that were committed while nothing was drafted.
CATCH_UP = 8


class State(NamedTuple):
  """cache: the draft's. read_B: how many of a row's tokens it has read."""

  cache: Any
  read_B: types.Array


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(
  model: types.Model,
  *,
  gamma: int,
  min_confidence: float = 0.0,
  chunk: int = 64,
  name: str = 'lm',
  shared: tuple[str, ...] = (),
  levels: tuple[int, ...] = (),
) -> types.Drafter:
  """Drafts gamma tokens a window, sampled with the target's settings.

  weights.draft holds the parameters. A window starts by reading the last two
  committed tokens: the first was not read if all drafts were accepted, else it
  is written again with the same values. Rows that may draft nothing read
  nothing; they catch up when they draft again. Nothing is drafted from a text
  longer than the model's context.

  model: the draft, with the target's number of logits.
  min_confidence: a row stops before the first token where the draft's largest
    probability, at temperature 1, is less; 0 never stops. The test comes before
    the draw: stopping at an unlikely token would propose the likely ones more
    often than q allows. Drafting ends when all rows stop.
  chunk: prompt tokens that one prefill pass reads.
  shared: names of parameters that are the target's. They encode a source as the
    target's, so that XLA does it once for both models.
  levels: the nodes in each level of a tree, gamma in all; () is a chain.
  """
  gamma = sum(levels) or gamma

  def init(weights, context, features):
    params = weights.draft
    if shared:
      params = params | {name: weights.target[name] for name in shared}
    B, L = context.tokens_BL.shape
    cache = forward.open_cache(model, params, B, L, context.source)
    unread_B = jnp.maximum(context.lengths_B - 2, 0)
    unread_B = jnp.where(context.lengths_B <= model.context, unread_B, 0)
    cache = forward.prefill(
      model, weights.draft, context.tokens_BL, unread_B, cache, chunk=chunk
    )
    return State(cache, unread_B)

  how = dict(gamma=gamma, levels=levels, least=min_confidence)
  return types.Drafter(
    name,
    gamma,
    init,
    functools.partial(_propose, model, how),
    functools.partial(_commit, model if levels else None),
    tree=levels,
  )


def _propose(model, how, weights, state, context, noise, target_cache):
  lengths_B, params = context.lengths_B, weights.draft
  # Draft k is drawn after reading the k tokens before it, too.
  room_B = jnp.maximum(model.context + 1 - lengths_B, 0)
  context = context._replace(gamma_B=jnp.minimum(context.gamma_B, room_B))
  drafting_B = context.live_B & (context.gamma_B > 0)
  keep_B1 = drafting_B[:, None]

  def read(cache, tokens_BT, _, start_B, keep_BT=keep_B1, **tree):
    reader = model, params, tokens_BT, start_B, cache
    L = context.tokens_BL.shape[1]
    hidden_BTD, _, cache = forward.read(
      *reader, slots=L, keep_BT=keep_BT, **tree
    )
    return hidden_BTD, cache

  def catch_up(state):
    tokens_BT, index_BT = span(context, state.read_B, CATCH_UP)
    keep_BT = keep_B1 & (index_BT < lengths_B[:, None])
    _, cache = read(state.cache, tokens_BT, None, state.read_B, keep_BT)
    read_B = jnp.where(drafting_B, state.read_B + CATCH_UP, state.read_B)
    return State(cache, read_B)

  def last(cache):
    last_BT, _ = span(context, lengths_B - 2, 2)
    hidden_BTD, cache = read(cache, last_BT, None, lengths_B - 2)
    return hidden_BTD[:, -1:], cache

  cache, read_B = jax.lax.while_loop(
    lambda state: jnp.any(drafting_B & (state.read_B < lengths_B - 2)),
    catch_up,
    state,
  )
  logits = lambda x_BXD, depth: model.head(params, x_BXD)
  draft, cache = branch.draft(context, noise, cache, last, read, logits, **how)
  read_B = jnp.where(drafting_B, lengths_B, read_B)
  return draft, State(cache, read_B), target_cache


def _commit(branching, state, context, outcome, features_BNE):
  """branching: the model, if windows are trees."""
  # Of a row that drafted, all but two have been read: see make.
  first_B = context.lengths_B - outcome.emitted_B
  drafted_B, cache = state.read_B == first_B, state.cache
  read_B = jnp.maximum(state.read_B, context.lengths_B - 2)
  if branching:
    # Of the path only the last can be of the level that was not read.
    path = jnp.where(drafted_B, outcome.accepted_B, 0), outcome.path_BK
    cache = forward.compact(branching, cache, first_B, *path)
  return State(cache, jnp.where(drafted_B, read_B, state.read_B))


def span(context: types.Context, start_B, size: int):
  """Returns (tokens_BT, index_BT), `size` tokens from start_B, kept inside."""
  L = context.tokens_BL.shape[1]
  index_BT = start_B[:, None] + jnp.arange(size)[None]
  at_BT = jnp.clip(index_BT, 0, L - 1)
  return jnp.take_along_axis(context.tokens_BL, at_BT, 1), index_BT
