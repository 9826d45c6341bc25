"""Drafting with a smaller language model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specdec_jax import fields, forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.drafters import method
from specdec_jax.io import load
from specdec_jax.io import tokenizer as tokenizer_lib

SECTION = 'draft'


@dataclasses.dataclass(frozen=True)
class Settings(method.Stopping):
  source: str = fields.setting(
    '',
    needed='a model, such as hf:org/name, or methods without lm, such as '
    '--config.decode.methods="(\'lookup\',)"',
  )
  dtype: str = fields.setting(
    'float32', allowed=('float32', 'bfloat16', 'float64')
  )
  replicated: bool = fields.setting(
    False, help='on a mesh, a whole copy on every device'
  )


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with the model of settings.source.

  It is loaded once for a target, on the target's mesh.
  """
  key = settings.source, settings.dtype, settings.replicated
  if key not in target.drafts:
    own = target.lm_config
    target.drafts[key] = load.load(
      settings.source,
      dtype=settings.dtype,
      mesh=target.layout and target.layout.mesh,
      replicated=settings.replicated,
      scan_layers=own and own.scan_layers,
      kernels='auto' if own is None or own.packed else 'xla',
    )
  draft = target.drafts[key]
  return with_draft(draft, target, settings, gamma=gamma, chunk=chunk)


def with_draft(
  draft: load.LanguageModel,
  target: load.LanguageModel,
  settings: method.Stopping,
  *,
  gamma: int,
  chunk: int,
) -> method.Method:
  """Drafts with a loaded model.

  Args:
    draft, target: the models.
    settings: when a window ends early.
    gamma: draft tokens in a window.
    chunk: prompt tokens that one prefill pass reads.

  Raises:
    ValueError: the two have different tokenizers, or only one an encoder.
  """
  has = lambda model: 'has no encoder' if model.start is None else 'has one'
  if has(target) != has(draft):
    raise ValueError(
      f'target {target.label} {has(target)} and draft {draft.label} '
      f'{has(draft)}; an encoder: both need one, or neither'
    )
  tokenizer_lib.check_same(target.tokenizer, draft.tokenizer)
  q = draft.draft_model(target)
  least = settings.min_confidence
  drafter = make(q, gamma=gamma, min_confidence=least, chunk=chunk)
  return method.Method(drafter, draft.as_draft[1], q, draft=draft)


def recipe(world, gamma: int):
  return make(world.draft, gamma=gamma), world.weights.draft


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(
  model: types.Model,
  *,
  gamma: int,
  min_confidence: float = 0.0,
  chunk: int = 64,
  name: str = 'lm',
) -> types.Drafter:
  """Drafts gamma tokens a window, sampled with the target's settings.

  weights.draft holds the model's parameters. A window starts by reading the
  last two committed tokens: if all drafts were accepted, the model has not yet
  read the last one of them; else the first of the two is written again with the
  same values.

  Args:
    model: the draft, with the target's number of logits.
    gamma: draft tokens in a window, at least 1.
    min_confidence: a row stops before the first token where the draft's largest
      probability, at temperature 1, is less; 0 never stops. The test comes
      before the token is drawn: stopping at an unlikely token would propose the
      likely ones more often than q allows. Drafting ends when all rows stop.
    chunk: prompt tokens that one prefill pass reads.
    name: of the drafter.
  """

  def init(weights, context, features):
    del features
    B, L = context.tokens_BL.shape
    cache = forward.open_cache(model, weights.draft, B, L, context.source)
    unread_B = jnp.maximum(context.lengths_B - 2, 0)
    cache, _ = forward.prefill(
      model, weights.draft, context.tokens_BL, unread_B, cache, chunk=chunk
    )
    return cache

  return types.Drafter(
    name,
    gamma,
    init,
    functools.partial(_propose, model, gamma, min_confidence),
    # Slots past the committed length are overwritten when they are read.
    lambda cache, *_: cache,
    stops=min_confidence > 0,
  )


def _propose(
  model, gamma, min_confidence, weights, cache, context, noise, target_cache
):
  live_B1 = context.live_B[:, None]

  def extend(cache, tokens_BT, start_B, offset, going_B):
    hidden_BTD, _, cache = forward.read(
      model,
      weights.draft,
      tokens_BT,
      start_B,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=live_B1,
    )
    logits_B1V = model.head(weights.draft, hidden_BTD[:, -1:])
    return cache, *draw(
      noise, context, min_confidence, logits_B1V, offset, going_B
    )

  start_B = context.lengths_B - 2
  last_BT = jnp.take_along_axis(
    context.tokens_BL,
    jnp.maximum(start_B[:, None] + jnp.arange(2)[None], 0),
    1,
  )
  first = extend(cache, last_BT, start_B, 0, context.live_B)
  cache, draft = chain(extend, first, context.lengths_B, gamma)
  return draft, cache, target_cache


def draw(noise, context, min_confidence: float, logits_B1V, offset, going_B):
  """Draws one draft token for every row.

  Args:
    noise, context: as for types.Drafter.propose.
    min_confidence: see make.
    logits_B1V: the draft's logits.
    offset: index of the draft token in its window.
    going_B: false for rows that have stopped.

  Returns:
    (token_B, q_BV, going_B).
  """
  q_BV = sampling_lib.probabilities(logits_B1V, context.sampling)[:, 0]
  if min_confidence:
    going_B &= _confidence(logits_B1V[:, 0]) >= min_confidence
  return noise.draft(offset, q_BV), q_BV, going_B


def chain(extend, first, lengths_B, gamma: int):
  """Drafts offsets 1 to gamma - 1, until every row has stopped.

  A loop in the program: compile time does not grow with gamma.

  Args:
    extend: (memory, tokens_B1, at_B, offset, going_B) -> (memory, token_B,
      q_BV, going_B): reads the previous token, at index at_B of its row, and
      draws the next one.
    first: the result of extend for offset 0.
    lengths_B: committed tokens of each row.
    gamma: draft tokens in a window.

  Returns:
    (memory, types.Draft).
  """
  memory, token_B, q_BV, going_B = first
  tokens_KB = jnp.zeros((gamma, *token_B.shape), token_B.dtype)
  q_KBV = jnp.zeros((gamma, *q_BV.shape), q_BV.dtype)

  def body(carry):
    offset, memory, tokens_KB, q_KBV, going_B, count_B = carry
    at_B = lengths_B + offset - 1
    memory, token_B, q_BV, going_B = extend(
      memory, tokens_KB[offset - 1][:, None], at_B, offset, going_B
    )
    return (
      offset + 1,
      memory,
      tokens_KB.at[offset].set(token_B),
      q_KBV.at[offset].set(q_BV),
      going_B,
      count_B + going_B,
    )

  _, memory, tokens_KB, q_KBV, _, count_B = jax.lax.while_loop(
    lambda carry: (carry[0] < gamma) & jnp.any(carry[4]),
    body,
    (
      jnp.int32(1),
      memory,
      tokens_KB.at[0].set(token_B),
      q_KBV.at[0].set(q_BV),
      going_B,
      going_B.astype(jnp.int32),
    ),
  )
  return memory, types.Draft(tokens_KB.T, jnp.moveaxis(q_KBV, 0, 1), count_B)


def _confidence(logits_BV):
  """The largest probability at temperature 1: [B]."""
  best_B1 = jnp.max(logits_BV, -1, keepdims=True)
  return 1 / jnp.sum(jnp.exp(logits_BV - best_B1), -1)
