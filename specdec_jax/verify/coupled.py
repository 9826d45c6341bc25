"""Coupled verification: the output does not depend on the drafter."""

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import chain, tree


def verify(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Accepts drafts as long as they equal plain decoding's tokens.

  Each target token is drawn from p with plain decoding's noise at that index,
  so the output is plain decoding's, token for token, for any drafter. Sampled
  drafters draw with the same noise; acceptance is then between
  (1 - D) / (1 + D) and 1 - D, with D the total variation between p and q.
  Daliri et al. 2024 (https://arxiv.org/abs/2408.07978).
  """
  if tree.is_one(draft):
    return _on_tree(noise, draft, p_BNV)
  B, K = draft.tokens_BK.shape
  agrees = [
    noise.next(jnp.full((B,), k, jnp.int32), p_BNV[:, k])
    == draft.tokens_BK[:, k]
    for k in range(K)
  ]
  ok_BK = jnp.stack(agrees, 1) if K else jnp.zeros((B, 0), bool)
  accepted_B = chain.prefix(ok_BK & chain.proposed(draft))
  # decode draws from these weights with the same noise: the same token again.
  return types.Verdict(accepted_B, chain.row(p_BNV, accepted_B))


def _on_tree(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Follows the target's own draws as long as they are among the children."""
  depth_BN, _ = tree.shape(draft.parents_BK)
  draw = jax.vmap(noise.next, (1, 1), 1)
  accepted_B, path_BK = tree.matching(draft, draw(depth_BN, p_BNV))
  last_B = tree.last_of(accepted_B, path_BK)
  return types.Verdict(accepted_B, chain.row(p_BNV, last_B + 1), path_BK)


RULE = types.Rule('coupled', verify, coupled=True, certain=True, trees=True)
