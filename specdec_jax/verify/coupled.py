"""Drafter-invariant speculative decoding."""

import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import chain


def verify(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Accepts while the draft agrees with plain decoding's own draws.

  Each target token is drawn from p with the noise that plain decoding uses at
  that position, so the output is plain sampling's, token for token, whatever
  the draft. Sampled drafters draw with the same noise; the acceptance is then
  between (1 - D) / (1 + D) and 1 - D, D the total variation. Daliri et al. 2024
  (https://arxiv.org/abs/2408.07978).
  """
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


RULE = types.Rule('coupled', verify, coupled=True)
