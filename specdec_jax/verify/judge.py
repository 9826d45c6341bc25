"""Applies a rule to the logits of a window."""

import jax
import jax.numpy as jnp

from specdec_jax import sampling, types
from specdec_jax.verify import chain


def judge(
  rule: types.Rule,
  settings: types.Sampling,
  noise: types.Noise,
  draft: types.Draft,
  logits_BNV: types.Array,
):
  """The drafts that are kept and the token after them.

  Args:
    rule: the rule.
    settings: temperature, top-k and top-p of each row.
    noise, draft: of the window.
    logits_BNV: the target's, after the last committed token and each draft.

  Returns:
    (accepted_B, weights_BV, next_B): how many drafts are kept, the unnormalised
    distribution of the token after them, and that token.
  """
  if not rule.certain:
    return _sampled(rule, settings, noise, draft, logits_BNV)
  # Greedy rows need ids only: no pass over the vocabulary for p and residual.
  return jax.lax.cond(
    jnp.all(sampling.is_greedy(settings)),
    lambda: _greedy(draft, logits_BNV),
    lambda: _sampled(rule, settings, noise, draft, logits_BNV),
  )


def _sampled(rule, settings, noise, draft, logits_BNV):
  p_BNV = sampling.probabilities(logits_BNV, settings)
  scores = types.Scores(logits_BNV, settings)
  verdict = rule.verify(noise, draft, p_BNV, *[scores] * rule.scored)
  p_BV = chain.row(p_BNV, verdict.accepted_B)
  # In exact arithmetic a rejection leaves mass; rounding may leave none.
  empty_B1 = ~(jnp.sum(verdict.weights_BV, -1, keepdims=True) > 0)
  weights_BV = jnp.where(empty_B1, p_BV, verdict.weights_BV)
  next_B = noise.next(verdict.accepted_B, weights_BV)
  return verdict.accepted_B, weights_BV, next_B


def _greedy(draft, logits_BNV):
  best_BN = sampling.largest(logits_BNV)[1][..., 0]
  ok_BK = draft.tokens_BK == best_BN[:, : draft.tokens_BK.shape[1]]
  accepted_B = chain.prefix(ok_BK & chain.proposed(draft))
  next_B = jnp.take_along_axis(best_BN, accepted_B[:, None], 1)[:, 0]
  wide = jnp.promote_types(logits_BNV.dtype, jnp.result_type(float))
  ids_1V = jnp.arange(logits_BNV.shape[-1])[None]
  return accepted_B, (ids_1V == next_B[:, None]).astype(wide), next_B
