"""Runs a drafter along a known text: a window at every token, none tested.

Drops drafts and commits the text's own tokens: drafting is timed (costs.parts),
acceptance measured on plain decoding's text (bench.predict), and a published
draft compared with its target's (drafters.readings).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from specdec_jax import decode, forward, types
from specdec_jax.verify import chain

Array = types.Array


def context(loop: decode.Loop, request: decode.Request, i) -> types.Context:
  """Makes the Context after i tokens of the texts that follow the prompts."""
  span_B = jnp.maximum(request.limit_B - request.lengths_B, 0)
  committed_B = request.lengths_B + jnp.minimum(i, span_B)
  known = request.tokens_BL, committed_B, i < span_B
  return decode.context_of(loop.drafter, request, *known)


def window(loop: decode.Loop, weights, request, i, own, cache, features_BNE):
  """Drafts after i tokens of each text, and commits the next one.

  Returns (types.Draft, drafter's state, target's cache). features_BNE: as in
  types.Drafter.commit; only those of the last committed token count.
  """
  now = context(loop, request, i)
  noise = loop.noise(
    *(request.seed_B, request.request_B, now.lengths_B, request.sampling),
    gamma=loop.drafter.gamma,
    coupled=loop.rule.coupled,
  )
  draft, own, cache = loop.drafter.propose(weights, own, now, noise, cache)
  one_B, path_BK = now.live_B.astype(jnp.int32), None
  if draft.parents_BK is not None:
    path_BK = jnp.zeros_like(draft.parents_BK)
  outcome = types.Outcome(0 * one_B, 0 * one_B, one_B, path_BK)
  after = context(loop, request, i + 1)
  own = loop.drafter.commit(own, after, outcome, features_BNE)
  return draft, own, cache


def score(
  loop: decode.Loop,
  weights: types.Weights,
  request: decode.Request,
  columns: Callable[[Array, Array], Sequence[Array]],
) -> list[Array]:
  """Computes numbers about each token of the texts: [B, L] each.

  Called inside a jit. The target reads a text once, a chunk at a time, and the
  drafter gets its features. Outside the texts there is garbage.

  columns: (logits_BTV, q_BTV) -> arrays [B, T] about T tokens, from the
    target's logits, and q of the first draft in a window before each (or 0).
  """
  B, L = request.tokens_BL.shape
  T, N, taps = loop.options.chunk, loop.drafter.gamma + 1, loop.drafter.taps
  row_B1, step_T = jnp.arange(B)[:, None], jnp.arange(T, dtype=jnp.int32)
  first_B, blank_BV = jnp.zeros(B, jnp.int32), jnp.zeros((B, loop.target.vocab))
  request = request._replace(gamma_B=jnp.ones_like(request.gamma_B))
  begun, _ = decode.start(loop, weights, request)

  def chunk(i, own, cache):
    at_BT = request.lengths_B[:, None] + i + step_T[None]
    hidden_BTD, tapped, cache = forward.read(
      *(loop.target, weights.target, request.tokens_BL[row_B1, at_BT - 1]),
      *(at_BT[:, 0] - 1, cache),
      slots=L,
      taps=taps,
    )
    features_BTE = forward.concat(tapped) if taps else None

    def turn(own, j):
      of_last_BNE = None
      if features_BTE is not None:
        of_last_BNE = jnp.repeat(features_BTE[:, j][:, None], N, 1)
      given = weights, request, i + j, own, cache, of_last_BNE
      # What a drafter wrote to the target's cache is dropped.
      draft, own, _ = window(loop, *given)
      return own, chain.q_row(draft, first_B, blank_BV)

    own, q_TBV = jax.lax.scan(turn, own, step_T)
    logits_BTV = loop.target.head(weights.target, hidden_BTD)
    return own, cache, at_BT, columns(logits_BTV, jnp.moveaxis(q_TBV, 0, 1))

  def body(carry):
    i, own, cache, out = carry
    own, cache, at_BT, new = chunk(i, own, cache)
    put = lambda old, new: old.at[row_B1, at_BT].set(new, mode='drop')
    return i + T, own, cache, jax.tree.map(put, out, [*new])

  first = jnp.int32(0), begun.drafter, begun.cache
  made = jax.eval_shape(chunk, *first)[-1]
  out = [jnp.zeros((B, L), x.dtype) for x in made]
  end = jnp.max(request.limit_B - request.lengths_B)
  return jax.lax.while_loop(lambda x: x[0] < end, body, (*first, out))[-1]
