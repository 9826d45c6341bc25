"""alpha, teacher-forced: how often draft and target agree on a given text.

Untimed, and apart from decoding: both models read the text that plain decoding
emitted, so alpha does not depend on gamma, the rule or the draws of a run.
"""

import functools

import jax
import jax.numpy as jnp

from specdec_jax import decode, forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.verify import chain, lenient

Array = jax.Array


def judged(
  rule: types.Rule, p_BTV: Array, q_BTV: Array, scores: types.Scores
) -> tuple[Array, Array]:
  """What a rule keeps of one draft, and how far from p it emits: [B, T] each.

  The second is the total variation, 0 for a lossless rule.
  """
  if rule.kept is None:
    kept_BTV = jnp.minimum(p_BTV, q_BTV)
  else:
    kept_BTV = rule.kept(p_BTV, q_BTV, scores)
  kept_BT = jnp.sum(kept_BTV, -1)
  if rule.emitted is None:
    return kept_BT, jnp.zeros(kept_BT.shape)
  off_BTV = jnp.abs(rule.emitted(p_BTV, q_BTV, scores) - p_BTV)
  return kept_BT, jnp.sum(off_BTV, -1) / 2


@functools.partial(
  jax.jit, static_argnames=('target', 'draft', 'chunk', 'leniences')
)
def scores(
  weights: types.Weights,
  request: decode.Request,
  *,
  target: types.Model,
  draft: types.Model,
  chunk: int,
  leniences: tuple[float, ...],
) -> Array:
  """p(x), q(x) of the token x at each index, and what each lenience does there.

  request: the prompts with the text after them; limit_B is where it ends.
  Returns [B, L, 2 + 2 X]: last, for every lenience, the mass of the drafts that
  it keeps, then for every one the total variation of what it emits. p or q is
  NaN where its model's logits are not finite.
  """
  rules = [lenient.make(l) for l in leniences]

  def columns(index_T, *logits):
    p_BTV, q_BTV = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    tokens_BT = forward.at(request.tokens_BL, index_T)
    scored = types.Scores(logits[0], request.sampling)
    kept, distance = zip(
      *(judged(rule, p_BTV, q_BTV, scored) for rule in rules), strict=True
    )
    # A greedy law is a one-hot, whatever the logits are.
    said = [
      jnp.where(
        jnp.isfinite(jnp.max(x, -1)), chain.pick(law, tokens_BT), jnp.nan
      )
      for x, law in zip(logits, (p_BTV, q_BTV), strict=True)
    ]
    return [*said, *kept, *distance]

  readers = (target, weights.target), (draft, weights.draft)
  found = forward.score(
    readers, request.tokens_BL, request.limit_B, columns, chunk=chunk
  )
  return jnp.stack(found, -1)
