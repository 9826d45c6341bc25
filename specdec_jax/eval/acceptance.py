"""alpha, teacher-forced: how often draft and target agree on a given text.

Untimed, and apart from decoding: both models read the text that plain decoding
emitted, so alpha does not depend on gamma, the rule or the draws of a run.
"""

import functools

import jax
import jax.numpy as jnp

from specdec_jax import decode, types, windows
from specdec_jax import sampling as sampling_lib

Array = jax.Array


@functools.partial(jax.jit, static_argnames=('drafter', 'coupled', 'vocab'))
def walk(
  weights: types.Weights,
  request: decode.Request,
  steps: Array,
  *,
  drafter: types.Drafter,
  coupled: bool,
  vocab: int,
):
  """Proposes at `steps` prefixes of a text, one token apart, then from anew.

  request: the prompts with the text after them; limit_B is where it ends. The
  target is never run. Returns (tokens_BL, proposed_BL, check): the first token
  proposed for each index, where one was, and a number that uses all the work.
  """
  B, L = request.tokens_BL.shape
  live_B = request.lengths_B < request.limit_B
  span_B = jnp.maximum(request.limit_B - request.lengths_B, 1)
  at = lambda i: types.Context(
    request.tokens_BL,
    request.lengths_B + i % span_B,
    live_B,
    request.sampling,
  )
  nothing = types.Verdict(jnp.zeros((B,), jnp.int32), jnp.zeros((B, vocab)))

  def body(i, carry):
    state, tokens_BL, proposed_BL, check = carry
    context = at(i)
    noise = sampling_lib.noise(
      request.seed_B,
      request.request_B,
      context.lengths_B,
      request.sampling,
      gamma=drafter.gamma,
      coupled=coupled,
    )
    draft, state, _ = drafter.propose(weights, state, context, noise, None)
    state = drafter.commit(state, at(i + 1), nothing, None)
    slots_B = jnp.where(live_B, context.lengths_B, L)
    put = lambda old, new: old.at[jnp.arange(B), slots_B].set(new, mode='drop')
    check += jnp.sum(draft.tokens_BK) + jnp.sum(draft.count_B)
    if draft.q_BKV is not None:
      # So that XLA cannot leave out writing q, which a real window reads.
      check += jnp.sum(draft.q_BKV[..., 0]).astype(check.dtype)
    return (
      state,
      put(tokens_BL, draft.tokens_BK[:, 0]),
      put(proposed_BL, draft.count_B > 0),
      check,
    )

  carry = (
    drafter.init(weights, at(0), None),
    jnp.zeros((B, L), jnp.int32),
    jnp.zeros((B, L), bool),
    jnp.int32(0),
  )
  return jax.lax.fori_loop(0, steps, body, carry)[1:]


@functools.partial(jax.jit, static_argnames=('target', 'draft', 'chunk'))
def overlap(
  weights: types.Weights,
  request: decode.Request,
  proposals_BL: Array,
  proposed_BL: Array,
  *,
  target: types.Model,
  draft: types.Model | None,
  chunk: int,
) -> Array:
  """sum_x min(p(x), q(x)) for the token at each index of the text, [B, L].

  With a draft model q is its distribution; without, q is certain of
  proposals_BL where proposed_BL, and the sum is p of that token; 0 elsewhere.
  Indices outside the text hold garbage.
  """
  B, L = request.tokens_BL.shape

  def distribution(model, params, cache, tokens_BT, index_T):
    hidden_BTD, _, cache = windows.read(
      model,
      params,
      tokens_BT,
      jnp.full((B,), index_T[0]),
      cache,
      slots=L,
      keep_BT=jnp.broadcast_to(index_T < L, (B, chunk)),
    )
    logits_BTV = model.head(params, hidden_BTD)
    return sampling_lib.probabilities(logits_BTV, request.sampling), cache

  def body(carry):
    at, caches, out_BP = carry
    index_T = at + jnp.arange(chunk)
    take = lambda x_BL, index_T: x_BL.at[:, index_T].get(mode='clip')
    tokens_BT = take(request.tokens_BL, index_T)
    p_BTV, target_cache = distribution(
      target, weights.target, caches[0], tokens_BT, index_T
    )
    if draft is None:
      draft_cache = ()
      next_BT1 = take(proposals_BL, index_T + 1)[..., None]
      p_BT = jnp.take_along_axis(p_BTV, next_BT1, -1)[..., 0]
      sums_BT = jnp.where(take(proposed_BL, index_T + 1), p_BT, 0)
    else:
      q_BTV, draft_cache = distribution(
        draft, weights.draft, caches[1], tokens_BT, index_T
      )
      sums_BT = jnp.sum(jnp.minimum(p_BTV, q_BTV), -1)
    out_BP = jax.lax.dynamic_update_slice(
      out_BP, sums_BT.astype(out_BP.dtype), (0, at + 1)
    )
    return at + chunk, (target_cache, draft_cache), out_BP

  caches = (
    target.init_cache(B, L),
    () if draft is None else draft.init_cache(B, L),
  )
  out_BP = jnp.zeros((B, L + chunk + 1))
  return jax.lax.while_loop(
    lambda carry: carry[0] < jnp.max(request.limit_B) - 1,
    body,
    (jnp.int32(0), caches, out_BP),
  )[2][:, :L]
