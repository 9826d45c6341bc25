"""alpha, teacher-forced: how often draft and target agree on a given text.

Untimed, and apart from decoding: both models read the text that plain decoding
emitted, so alpha does not depend on gamma, the rule or the draws of a run.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import decode, forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.verify import chain, lenient

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
  zeros_B = jnp.zeros((B,), jnp.int32)
  nothing = types.Outcome(
    zeros_B, zeros_B, zeros_B, jnp.zeros((B, target.vocab))
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

  alpha_BL: sum_x min(p(x), q(x)). kept_BL: how much of q the rule keeps, alpha
  but for a lossy one. distance_BL: total variation between p and what a lossy
  rule emits there; 0 for a lossless one.
  """

  alpha_BL: Array
  kept_BL: Array
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

  def columns(index_T, *logits):
    p_BTV, *q = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    if q:
      (q_BTV,) = q
    else:
      token_BT1 = forward.at(proposals_BL, index_T)[..., None]
      q_BTV = jnp.arange(target.vocab)[None, None] == token_BT1
      asked_BT1 = forward.at(proposed_BL, index_T)[..., None]
      q_BTV = (q_BTV & asked_BT1).astype(p_BTV.dtype)
    alpha_BT = jnp.sum(jnp.minimum(p_BTV, q_BTV), -1)
    scores = types.Scores(logits[0], request.sampling)
    return alpha_BT, *judged(rule, p_BTV, q_BTV, scores)

  readers = [(target, weights.target)]
  readers += [] if draft is None else [(draft, weights.draft)]
  return Overlap(
    *forward.score(
      readers, request.tokens_BL, request.limit_B, columns, chunk=chunk
    )
  )


def judged(
  rule: types.Rule, p_BTV: Array, q_BTV: Array, scores: types.Scores
) -> tuple[Array, Array]:
  """What a rule keeps of one draft, and how far from p it emits: [B, T] each.

  The second is the total variation, 0 for a lossless rule.
  """
  if rule.kept is None:
    kept_BTV = jnp.minimum(p_BTV, q_BTV)
  else:
    kept_BTV = rule.kept(p_BTV, q_BTV, scores)
  kept_BT = jnp.sum(kept_BTV, -1)
  if rule.emitted is None:
    return kept_BT, jnp.zeros(kept_BT.shape)
  off_BTV = jnp.abs(rule.emitted(p_BTV, q_BTV, scores) - p_BTV)
  return kept_BT, jnp.sum(off_BTV, -1) / 2


@functools.partial(
  jax.jit, static_argnames=('target', 'draft', 'chunk', 'leniences')
)
def scores(
  weights: types.Weights,
  request: decode.Request,
  *,
  target: types.Model,
  draft: types.Model,
  chunk: int,
  leniences: tuple[float, ...],
) -> Array:
  """p(x), q(x) of the token x at each index, and what each lenience does there.

  request: the prompts with the text after them; limit_B is where it ends.
  Returns [B, L, 2 + 2 X]: last, for every lenience, the mass of the drafts that
  it keeps, then for every one the total variation of what it emits. p or q is
  NaN where its model's logits are not finite.
  """
  rules = [lenient.make(l) for l in leniences]

  def columns(index_T, *logits):
    p_BTV, q_BTV = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    tokens_BT = forward.at(request.tokens_BL, index_T)
    scored = types.Scores(logits[0], request.sampling)
    kept, distance = zip(
      *(judged(rule, p_BTV, q_BTV, scored) for rule in rules), strict=True
    )
    # A greedy law is a one-hot, whatever the logits are.
    said = [
      jnp.where(
        jnp.isfinite(jnp.max(x, -1)), chain.pick(law, tokens_BT), jnp.nan
      )
      for x, law in zip(logits, (p_BTV, q_BTV), strict=True)
    ]
    return [*said, *kept, *distance]

  readers = (target, weights.target), (draft, weights.draft)
  found = forward.score(
    readers, request.tokens_BL, request.limit_B, columns, chunk=chunk
  )
  return jnp.stack(found, -1)
