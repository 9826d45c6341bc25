"""Measures a model's distance from another loading, stored otherwise.

Speculative decoding is exact for the target as it is stored, in its own
arithmetic; this measures what fewer bits changed.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, forward, hosts, types
from specdec_jax.io import load, tokenizer

Array = jax.Array


class Distance(NamedTuple):
  """How far the target is from a reference, at temperature 1: means a token."""

  reference: str  # its label
  dtype: str  # what it computes in
  tokens: int  # of prompts, over which the means are
  total_variation: float  # half the sum of |p - r|, of the probabilities
  kl: float  # sum of r log(r / p), nats
  agreement: float  # share of tokens where both find the same id likeliest
  perplexity: float  # of the prompts, under the target
  reference_perplexity: float


def between(
  target: load.LanguageModel,
  reference: load.LanguageModel,
  requests: Iterable[decode.Request],
  prompts: int,
  *,
  chunk: int,
) -> Distance:
  """Measures the target's Distance from `reference`, on the same devices, over
  the tokens of `prompts` prompts, placed in requests as for decoding; rows
  after them are copies, which fill a batch.

  Raises:
    ValueError: another tokenizer, or an encoder, which reads the prompts, or no
    token that another comes before.
  """
  if target.start is not None or reference.start is not None:
    raise ValueError(
      'reference: distances are over the tokens of prompts, and a model with '
      'an encoder predicts none of them; leave it out'
    )
  tokenizer.check_same(target.tokenizer, reference.tokenizer)
  models = target.model, reference.draft_model(target)
  params = target.params, reference.as_draft[1]
  found: list[np.ndarray] = []
  for request in requests:
    columns = _columns(params, request, models=models, chunk=chunk)
    columns, ends_B = hosts.fetch((columns, request.lengths_B))
    at_BL = np.indices(request.tokens_BL.shape)[1]
    # Nothing predicts the first token of a text.
    where_BL = (at_BL > 0) & (at_BL < ends_B[:, None])
    where_BL[prompts:] = False
    prompts = max(prompts - len(ends_B), 0)
    found.append(np.stack([x[where_BL] for x in columns]))
  each = np.concatenate(found, -1).astype(np.float64)
  if not each.size:
    raise ValueError(
      'reference: no prompt has two tokens, and nothing predicts the first: '
      'give longer prompts'
    )
  *means, loss, other = each.mean(-1).tolist()
  about = reference.label, reference.dtype, each.shape[-1]
  return Distance(*about, *means, *np.exp([loss, other]).tolist())


def divergence(p_BTV: Array, r_BTV: Array) -> Array:
  """Computes kl of log-probabilities: sum r log(r / p) + p - r, none below 0.
  The r log(r / p) cancel and leave 1e-7 in float32; near ones use the series.
  """
  gap_BTV = jnp.where(r_BTV > -jnp.inf, p_BTV - r_BTV, 1)
  r = jnp.exp(r_BTV)
  near_BTV = r * gap_BTV**2 * (1 / 2 + gap_BTV / 6)
  far_BTV = jnp.exp(p_BTV) - r - r * gap_BTV
  return jnp.where(abs(gap_BTV) < 0.01, near_BTV, far_BTV).sum(-1)


@functools.partial(jax.jit, static_argnames=('models', 'chunk'))
def _columns(
  params: tuple[types.Params, types.Params],
  request: decode.Request,
  *,
  models: tuple[types.Model, types.Model],
  chunk: int,
) -> Sequence[Array]:
  """Computes each token's total variation, kl, agreement, losses, [B, L]."""

  def columns(index_T, *logits):
    p_BTV, r_BTV = (
      jax.nn.log_softmax(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
      for x in logits
    )
    token_BT1 = forward.at(request.tokens_BL, index_T)[..., None]
    loss = lambda x: -jnp.take_along_axis(x, token_BT1, -1)[..., 0]
    return (
      jnp.abs(jnp.exp(p_BTV) - jnp.exp(r_BTV)).sum(-1) / 2,
      divergence(p_BTV, r_BTV),
      p_BTV.argmax(-1) == r_BTV.argmax(-1),
      loss(p_BTV),
      loss(r_BTV),
    )

  return forward.score(
    list(zip(models, params, strict=True)),
    request.tokens_BL,
    jnp.ones_like(request.lengths_B),
    request.lengths_B,
    columns,
    chunk=chunk,
    source=request.source,
  )
