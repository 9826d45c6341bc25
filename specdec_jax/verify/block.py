"""Block verification: accepts a window's drafts jointly."""

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import chain


def verify(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Keeps the longest prefix that passes; returns the next token's weights.

  With w_0 = 1, w_i = min(w_{i-1} p(x_i) / q(x_i), 1) and A_i the mass of
  max(w_i p - q, 0) at the next offset, the prefix of i tokens passes with
  probability A_i / (A_i + 1 - w_i), and w_i at the last one. The next token is
  drawn from max(w p - q, 0). Emitted tokens are distributed exactly as p, and
  no other such rule keeps more drafts on average. With one draft, and at
  temperature 0, it is `reject`. Sun et al. 2024, Algorithm 2
  (https://arxiv.org/abs/2403.10444).
  """
  B, K = draft.tokens_BK.shape
  p_BK = chain.pick(p_BNV, draft.tokens_BK)
  q_BK = chain.q_of_tokens(draft).astype(p_BNV.dtype)
  w_BN = _ratios(p_BK, q_BK)
  # Residual masses after 1 ... K - 1 drafts, compared without dividing.
  mass_BK = jnp.pad(_masses(w_BN, draft, p_BNV), ((0, 0), (0, min(K, 1))))
  below_BK = mass_BK + 1 - w_BN[:, 1:]
  u_BK = noise.accept_BK
  inner_BK = (u_BK * below_BK < mass_BK) | (below_BK == 0)  # 0 / 0 is 1
  last_BK = u_BK * q_BK < w_BN[:, :-1] * p_BK
  at_1K = jnp.arange(1, K + 1)[None]
  count_B1 = draft.count_B[:, None]
  ok_BK = jnp.where(at_1K < count_B1, inner_BK, last_BK) & (at_1K <= count_B1)
  accepted_B = jnp.max(jnp.where(ok_BK, at_1K, 0), -1, initial=0)
  accepted_B = accepted_B.astype(jnp.int32)
  w_B1 = jnp.take_along_axis(w_BN, accepted_B[:, None], 1)
  # Past the last proposal q is zero, so the residual is p.
  w_B1 = jnp.where(accepted_B[:, None] == count_B1, 1, w_B1)
  p_BV = chain.row(p_BNV, accepted_B)
  rest_BV = w_B1 * p_BV - chain.q_row(draft, accepted_B, p_BV)
  return types.Verdict(accepted_B, jnp.maximum(rest_BV, 0))


def _ratios(p_BK, q_BK):
  """Computes w_0 ... w_K, [B, N], without dividing by a q that may be 0."""

  def grow(w_B, pq):
    p_B, q_B = pq
    grown_B = w_B * p_B
    whole_B = (grown_B >= q_B) & (grown_B > 0)
    w_B = jnp.where(whole_B, 1, grown_B / jnp.where(q_B > 0, q_B, 1))
    return w_B, w_B

  one_B = jnp.ones(p_BK.shape[0], p_BK.dtype)
  _, w_KB = jax.lax.scan(grow, one_B, (p_BK.T, q_BK.T))
  return jnp.concatenate([one_B[None], w_KB]).T


def _masses(w_BN, draft: types.Draft, p_BNV):
  """Computes A_i, the mass of max(w_i p - q, 0) after i drafts, 0 < i < K."""
  K = draft.tokens_BK.shape[1]
  wp_BXV = w_BN[:, 1:K, None] * p_BNV[:, 1:K]
  if draft.q_BKV is None:
    index = jnp.arange(p_BNV.shape[-1])[None, None]
    left_BXV = jnp.where(index == draft.tokens_BK[:, 1:, None], 0, wp_BXV)
  else:
    left_BXV = jnp.maximum(wp_BXV - draft.q_BKV[:, 1:], 0)
  return jnp.sum(left_BXV, -1)


RULE = types.Rule('block', verify, certain=True)
