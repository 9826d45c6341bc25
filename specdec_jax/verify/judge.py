"""Applies a rule to the logits of a window."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import sampling, types
from specdec_jax.verify import chain

Array = types.Array


class Judged(NamedTuple):
  """The drafts of a window that are kept, and the token after them.

  accepted_B: how many drafts are kept.
  weights_BV: the unnormalised distribution of the token after them.
  next_B: that token.
  lost_BN: whether the logits of a position are not finite.
  """

  accepted_B: Array
  weights_BV: Array
  next_B: Array
  lost_BN: Array


def judge(
  rule: types.Rule,
  settings: types.Sampling,
  noise: types.Noise,
  draft: types.Draft,
  logits_BNV: Array,
) -> Judged:
  """Applies the rule; for greedy rows without the distributions.

  Args:
    rule: the rule.
    settings: temperature, top-k and top-p of each row.
    noise, draft: of the window.
    logits_BNV: the target's, after the last committed token and each draft.
  """
  # Once for all that follows: each pass over the vocabulary takes time.
  best_BN1 = jnp.max(logits_BNV, -1, keepdims=True)
  greedy = lambda: _greedy(draft, logits_BNV, best_BN1)
  sampled = lambda: _sampled(rule, settings, noise, draft, logits_BNV, best_BN1)
  if rule.certain:
    every = jnp.all(sampling.is_greedy(settings))
    accepted_B, weights_BV, next_B = jax.lax.cond(every, greedy, sampled)
  else:
    accepted_B, weights_BV, next_B = sampled()
  lost_BN = ~jnp.isfinite(best_BN1[..., 0])
  return Judged(accepted_B, weights_BV, next_B, lost_BN)


def _sampled(rule, settings, noise, draft, logits_BNV, best_BN1):
  p_BNV = sampling.probabilities(logits_BNV, settings, best_BN1)
  scores = types.Scores(logits_BNV, settings)
  verdict = rule.verify(noise, draft, p_BNV, *[scores] * rule.scored)
  p_BV = chain.row(p_BNV, verdict.accepted_B)
  # In exact arithmetic a rejection leaves mass; rounding may leave none.
  empty_B1 = ~(jnp.sum(verdict.weights_BV, -1, keepdims=True) > 0)
  weights_BV = jnp.where(empty_B1, p_BV, verdict.weights_BV)
  next_B = noise.next(verdict.accepted_B, weights_BV)
  return verdict.accepted_B, weights_BV, next_B


def _greedy(draft, logits_BNV, best_BN1):
  best_BN = sampling.first_of(logits_BNV, best_BN1)[..., 0]
  ok_BK = draft.tokens_BK == best_BN[:, : draft.tokens_BK.shape[1]]
  accepted_B = chain.prefix(ok_BK & chain.proposed(draft))
  next_B = jnp.take_along_axis(best_BN, accepted_B[:, None], 1)[:, 0]
  wide = jnp.promote_types(logits_BNV.dtype, jnp.result_type(float))
  ids_1V = jnp.arange(logits_BNV.shape[-1])[None]
  return accepted_B, (ids_1V == next_B[:, None]).astype(wide), next_B
