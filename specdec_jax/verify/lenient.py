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
  """The rule that accepts drafts up to 1 / lenience times as often.

  Sampling, with lenience l: a draft is accepted with probability
  min(1, p / (l q)); after a rejection the token is drawn from max(p - q, 0), so
  no token is emitted with probability above p / l. (The paper does not define
  the residual; max(p - l q, 0) has the same bound and is farther from p.)
  Greedy: a draft is accepted if its probability at temperature 1 is at least l
  times the largest; the paper has "at most", which contradicts its numbers.
  Lenience 1 is `reject`. Leviathan et al. 2023, appendix A.5
  (https://arxiv.org/abs/2211.17192).

  Raises:
    ValueError: lenience outside (0, 1].
  """
  Settings(lenience)
  if lenience == 1:
    return reject.RULE._replace(name='lenient:1')
  return types.Rule(
    f'lenient:{lenience:g}',
    functools.partial(verify, lenience),
    lossless=False,
    scored=True,
    kept=functools.partial(kept, lenience),
    emitted=functools.partial(emitted, lenience),
  )


def verify(
  lenience: float,
  noise: types.Noise,
  draft: types.Draft,
  p_BNV,
  scores: types.Scores,
) -> types.Verdict:
  """Keeps a prefix of the draft; the next token has weights max(p - q, 0).

  Args:
    lenience: in (0, 1); see make.
    noise, draft, p_BNV, scores: as for types.Rule.verify.
  """
  greedy_B1 = sampling.is_greedy(scores.sampling)[:, None]
  near_BNV = _near(scores.logits_BNV, lenience)
  q_BK = chain.q_of_tokens(draft)
  ok_BK = jnp.where(
    greedy_B1,
    chain.pick(near_BNV, draft.tokens_BK),
    noise.accept_BK * (lenience * q_BK) < chain.pick(p_BNV, draft.tokens_BK),
  )
  accepted_B = chain.prefix(ok_BK & chain.proposed(draft))
  p_BV = chain.row(p_BNV, accepted_B)
  return types.Verdict(
    accepted_B, jnp.maximum(p_BV - chain.q_row(draft, accepted_B, p_BV), 0)
  )


def kept(lenience: float, p_BTV, q_BTV, scores: types.Scores):
  """Rule.kept: min(p / l, q); if greedy, q of the tokens that are accepted."""
  greedy_B11 = sampling.is_greedy(scores.sampling)[:, None, None]
  near_BTV = _near(scores.logits_BNV, lenience)
  return jnp.where(
    greedy_B11, near_BTV * q_BTV, jnp.minimum(p_BTV / lenience, q_BTV)
  )


def emitted(lenience: float, p_BTV, q_BTV, scores: types.Scores):
  """Rule.emitted: the accepted probability plus that of the residual."""
  kept_BTV = kept(lenience, p_BTV, q_BTV, scores)
  rest_BTV = jnp.maximum(p_BTV - q_BTV, 0)
  mass_BT1 = jnp.sum(rest_BTV, -1, keepdims=True)
  # Where the residual is empty p equals q, and decode draws from p.
  left_BT1 = mass_BT1 > 0
  rest_BTV = jnp.where(
    left_BT1, rest_BTV / jnp.where(left_BT1, mass_BT1, 1), p_BTV
  )
  return kept_BTV + (1 - jnp.sum(kept_BTV, -1, keepdims=True)) * rest_BTV


def _near(logits, lenience: float):
  """Whether p at temperature 1 is at least `lenience` times the largest."""
  best = jnp.max(logits, -1, keepdims=True)
  return logits >= best + math.log(lenience)
