"""Drafting with a smaller language model that has a cache of its own."""

import jax
import jax.numpy as jnp

from specdec_jax import forward, types
from specdec_jax import sampling as sampling_lib

# Of the setting min_confidence, wherever it is one.
CONFIDENCE = 'end a window where the likeliest token has less; 0: never'


def make(
  model: types.Model,
  *,
  gamma: int,
  min_confidence: float = 0.0,
  chunk: int = 64,
) -> types.Drafter:
  """gamma tokens a window, sampled from the draft under the target's settings.

  Reads weights.draft. A window starts by reading the last two committed tokens:
  after full acceptance the draft has not yet read the last token it proposed,
  otherwise the first of the two is a harmless overwrite.

  min_confidence: a row stops before the first token of which the draft's
  largest probability, at temperature 1, is less; 0 never stops. It looks at the
  law, before a token is drawn: to stop at an unlikely token would leave the
  likely ones proposed more often than q says. Drafting ends when all rows stop.

  Raises:
    ValueError: gamma < 1, or min_confidence outside [0, 1).
  """
  if gamma < 1:
    raise ValueError(f'gamma={gamma}: a drafter proposes at least 1 token')
  check_confidence('min_confidence', min_confidence)

  def init(weights, context, features):
    del features
    B, L = context.tokens_BL.shape
    cache = model.init_cache(B, L)
    unread_B = jnp.maximum(context.lengths_B - 2, 0)
    cache, _ = forward.prefill(
      model, weights.draft, context.tokens_BL, unread_B, cache, chunk=chunk
    )
    return cache

  def propose(weights, cache, context, noise, target_cache):
    L = context.tokens_BL.shape[1]
    live_B1 = context.live_B[:, None]

    def extend(cache, tokens_BT, start_B, offset, going_B):
      hidden_BTD, _, cache = forward.read(
        model,
        weights.draft,
        tokens_BT,
        start_B,
        cache,
        slots=L,
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
    cache, token_B, q_BV, going_B = extend(
      cache, last_BT, start_B, 0, context.live_B
    )
    first = cache, token_B, q_BV, going_B
    cache, tokens_KB, q_KBV, count_B = chain(
      extend, first, context.lengths_B, gamma
    )
    q_BKV = jnp.moveaxis(q_KBV, 0, 1)
    return types.Draft(tokens_KB.T, q_BKV, count_B), cache, target_cache

  def commit(cache, context, outcome, features_BNE):
    del context, outcome, features_BNE
    return cache  # slots past the committed length are overwritten when read

  stops = min_confidence > 0
  return types.Drafter('lm', gamma, init, propose, commit, stops=stops)


def check_confidence(name: str, value: float) -> None:
  """Raises ValueError for a min_confidence out of range, by its full name."""
  if not 0 <= value < 1:
    raise ValueError(f'{name}={value}: must be in [0, 1); 0 never stops')


def draw(noise, context, min_confidence: float, logits_B1V, offset, going_B):
  """One draft of every row: (token_B, q_BV, going_B); see make."""
  q_BV = sampling_lib.probabilities(logits_B1V, context.sampling)[:, 0]
  if min_confidence:
    going_B &= _confidence(logits_B1V[:, 0]) >= min_confidence
  return noise.draft(offset, q_BV), q_BV, going_B


def chain(extend, first, lengths_B, gamma: int):
  """Drafts offsets 1 to gamma - 1, until every row has stopped.

  One traced step, not gamma of them: compile time does not grow with gamma.

  extend(memory, tokens_B1, at_B, offset, going_B) -> (memory, token_B, q_BV,
  going_B) reads the token before, which is at_B, and draws one; first is what
  that gives for offset 0. Returns (memory, tokens_KB, q_KBV, count_B).
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
  return memory, tokens_KB, q_KBV, count_B


def _confidence(logits_BV):
  """The largest probability at temperature 1: [B]."""
  best_B1, _ = sampling_lib.largest(logits_BV)
  return 1 / jnp.sum(jnp.exp(logits_BV - best_B1), -1)
