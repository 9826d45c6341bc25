"""Lenient speculative sampling: faster, and lossy by design."""

import dataclasses
import functools
import math

import jax.numpy as jnp

from specdec_jax import fields, sampling, types
from specdec_jax.verify import chain, reject


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked):
  lenience: float = fields.setting(above=0, high=1, help='1 is lossless')


@functools.cache
def make(lenience: float) -> types.Rule:
  """Makes the rule that accepts drafts up to 1 / lenience times as often.

  Sampling, with lenience l: a draft is accepted with probability
  min(1, p / (l q)); after a rejection the token is drawn from max(p - q, 0), so
  no token is emitted with probability above p / l. (The paper does not define
  the residual; max(p - l q, 0) has the same bound and is farther from p.)
  Greedy: a draft is accepted if its probability at temperature 1 is at least l
  times the largest; the paper has "at most", which contradicts its numbers.
  Lenience 1 is `reject`. Leviathan et al. 2023, appendix A.5
  (https://arxiv.org/abs/2211.17192). Raises ValueError for lenience outside
  (0, 1].
  """
  Settings(lenience)
  if lenience == 1:
    return reject.RULE._replace(name='lenient:1')

  def near(logits):
    """Tells whether p at temperature 1 is at least lenience times the best."""
    best = jnp.max(logits, -1, keepdims=True)
    return logits >= best + math.log(lenience)

  def verify(noise, draft: types.Draft, p_BNV, scores) -> types.Verdict:
    greedy_B1 = sampling.is_greedy(scores.sampling)[:, None]
    near_BK = chain.pick(near(scores.logits_BNV), draft.tokens_BK)
    q_BK, p_BK = chain.q_of_tokens(draft), chain.pick(p_BNV, draft.tokens_BK)
    u_BK = noise.accept_BK
    ok_BK = jnp.where(greedy_B1, near_BK, u_BK * (lenience * q_BK) < p_BK)
    accepted_B = chain.prefix(ok_BK & chain.proposed(draft))
    p_BV = chain.row(p_BNV, accepted_B)
    left_BV = p_BV - chain.q_row(draft, accepted_B, p_BV)
    return types.Verdict(accepted_B, jnp.maximum(left_BV, 0))

  def kept(p_BTV, q_BTV, scores):
    greedy_B11 = sampling.is_greedy(scores.sampling)[:, None, None]
    near_BTV = near(scores.logits_BNV) * q_BTV
    return jnp.where(greedy_B11, near_BTV, jnp.minimum(p_BTV / lenience, q_BTV))

  def emitted(p_BTV, q_BTV, scores):
    kept_BTV = kept(p_BTV, q_BTV, scores)
    rest_BTV = jnp.maximum(p_BTV - q_BTV, 0)
    mass_BT1 = jnp.sum(rest_BTV, -1, keepdims=True)
    # Where the residual is empty p equals q, and decode draws from p.
    some_BT1 = mass_BT1 > 0
    rest_BTV = rest_BTV / jnp.where(some_BT1, mass_BT1, 1)
    rest_BTV = jnp.where(some_BT1, rest_BTV, p_BTV)
    return kept_BTV + (1 - jnp.sum(kept_BTV, -1, keepdims=True)) * rest_BTV

  rule = types.Rule(f'lenient:{lenience:g}', verify, lossless=False)
  return rule._replace(scored=True, kept=kept, emitted=emitted)
