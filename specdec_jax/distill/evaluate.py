"""What a draft is worth: the real decode loop on held-out prompts."""

from typing import Any

import jax
import numpy as np

from specdec_jax import decode, types
from specdec_jax.bench import acceptance, metrics


def judge(
  target: types.Model,
  weights: types.Weights,
  drafter: types.Drafter,
  draft: types.Model,
  rule: types.Rule,
  options: decode.Options,
  request: decode.Request,
  text: decode.Output,
) -> dict[str, Any]:
  """Figures of one drafter on one batch of requests.

  Args:
    target, weights, drafter, rule, options: as for decode.programs.
    draft: the drafter's q as a model, which reads weights.draft.
    request: the prompts.
    text: what plain decoding made of them (see plain).

  Returns 'alpha': teacher-forced on that text, the mean of sum min(p, q);
  'alpha_at': of the drafts of each offset that were tried, how many were kept
  in decoding; 'block_efficiency': tokens a target call in decoding; 'gap': the
  block_efficiency that alpha alone would give, were its events independent,
  less the one that decoding reached.
  """
  out = jax.device_get(
    decode.programs(target, drafter, rule, options).generate(weights, request)
  )
  found = metrics.summary(metrics.rows(out.info))
  alpha = alpha_on(target, weights, draft, rule, options, request, text)
  expected = sum(alpha**k for k in range(drafter.gamma + 1))
  return {
    'alpha': alpha,
    'alpha_at': found['conditional_acceptance_per_position'],
    'block_efficiency': found['block_efficiency'],
    'gap': expected - found['block_efficiency'],
  }


def plain(
  target: types.Model,
  params: types.Params,
  rule: types.Rule,
  options: decode.Options,
  request: decode.Request,
) -> decode.Output:
  """What the target alone makes of the prompts, on the host."""
  programs = decode.programs(target, decode.PLAIN, rule, options)
  return jax.device_get(programs.generate(types.Weights(params), request))


def alpha_on(target, weights, draft, rule, options, request, text) -> float:
  """alpha of a draft on a text that the target emitted."""
  tokens_BL = text.tokens_BL
  read = request._replace(tokens_BL=tokens_BL, limit_B=text.lengths_B)
  overlap = jax.device_get(
    acceptance.overlap(
      weights,
      read,
      np.zeros_like(tokens_BL),
      np.ones(tokens_BL.shape, bool),
      target=target,
      draft=draft,
      rule=rule,
      chunk=options.chunk,
    )
  )
  index_1L = np.arange(tokens_BL.shape[1])[None]
  inside_BL = (index_1L >= request.lengths_B[:, None]) & (
    index_1L < text.lengths_B[:, None]
  )
  return float(overlap.alpha_BL[inside_BL].mean())
