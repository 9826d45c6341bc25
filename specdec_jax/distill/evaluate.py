"""Evaluates a draft with the production decode loop, on held-out prompts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from specdec_jax import build, decode, hosts, metrics, requests, sampling, types
from specdec_jax.bench import predict
from specdec_jax.distill import sections


def make(
  judge: sections.Judge,
  target: build.LanguageModel,
  drafter: Callable[[int], types.Drafter],
  q: types.Model | None,  # the drafter's, which reads weights.draft
  held_out: Sequence[requests.Item],
  seed: int,
) -> Callable[[types.Params], dict[str, Any]]:
  """Makes a function from weights.draft to figures on the held-out prompts.

  'alpha': mean sum min(p, q), teacher-forced on plain decoding's text.
  'alpha_at': by draft position, the share accepted among drafts tried.
  'block_efficiency': tokens emitted per target call. 'gap': the block
  efficiency that alpha alone would give, were acceptances independent, minus
  the real one.
  """
  sampled = sampling.Sampling(judge.temperature, seed=seed)
  asked = [
    x._replace(
      new=requests.check(x, target, judge.new_tokens),
      sampling=sampled,
      stop_ids=target.tokenizer.eos_ids,
    )
    for x in held_out
  ]
  request = requests.make(asked, gamma=judge.gamma)
  request: decode.Request = requests.place(request, target.layout)
  engine = build.engine(target, drafter(judge.gamma))

  @functools.cache  # on first use: a run that is resumed at its end needs none
  def plain() -> decode.Output:
    made = build.engine(target)
    return hosts.fetch(made.programs.generate(made.weights, request))

  def figures(params: types.Params) -> dict[str, Any]:
    weights, text = types.Weights(target.params, params), plain()
    out = hosts.fetch(engine.programs.generate(weights, request))
    found = metrics.summary(out.info)
    alpha_BL, _ = predict.overlap(
      weights,
      request._replace(tokens_BL=text.tokens_BL, limit_B=text.lengths_B),
      loop=engine.loop,
      q=q,
    )
    emitted_BL = text.info.window_BL >= 0
    alpha = float(hosts.fetch(alpha_BL)[emitted_BL].mean())
    expected = sum(alpha**k for k in range(judge.gamma + 1))
    return {
      'alpha': alpha,
      'alpha_at': found.conditional_acceptance_per_position,
      'block_efficiency': found.block_efficiency,
      'gap': expected - (found.block_efficiency or 0),
    }

  return figures
