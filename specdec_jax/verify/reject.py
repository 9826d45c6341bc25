"""Speculative sampling by rejection."""

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import chain, tree


def verify(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Keeps a prefix of the draft; returns one more token's weights.

  Draft token k is accepted with probability min(1, p_k / q_k). After the first
  rejection the next token is drawn from max(p - q, 0), normalised; if all
  drafts are accepted, from p. Emitted tokens are distributed exactly as p.
  Leviathan et al. 2023, Algorithm 1 (https://arxiv.org/abs/2211.17192).
  """
  if tree.is_one(draft):
    return _on_tree(noise, draft, p_BNV)
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


def _on_tree(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Tests the last accepted node's children one after another.

  r starts as p after that node, and has the sum m. A child x drawn from q is
  accepted with probability min(1, r(x) / (m q(x))), and its children come next;
  else r becomes max(r - m q, 0). When no child is accepted, r weighs the next
  token. On a chain this is `verify`. Li et al. 2024, appendix B
  (https://arxiv.org/abs/2401.15077); Chen et al. 2024, Algorithm 2
  (https://arxiv.org/abs/2402.12374).
  """
  B, K = draft.tokens_BK.shape
  proposed_BK = tree.proposed(draft)
  of_node = lambda x_BK, i: jax.lax.dynamic_index_in_dim(x_BK, i, 1, False)
  id_1V = jnp.arange(p_BNV.shape[-1])[None]

  def test(i, carry):
    last_B, left_BV, mass_B = carry
    token_B1 = of_node(draft.tokens_BK, i)[:, None]
    if draft.q_BKV is None:
      q_BV = (id_1V == token_B1).astype(p_BNV.dtype)
    else:
      q_BV = of_node(draft.q_BKV, i).astype(p_BNV.dtype)
    tried_B = of_node(proposed_BK, i) & (of_node(draft.parents_BK, i) == last_B)
    mass_q_BV = mass_B[:, None] * q_BV
    need_B = of_node(noise.accept_BK, i) * chain.at(mass_q_BV, token_B1)
    ok_B = tried_B & (need_B < chain.at(left_BV, token_B1))
    rest_BV = jnp.maximum(left_BV - mass_q_BV, 0)
    missed_B1, ok_B1 = (tried_B & ~ok_B)[:, None], ok_B[:, None]
    left_BV = jnp.where(missed_B1, rest_BV, left_BV)
    left_BV = jnp.where(ok_B1, of_node(p_BNV, i + 1), left_BV)
    mass_B = jnp.where(missed_B1[:, 0], jnp.sum(rest_BV, -1), mass_B)
    return jnp.where(ok_B, i, last_B), left_BV, jnp.where(ok_B, 1, mass_B)

  none_B, one_B = jnp.full(B, -1, jnp.int32), jnp.ones(B, p_BNV.dtype)
  last_B, left_BV, _ = jax.lax.fori_loop(
    0, K, test, (none_B, p_BNV[:, 0], one_B)
  )
  return tree.verdict(draft, last_B, left_BV)


RULE = types.Rule('reject', verify, certain=True, trees=True)
