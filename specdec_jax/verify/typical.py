"""Typical acceptance, Medusa's own rule: faster, and lossy by design."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specdec_jax import fields, sampling, types
from specdec_jax.verify import chain


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked):
  eps: float = fields.setting(above=0, below=1, help='near 1 keeps the least')


@functools.cache
def make(eps: float) -> types.Rule:
  """Makes the rule that accepts drafts that the target does not find unlikely.

  Draft x is accepted if p(x) > min(eps, delta exp(-H(p))), where H is p's
  entropy and delta = sqrt(eps). The token after the accepted drafts is the
  target's likeliest, kept untested, so that a window emits one at least. A
  window without a draft is plain decoding's, and so are greedy rows. For
  chains. Cai et al. 2024, section 2.3.1 (https://arxiv.org/abs/2401.10774).
  Raises ValueError for eps outside (0, 1).
  """
  Settings(eps)

  def typical(p):
    log_p = jnp.log(jnp.where(p > 0, p, 1))  # 0 log 0 is 0
    entropy = -jnp.sum(p * log_p, -1, keepdims=True)
    return p > jnp.minimum(eps, eps**0.5 * jnp.exp(-entropy))

  def verify(noise, draft: types.Draft, p_BNV) -> types.Verdict:
    ok_BK = chain.pick(typical(p_BNV), draft.tokens_BK)
    accepted_B = chain.prefix(ok_BK & chain.proposed(draft))
    p_BV = chain.row(p_BNV, accepted_B)
    none_B1 = (draft.count_B == 0)[:, None]
    return types.Verdict(accepted_B, jnp.where(none_B1, p_BV, _best(p_BV)))

  def kept(p_BTV, q_BTV, scores):
    return jnp.where(typical(p_BTV), q_BTV, 0)

  def emitted(p_BTV, q_BTV, scores):
    kept_BTV = kept(p_BTV, q_BTV, scores)
    left_BT1 = 1 - jnp.sum(kept_BTV, -1, keepdims=True)
    drafts_BT1 = jnp.sum(q_BTV, -1, keepdims=True) > 0
    return jnp.where(drafts_BT1, kept_BTV + left_BT1 * _best(p_BTV), p_BTV)

  rule = types.Rule(f'typical:{eps:g}', verify, lossless=False, certain=True)
  return rule._replace(kept=kept, emitted=emitted)


def _best(p):
  first = sampling.first_of(p, jnp.max(p, -1, keepdims=True))
  return jax.nn.one_hot(first[..., 0], p.shape[-1], dtype=p.dtype)
