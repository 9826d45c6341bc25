"""Speculative sampling by rejection."""

import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import chain


def verify(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Keeps a prefix of the draft; returns the weights of one more token.

  Draft token k is accepted with probability min(1, p_k / q_k). After the first
  rejection the next token is drawn from max(p - q, 0), normalised; if all
  drafts are accepted, from p. Emitted tokens are distributed exactly as p.
  Leviathan et al. 2023, Algorithm 1 (https://arxiv.org/abs/2211.17192).
  """
  p_BK = chain.pick(p_BNV, draft.tokens_BK)
  q_BK = chain.q_of_tokens(draft)
  # u < p / q, without dividing by a q that may underflow. Strict: a token with
  # p = 0 never passes, even at u = 0.
  ok_BK = noise.accept_BK * q_BK < p_BK
  accepted_B = chain.prefix(ok_BK & chain.proposed(draft))
  # Past the last proposal q is zero, so the residual is p itself: bonus and
  # recovered token are one expression.
  p_BV = chain.row(p_BNV, accepted_B)
  return types.Verdict(
    accepted_B, jnp.maximum(p_BV - chain.q_row(draft, accepted_B, p_BV), 0)
  )


RULE = types.Rule('reject', verify, certain=True)
