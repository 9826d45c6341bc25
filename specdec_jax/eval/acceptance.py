"""alpha, teacher-forced: how often draft and target agree on a given text.

Untimed, and apart from decoding: both models read the text that plain decoding
emitted, so alpha does not depend on gamma, the rule or the draws of a run.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import decode, types, windows
from specdec_jax import sampling as sampling_lib

Array = jax.Array


@functools.partial(jax.jit, static_argnames=('target', 'drafter', 'coupled'))
def walk(
  weights: types.Weights,
  request: decode.Request,
  steps: Array,
  *,
  target: types.Model,
  drafter: types.Drafter,
  coupled: bool,
):
  """Proposes at `steps` prefixes of a text, one token apart, then from anew.

  request: the prompts with the text after them; limit_B is where it ends. The
  target is not run; a drafter in its cache finds there what it wrote. Returns
  (tokens_BL, proposed_BL, check): the first token proposed for each index,
  where one was, and a number that uses all the work.
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
  nothing = types.Verdict(
    jnp.zeros((B,), jnp.int32), jnp.zeros((B, target.vocab))
  )

  def body(i, carry):
    state, cache, tokens_BL, proposed_BL, check = carry
    context = at(i)
    noise = sampling_lib.noise(
      request.seed_B,
      request.request_B,
      context.lengths_B,
      request.sampling,
      gamma=drafter.gamma,
      coupled=coupled,
    )
    draft, state, cache = drafter.propose(weights, state, context, noise, cache)
    state = drafter.commit(state, at(i + 1), nothing, None)
    slots_B = jnp.where(live_B, context.lengths_B, L)
    put = lambda old, new: old.at[jnp.arange(B), slots_B].set(new, mode='drop')
    check += jnp.sum(draft.tokens_BK) + jnp.sum(draft.count_B)
    if draft.q_BKV is not None:
      # So that XLA cannot leave out writing q, which a real window reads.
      check += jnp.sum(draft.q_BKV[..., 0]).astype(check.dtype)
    return (
      state,
      cache,
      put(tokens_BL, draft.tokens_BK[:, 0]),
      put(proposed_BL, draft.count_B > 0),
      check,
    )

  carry = (
    drafter.init(weights, at(0), None),
    target.init_cache(B, L),
    jnp.zeros((B, L), jnp.int32),
    jnp.zeros((B, L), bool),
    jnp.int32(0),
  )
  return jax.lax.fori_loop(0, steps, body, carry)[2:]


class Overlap(NamedTuple):
  """For the token at each index of a text, garbage outside it.

  alpha_BL: sum_x min(p(x), q(x)). distance_BL: total variation between p and
  what a lossy rule emits there; 0 for a lossless one.
  """

  alpha_BL: Array
  distance_BL: Array


@functools.partial(
  jax.jit, static_argnames=('target', 'draft', 'rule', 'chunk')
)
def overlap(
  weights: types.Weights,
  request: decode.Request,
  proposals_BL: Array,
  proposed_BL: Array,
  *,
  target: types.Model,
  draft: types.Model | None,
  rule: types.Rule,
  chunk: int,
) -> Overlap:
  """How far apart p and q are at each index of the text.

  With a draft model q is its distribution; without, q is certain of
  proposals_BL where proposed_BL, and alpha is p of that token; 0 elsewhere.
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
    p_BTV = sampling_lib.probabilities(logits_BTV, request.sampling)
    return p_BTV, logits_BTV, cache

  def body(carry):
    at, caches, out = carry
    index_T = at + jnp.arange(chunk)
    take = lambda x_BL, index_T: x_BL.at[:, index_T].get(mode='clip')
    tokens_BT = take(request.tokens_BL, index_T)
    p_BTV, logits_BTV, target_cache = distribution(
      target, weights.target, caches[0], tokens_BT, index_T
    )
    if draft is None:
      draft_cache = ()
      next_BT1 = take(proposals_BL, index_T + 1)[..., None]
      q_BTV = jnp.arange(target.vocab)[None, None] == next_BT1
      asked_BT = take(proposed_BL, index_T + 1)
      q_BTV = (q_BTV & asked_BT[..., None]).astype(p_BTV.dtype)
    else:
      q_BTV, _, draft_cache = distribution(
        draft, weights.draft, caches[1], tokens_BT, index_T
      )
    found = [jnp.sum(jnp.minimum(p_BTV, q_BTV), -1)]
    if rule.law is None:
      found += [jnp.zeros(found[0].shape)]
    else:
      scores = types.Scores(logits_BTV, request.sampling)
      off_BTV = jnp.abs(rule.law(p_BTV, q_BTV, scores) - p_BTV)
      found += [jnp.sum(off_BTV, -1) / 2]
    out = Overlap(
      *(
        jax.lax.dynamic_update_slice(
          old_BP, new_BT.astype(old_BP.dtype), (0, at + 1)
        )
        for old_BP, new_BT in zip(out, found, strict=True)
      )
    )
    return at + chunk, (target_cache, draft_cache), out

  caches = (
    target.init_cache(B, L),
    () if draft is None else draft.init_cache(B, L),
  )
  empty = Overlap(*(jnp.zeros((B, L + chunk + 1)) for _ in Overlap._fields))
  found = jax.lax.while_loop(
    lambda carry: carry[0] < jnp.max(request.limit_B) - 1,
    body,
    (jnp.int32(0), caches, empty),
  )[2]
  return Overlap(*(x_BP[:, :L] for x_BP in found))
