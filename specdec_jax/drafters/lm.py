"""Drafting with a smaller language model."""

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from specdec_jax import fields, forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.drafters import branch, draft_file, method
from specdec_jax.io import load
from specdec_jax.models import convert, eagle

SECTION = 'draft'


@dataclasses.dataclass(frozen=True)
class Settings(method.Branching, method.Rows):
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
    given = self.dtype, self.tensor_parallel, self.kernels
    if loaded and given != (convert.STORED, 0, 'auto'):
      raise ValueError(
        f'dtype, tensor_parallel, kernels: {self.source} is loaded; give them '
        'to specdec_jax.load'
      )


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with the model of settings.source.

  It is loaded once for a target, on the target's mesh. That of a draft_file
  shares the target's arrays, and has its dtype, or int8 on the CPU kernels.

  Raises:
    ValueError: the two have different tokenizers, or only one an encoder; a
      tree, and a draft that cannot move what it has read.
  """
  draft = _draft(target, settings)
  if draft.context < target.context:
    _say_shorter(draft.label, draft.context, target.label, target.context)
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
  """Whether a source is that of a whole model, and not of layers for one."""
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
  key = source, settings.dtype, settings.kernels, settings.tensor_parallel

  def loaded() -> load.LanguageModel:
    opened = method.open_source(target, source)
    return method.load_beside(target, opened, *key[1:])

  return target.once(key, loaded)


@functools.cache  # once, not for each gamma
def _say_shorter(draft: str, most: int, target: str, more: int) -> None:
  logging.warning(
    'draft %s reads texts of up to %d tokens, target %s of %d: past %d tokens '
    'nothing is drafted',
    draft,
    most,
    target,
    more,
    most,
  )


def _shared(params: Any, target: load.LanguageModel) -> tuple[str, ...]:
  """The names of what encodes a source, if a draft has the target's own arrays.

  A draft_file of layers has them, on one device.
  """
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

  Args:
    model: the draft, with the target's number of logits.
    gamma: draft tokens in a window, at least 1.
    min_confidence: a row stops before the first token where the draft's largest
      probability, at temperature 1, is less; 0 never stops. The test comes
      before the token is drawn: stopping at an unlikely token would propose the
      likely ones more often than q allows. Drafting ends when all rows stop.
    chunk: prompt tokens that one prefill pass reads.
    name: of the drafter.
    shared: names of parameters that are the target's. A source is encoded
      with those of the target, so that XLA does it once for both models.
    levels: the nodes of each level of a tree, gamma in all; () is a chain.
  """
  gamma = sum(levels) or gamma

  def init(weights, context, features):
    del features
    params = weights.draft
    if shared:
      params = params | {name: weights.target[name] for name in shared}
    B, L = context.tokens_BL.shape
    cache = forward.open_cache(model, params, B, L, context.source)
    unread_B = jnp.maximum(context.lengths_B - 2, 0)
    unread_B = jnp.where(context.lengths_B <= model.context, unread_B, 0)
    cache, _ = forward.prefill(
      model, weights.draft, context.tokens_BL, unread_B, cache, chunk=chunk
    )
    return State(cache, unread_B)

  setup = _Setup(model, gamma, min_confidence, levels)
  return types.Drafter(
    name,
    gamma,
    init,
    functools.partial(_propose, setup),
    functools.partial(_commit, setup),
    stops=min_confidence > 0,
    tree=levels,
  )


class _Setup(NamedTuple):
  """The arguments of make."""

  model: types.Model
  gamma: int
  min_confidence: float
  levels: tuple[int, ...]

  def read(self, params, context, cache, tokens_BT, start_B, keep_BT, **tree):
    """(hidden_BTD, cache) of forward.read."""
    reader = self.model, params, tokens_BT, start_B, cache
    L = context.tokens_BL.shape[1]
    hidden_BTD, _, cache = forward.read(
      *reader, slots=L, keep_BT=keep_BT, **tree
    )
    return hidden_BTD, cache


def _propose(setup: _Setup, weights, state, context, noise, target_cache):
  model, lengths_B, params = setup.model, context.lengths_B, weights.draft
  # Draft k is drawn after reading the k tokens before it, too.
  room_B = jnp.maximum(model.context + 1 - lengths_B, 0)
  context = context._replace(gamma_B=jnp.minimum(context.gamma_B, room_B))
  drafting_B = context.live_B & (context.gamma_B > 0)
  keep_B1 = drafting_B[:, None]
  read = functools.partial(setup.read, params, context)

  def catch_up(state):
    tokens_BT, index_BT = span(context, state.read_B, CATCH_UP)
    keep_BT = keep_B1 & (index_BT < lengths_B[:, None])
    _, cache = read(state.cache, tokens_BT, state.read_B, keep_BT)
    read_B = jnp.where(drafting_B, state.read_B + CATCH_UP, state.read_B)
    return State(cache, read_B)

  def last(cache):
    last_BT, _ = span(context, lengths_B - 2, 2)
    hidden_BTD, cache = read(cache, last_BT, lengths_B - 2, keep_B1)
    return hidden_BTD[:, -1], cache

  def drawn(hidden_BD, cache, offset, going_B):
    logits_B1V = model.head(params, hidden_BD[:, None])
    return cache, *draw(
      noise, context, setup.min_confidence, logits_B1V, offset, going_B
    )

  def extend(cache, tokens_B1, at_B, offset, going_B):
    hidden_B1D, cache = read(cache, tokens_B1, at_B, keep_B1)
    return drawn(hidden_B1D[:, 0], cache, offset, going_B)

  def level(cache, tokens_BX, parents_BXD, tree, begin: int):
    del parents_BXD
    at_B, sizes = lengths_B - 1, dict(tree=tree, begin=begin)
    return read(cache, tokens_BX, at_B, keep_B1, **sizes)

  cache, read_B = jax.lax.while_loop(
    lambda state: jnp.any(drafting_B & (state.read_B < lengths_B - 2)),
    catch_up,
    state,
  )
  if setup.levels:
    logits = lambda x_BXD, depth: model.head(params, x_BXD)
    how = branch.Draw(setup.levels, level, logits)
    draft, cache = branch.draft(how, context, noise, cache, last)
  else:
    first = lambda cache, going_B: drawn(*last(cache), 0, going_B)
    cache, draft = chain(first, extend, cache, context, setup.gamma)
  read_B = jnp.where(drafting_B, lengths_B, read_B)
  return draft, State(cache, read_B), target_cache


def _commit(setup: _Setup, state, context, outcome, features_BNE):
  del features_BNE
  # Of a row that drafted, all but two have been read: see make.
  first_B = context.lengths_B - outcome.emitted_B
  drafted_B, cache = state.read_B == first_B, state.cache
  read_B = jnp.maximum(state.read_B, context.lengths_B - 2)
  if setup.levels:
    # Of the path only the last can be of the level that was not read.
    path = jnp.where(drafted_B, outcome.accepted_B, 0), outcome.path_BK
    cache = forward.compact(setup.model, cache, first_B, *path)
  return State(cache, jnp.where(drafted_B, read_B, state.read_B))


def span(context: types.Context, start_B, size: int):
  """(tokens_BT, index_BT) of `size` tokens from start_B on, kept inside."""
  L = context.tokens_BL.shape[1]
  index_BT = start_B[:, None] + jnp.arange(size)[None]
  at_BT = jnp.clip(index_BT, 0, L - 1)
  return jnp.take_along_axis(context.tokens_BL, at_BT, 1), index_BT


def draw(noise, context, min_confidence: float, logits, offset, going_B):
  """Draws one draft token for every row.

  Args:
    noise, context: as for types.Drafter.propose.
    min_confidence: see make.
    logits: the draft's, [B, 1, R] or [B, 1, V].
    offset: index of the draft token in its window.
    going_B: false for rows that have stopped.

  Returns:
    (token_B, q_BV, going_B); q_BV is None where all rows are greedy.
  """
  logits, sampling = eagle.every(logits), context.sampling
  best_B11 = jnp.max(logits.some, -1, keepdims=True)
  if min_confidence:
    going_B &= _confidence(logits.some[:, 0], best_B11[:, 0]) >= min_confidence
  if sampling.temperature_B is None:
    first_B11 = sampling_lib.first_of(logits.some, best_B11)
    return logits.id_of(first_B11[:, 0, 0]), None, going_B
  q_BV = sampling_lib.probabilities(logits.whole(), sampling, best_B11)[:, 0]
  return noise.draft(offset, q_BV), q_BV, going_B


def chain(first, extend, memory, context, gamma: int):
  """Drafts until every row has stopped, or has as many as it may.

  A loop in the program: compile time does not grow with gamma. Where no row may
  draft, nothing runs.

  Args:
    first: (memory, going_B) -> (memory, token_B, q_BV, going_B): draws at
      offset 0, for the rows in going_B.
    extend: (memory, tokens_B1, at_B, offset, going_B) -> the same: reads the
      previous token, at index at_B of its row, and draws the next one.
    memory: of first.
    context: as for types.Drafter.propose.
    gamma: draft tokens in a window.

  Returns:
    (memory, types.Draft).
  """
  wants = lambda offset: context.live_B & (offset < context.gamma_B)
  _, *blank, _ = forward.blank(first, memory, wants(0))
  memory, token_B, q_BV, going_B = forward.once(
    jnp.any(wants(0)),
    lambda made: first(made[0], made[-1]),
    (memory, *blank, wants(0)),
  )
  tokens_KB = jnp.zeros((gamma, *token_B.shape), token_B.dtype)
  each = lambda f, *x: jax.tree.map(f, *x)  # None, of certain drafts, stays
  put = lambda offset, *x: each(lambda all, x: all.at[offset].set(x), *x)
  q_KBV = each(lambda x: jnp.zeros((gamma, *x.shape), x.dtype), q_BV)

  def body(carry):
    offset, memory, tokens_KB, q_KBV, going_B, count_B = carry
    at_B = context.lengths_B + offset - 1
    memory, token_B, q_BV, going_B = extend(
      memory, tokens_KB[offset - 1][:, None], at_B, offset, going_B
    )
    going_B &= wants(offset)
    return (
      offset + 1,
      memory,
      tokens_KB.at[offset].set(token_B),
      put(offset, q_KBV, q_BV),
      going_B,
      count_B + going_B,
    )

  _, memory, tokens_KB, q_KBV, _, count_B = jax.lax.while_loop(
    lambda carry: jnp.any(carry[4] & wants(carry[0])),
    body,
    (
      jnp.int32(1),
      memory,
      tokens_KB.at[0].set(token_B),
      put(0, q_KBV, q_BV),
      going_B,
      going_B.astype(jnp.int32),
    ),
  )
  q_BKV = each(lambda x: jnp.moveaxis(x, 0, 1), q_KBV)
  return memory, types.Draft(tokens_KB.T, q_BKV, count_B)


def _confidence(logits_BV, best_B1):
  """The largest probability at temperature 1, of the largest logit: [B]."""
  return 1 / jnp.sum(jnp.exp(logits_BV - best_B1), -1)
