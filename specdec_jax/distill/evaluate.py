"""Evaluates a draft with the production decode loop, on held-out prompts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import build, decode, fields, requests, types
from specdec_jax.bench import metrics, predict
from specdec_jax.verify import reject


@dataclasses.dataclass(frozen=True)
class Judge(fields.Checked):
  gamma: int = fields.setting(low=1, help='tokens drafted in a window')
  new_tokens: int = fields.setting(low=1, help='after each held-out prompt')
  temperature: float = fields.setting(low=0, help='of the decoding that judges')


def judge(
  s: Judge,
  target: build.LanguageModel,
  drafter: types.Drafter,
  draft: types.Model,
  held_out: Sequence[requests.Item],
  seed: int,
) -> Callable[[types.Params], dict[str, Any]]:
  """Makes a function from weights.draft to metrics on some prompts.

  Args:
    s: settings; their gamma is that of the drafter.
    target: the target.
    drafter: evaluated.
    draft: the drafter's q as a model, which reads weights.draft.
    held_out: the prompts.
    seed: of all randomness.

  Returns:
    figures(params). 'alpha': mean of sum min(p, q), teacher-forced on the text
    of plain decoding. 'alpha_at': for each draft position, the share of drafts
    accepted among those that were tried. 'block_efficiency': tokens emitted per
    target call. 'gap': the block efficiency that alpha alone would give, were
    acceptances independent, minus that of decoding.
  """
  request = requests.make(
    held_out,
    ids=target.ids,
    context=target.context,
    max_new_tokens=s.new_tokens,
    gamma=s.gamma,
    temperature=s.temperature,
    seed=seed,
    stop_ids=target.tokenizer.eos_ids,
  )
  request: decode.Request = requests.place(request, target.layout)
  options = build.default_options()
  programs = decode.programs(target.model, drafter, reject.RULE, options)
  # Decoded on first use: a run that is resumed at its end need not wait.
  text: list[decode.Output] = []

  def figures(params: types.Params) -> dict[str, Any]:
    if not text:
      text.append(plain(target, request))
    weights = types.Weights(target.params, params)
    out = jax.device_get(programs.generate(weights, request))
    found = metrics.summary(metrics.rows(out.info))
    alpha = alpha_on(target.model, weights, draft, request, text[0])
    expected = sum(alpha**k for k in range(s.gamma + 1))
    return {
      'alpha': alpha,
      'alpha_at': found.conditional_acceptance_per_position,
      'block_efficiency': found.block_efficiency,
      'gap': expected - (found.block_efficiency or 0),
    }

  return figures


def plain(
  target: build.LanguageModel, request: decode.Request
) -> decode.Output:
  """Text of plain decoding, on the host."""
  programs = decode.programs(
    target.model,
    decode.PLAIN,
    reject.RULE,
    build.default_options(),
  )
  return jax.device_get(
    programs.generate(types.Weights(target.params), request)
  )


def alpha_on(
  model: types.Model,
  weights: types.Weights,
  draft: types.Model,
  request: decode.Request,
  text: decode.Output,
) -> float:
  """alpha of a draft, teacher-forced on the target's text.

  Args:
    model: the target.
    weights: of the target and the draft.
    draft: the drafter's q as a model.
    request: the prompts.
    text: of plain decoding.
  """
  tokens_BL = text.tokens_BL
  overlap = jax.device_get(
    predict.overlap(
      weights,
      request._replace(tokens_BL=tokens_BL, limit_B=text.lengths_B),
      np.zeros_like(tokens_BL),
      np.ones(tokens_BL.shape, bool),
      target=model,
      draft=draft,
      rule=reject.RULE,
      chunk=build.default_options().chunk,
    )
  )
  index_1L = np.arange(tokens_BL.shape[1])[None]
  inside_BL = (index_1L >= request.lengths_B[:, None]) & (
    index_1L < text.lengths_B[:, None]
  )
  return float(overlap.alpha_BL[inside_BL].mean())
