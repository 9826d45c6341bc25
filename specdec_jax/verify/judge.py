"""Applies a rule to a window's logits."""

import jax.numpy as jnp

from specdec_jax import sampling, types
from specdec_jax.verify import chain, tree

Array = types.Array


def judge(
  rule: types.Rule,
  settings: types.Sampling,
  noise: types.Noise,
  draft: types.Draft,
  logits_BNV: Array,
) -> tuple[Array, Array | None, Array, Array]:
  """Applies the rule; skips the distributions for greedy rows. logits_BNV are
  the target's, after the last committed token and each draft.

  Returns (accepted_B, path_BK, next_B, lost_BN): how many drafts are kept;
  which, in a tree (types.Verdict), else None; the token after them; where a
  position's logits are not finite.
  """
  if tree.is_one(draft) and not rule.trees:
    raise ValueError(f'rule {rule.name} takes chains, and this draft is a tree')
  # Once for all that follows: each pass over the vocabulary takes time.
  best_BN1 = jnp.max(logits_BNV, -1, keepdims=True)
  greedy = lambda: _greedy(draft, logits_BNV, best_BN1)
  sampled = lambda: _sampled(rule, settings, noise, draft, logits_BNV, best_BN1)
  if rule.certain:
    found = sampling.of_greedy(settings, greedy, sampled)
  else:
    found = sampled()
  accepted_B, path_BK, next_B = found
  if path_BK is None and draft.parents_BK is not None:
    assert not tree.is_one(draft), f'{rule.name} returns no path_BK'
    path_BK = draft.parents_BK.astype(jnp.int32)  # of no nodes
  lost_BN = ~jnp.isfinite(best_BN1[..., 0])
  return accepted_B, path_BK, next_B, lost_BN


def _sampled(rule, settings, noise, draft, logits_BNV, best_BN1):
  p_BNV = sampling.probabilities(logits_BNV, settings, best_BN1)
  scores = types.Scores(logits_BNV, settings)
  verdict = rule.verify(noise, draft, p_BNV, *[scores] * rule.scored)
  p_BV = chain.row(p_BNV, _last(verdict.accepted_B, verdict.path_BK))
  # In exact arithmetic a rejection leaves mass; rounding may leave none.
  empty_B1 = ~(jnp.sum(verdict.weights_BV, -1, keepdims=True) > 0)
  weights_BV = jnp.where(empty_B1, p_BV, verdict.weights_BV)
  next_B = noise.next(verdict.accepted_B, weights_BV)
  return verdict.accepted_B, verdict.path_BK, next_B


def _last(accepted_B, path_BK):
  """Returns the last kept draft's index in p_BNV."""
  return (
    accepted_B if path_BK is None else tree.last_of(accepted_B, path_BK) + 1
  )


def _greedy(draft, logits_BNV, best_BN1):
  best_BN = sampling.first_of(logits_BNV, best_BN1)[..., 0]
  if not tree.is_one(draft):
    ok_BK = draft.tokens_BK == best_BN[:, : draft.tokens_BK.shape[1]]
    accepted_B, path_BK = chain.prefix(ok_BK & chain.proposed(draft)), None
  else:
    accepted_B, path_BK = tree.matching(draft, best_BN)
  last_B1 = _last(accepted_B, path_BK)[:, None]
  next_B = jnp.take_along_axis(best_BN, last_B1, 1)[:, 0]
  return accepted_B, path_BK, next_B
