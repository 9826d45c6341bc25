"""What each draft is worth on held-out prompts: tokens a target call, alpha."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import build, decode, requests, types
from specdec_jax.analysis import intervals
from specdec_jax.distill import evaluate
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.verify import reject

RESAMPLES = 2000


class Bench(NamedTuple):
  """A target with held-out prompts at one temperature, and its plain text."""

  target: build.LanguageModel
  model: types.Model
  request: decode.Request
  options: decode.Options
  plain: decode.Output


def bench(
  target: build.LanguageModel,
  prompts: Sequence[Sequence[int]],
  *,
  temperature: float,
  new_tokens: int,
  gamma: int,
  seed: int,
) -> Bench:
  model = build.target_model(target)
  options = build.default_options()
  request = requests.make(
    requests.items(prompts),
    ids=target.ids,
    context=target.config.context,
    max_new_tokens=new_tokens,
    gamma=gamma,
    temperature=temperature,
    seed=seed,
    stop_ids=target.tokenizer.eos_ids,
  )
  plain = evaluate.plain(model, target.params, reject.RULE, options, request)
  return Bench(target, model, request, options, plain)


def measured(
  b: Bench, draft: build.LanguageModel, drafter: types.Drafter, q: types.Model
) -> dict[str, Any]:
  """'emitted', 'calls': of every prompt. 'alpha': on the plain text.

  'differ': texts that are not the plain one, which only greedy ones promise.
  """
  weights = types.Weights(b.target.params, draft.as_draft[1])
  programs = decode.programs(b.model, drafter, reject.RULE, b.options)
  out = jax.device_get(programs.generate(weights, b.request))
  args = b.model, weights, q, reject.RULE, b.options, b.request, b.plain
  differ = np.any(out.tokens_BL != b.plain.tokens_BL, 1)
  return {
    'emitted': (out.info.origin_BL != types.PROMPT).sum(1).tolist(),
    'calls': out.info.calls_B.tolist(),
    'alpha': evaluate.alpha_on(*args),
    'differ': int(differ.sum()),
  }


def drafting(
  target: build.LanguageModel, draft: build.LanguageModel, gamma: int
) -> tuple[types.Drafter, types.Model]:
  """Made once for all drafts of one size, so that nothing compiles twice."""
  q = build.draft_model(target, draft)
  return lm_drafter.make(q, gamma=gamma), q


def half(found: dict[str, Any], first: bool) -> dict[str, np.ndarray]:
  """Every other prompt."""
  return {
    name: np.asarray(found[name], float)[0 if first else 1 :: 2]
    for name in ('emitted', 'calls')
  }


def efficiency(found: dict[str, Any]) -> dict[str, Any]:
  """Tokens a target call, with its interval over prompts."""
  emitted, calls = (np.asarray(found[x], float) for x in ('emitted', 'calls'))
  times = intervals.resamples(len(emitted), RESAMPLES)
  return intervals.interval(intervals.ratio(emitted, calls, times))


def gain(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
  """Block efficiency over the baseline's, less 1; paired by prompt."""
  times = intervals.resamples(len(found['emitted']), RESAMPLES)
  ratios = [
    intervals.ratio(
      np.asarray(x['emitted'], float), np.asarray(x['calls'], float), times
    )
    for x in (found, base)
  ]
  return intervals.interval(ratios[0] / ratios[1] - 1)
