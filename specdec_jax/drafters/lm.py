"""Drafting with a smaller language model that has a cache of its own."""

import jax
import jax.numpy as jnp

from specdec_jax import sampling as sampling_lib
from specdec_jax import types, windows


def make(model: types.Model, *, gamma: int, chunk: int = 64) -> types.Drafter:
  """gamma tokens a window, sampled from the draft under the target's settings.

  Reads weights.draft. A window starts by reading the last two committed tokens:
  after full acceptance the draft has not yet read the last token it proposed,
  otherwise the first of the two is a harmless overwrite.

  Raises:
    ValueError: gamma < 1.
  """
  if gamma < 1:
    raise ValueError(f'gamma={gamma}: a drafter proposes at least 1 token')

  def init(weights, context, features):
    del features
    B, L = context.tokens_BL.shape
    cache = model.init_cache(B, L)
    unread_B = jnp.maximum(context.lengths_B - 2, 0)
    cache, _ = windows.prefill(
      model, weights.draft, context.tokens_BL, unread_B, cache, chunk=chunk
    )
    return cache

  def propose(weights, cache, context, noise, target_cache):
    L = context.tokens_BL.shape[1]
    live_B1 = context.live_B[:, None]

    def extend(cache, tokens_BT, start_B, offset):
      hidden_BTD, _, cache = windows.read(
        model,
        weights.draft,
        tokens_BT,
        start_B,
        cache,
        slots=L,
        keep_BT=live_B1,
      )
      logits_B1V = model.head(weights.draft, hidden_BTD[:, -1:])
      q_BV = sampling_lib.probabilities(logits_B1V, context.sampling)[:, 0]
      return cache, noise.draft(offset, q_BV), q_BV

    start_B = context.lengths_B - 2
    last_BT = jnp.take_along_axis(
      context.tokens_BL,
      jnp.maximum(start_B[:, None] + jnp.arange(2)[None], 0),
      1,
    )
    cache, token_B, q_BV = extend(cache, last_BT, start_B, 0)

    def body(carry, offset):
      cache, token_B = carry
      at_B = context.lengths_B + offset - 1
      cache, token_B, q_BV = extend(cache, token_B[:, None], at_B, offset)
      return (cache, token_B), (token_B, q_BV)

    # One traced step, not gamma of them: compile time does not grow with gamma.
    (cache, _), (tokens_KB, q_KBV) = jax.lax.scan(
      body, (cache, token_B), jnp.arange(1, gamma)
    )
    tokens_BK = jnp.concatenate([token_B[None], tokens_KB]).T
    q_BKV = jnp.moveaxis(jnp.concatenate([q_BV[None], q_KBV]), 0, 1)
    count_B = jnp.full_like(context.lengths_B, gamma)
    return types.Draft(tokens_BK, q_BKV, count_B), cache, target_cache

  def commit(cache, context, verdict, features_BNE):
    del context, verdict, features_BNE
    return cache  # slots past the committed length are overwritten when read

  return types.Drafter('lm', gamma, init, propose, commit)
