"""A drafter along a known text: a window at every token, and none is tested.

What is drafted is dropped, and the text's own token committed. So drafting is
timed (costs.parts), acceptance is measured on plain decoding's text
(bench.predict), and a published draft is compared with its target's
(drafters.readings).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import decode, forward, types

Array = types.Array


def context(loop: decode.Loop, request: decode.Request, i) -> types.Context:
  """The types.Context once i tokens of each text are committed.

  request: prompts with the texts after them, which end at limit_B. A row whose
    text has ended is not live.
  """
  span_B = jnp.maximum(request.limit_B - request.lengths_B, 0)
  committed_B = request.lengths_B + jnp.minimum(i, span_B)
  known = request.tokens_BL, committed_B, i < span_B
  return decode.context_of(loop.drafter, request, *known)


def window(loop: decode.Loop, weights, request, i, own, cache, features_BNE):
  """Drafts after i tokens of each text, and commits the next one.

  own: the drafter's state. cache: the target's. features_BNE: as of
    types.Drafter.commit; only those of the last committed token count.

  Returns (types.Draft, own, cache).
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
  seen: Callable[[types.Context, types.Draft], Any],
  columns: Callable[..., Sequence[Array]],
) -> list[Array]:
  """Computes numbers about each token of the texts: [B, L, ...] each.

  Called inside a jit. The target reads a text once, a chunk at a time, and the
  drafter gets its features. Outside of the texts there is garbage.

  Args:
    request: as in `context`.
    seen: (context, draft) of a window -> what is kept of it, rows first.
    columns: (hidden_BTD, what was kept of T windows) -> arrays [B, T, ...]
      about the tokens after those windows, which hidden_BTD predicts.
  """
  B, L = request.tokens_BL.shape
  T, N, taps = loop.options.chunk, loop.drafter.gamma + 1, loop.drafter.taps
  row_B1, step_T = jnp.arange(B)[:, None], jnp.arange(T, dtype=jnp.int32)
  begun, _ = decode.start(loop, weights, request)
  swapped = functools.partial(jax.tree.map, lambda x: jnp.moveaxis(x, 0, 1))

  def chunk(i, own, cache):
    at_BT = request.lengths_B[:, None] + i + step_T[None]
    hidden_BTD, tapped, cache = forward.read(
      *(loop.target, weights.target, request.tokens_BL[row_B1, at_BT - 1]),
      *(at_BT[:, 0] - 1, cache),
      slots=L,
      taps=taps,
    )
    features_BTE = forward.concat(tapped) if taps else None

    def turn(own, x):
      j, last_BE = x
      some_BNE = jnp.repeat(last_BE[:, None], N, 1) if taps else None
      given = weights, request, i + j, own, cache, some_BNE
      # What a drafter wrote to the target's cache is dropped.
      draft, own, _ = window(loop, *given)
      return own, seen(context(loop, request, i + j), draft)

    own, kept = jax.lax.scan(turn, own, (step_T, swapped(features_BTE)))
    return own, cache, at_BT, columns(hidden_BTD, swapped(kept))

  def body(carry):
    i, own, cache, out = carry
    own, cache, at_BT, new = chunk(i, own, cache)
    put = lambda old, new: old.at[row_B1, at_BT].set(new, mode='drop')
    return i + T, own, cache, jax.tree.map(put, out, [*new])

  first = jnp.int32(0), begun.drafter, begun.cache
  made = jax.eval_shape(chunk, *first)[-1]
  out = [jnp.zeros((B, L, *x.shape[2:]), x.dtype) for x in made]
  end = jnp.max(request.limit_B - request.lengths_B)
  return jax.lax.while_loop(lambda x: x[0] < end, body, (*first, out))[-1]
