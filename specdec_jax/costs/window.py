"""Costs of the windows of one engine, for drafters.adaptive."""

import functools
import statistics
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import requests
from specdec_jax.costs import parts

# Tokens before the windows that are timed; windows of a sample, and those of
# drafting alone; samples.
START, WINDOWS, DRAFTS, REPEATS = 128, 8, 32, 3


def measure(engine) -> dict[str, list[float]]:
  """Costs of windows with 0 to gamma drafts, over those of one without.

  At batch 1, greedy, with some 128 tokens in the cache; takes a few seconds.
  Passes of the target are timed with scripted drafts, drafting without the
  target.

  Args:
    engine: a build.Engine with an adaptive drafter.

  Returns:
    gamma + 1 numbers under 'verify' and under the name of each drafter, as
    drafters.adaptive.params takes them.
  """
  gamma = engine.drafter.gamma
  request = requests.place(_request(engine), engine.target.layout)
  widths = engine.options.bodies(gamma)
  walks = _verifying(engine, request, widths)
  for part in engine.parts:
    walks |= _drafting(engine, part, request)
  samples = parts.seconds(walks, range(REPEATS))
  seconds = {key: statistics.median(x) for key, x in samples.items()}
  verify_N = [
    seconds['verify', next(w for w in widths if w >= j)]
    for j in range(gamma + 1)
  ]
  costs: dict[str, Any] = dict(verify=verify_N)
  for part in engine.parts:
    name = part.drafter.name
    found = sorted((n, x) for (kind, n), x in seconds.items() if kind == name)
    counts, times = zip(*found, strict=True)
    costs[name] = np.interp(range(gamma + 1), counts, times)
  unit = verify_N[0]
  # More tokens do not take less time: where they seem to, it was noise.
  costs = {name: np.maximum.accumulate(x) for name, x in costs.items()}
  return {k: [round(float(y) / unit, 4) for y in x] for k, x in costs.items()}


def _verifying(engine, request, widths) -> dict[Any, parts.Part]:
  """Passes of the target by the drafts that they verify."""
  weights = engine.weights._replace(draft=())

  def walk(count: int, steps: int):
    return parts.verify_along(
      weights,
      request,
      jnp.int32(count),
      jnp.int32(steps),
      target=engine.target.model,
      rule=engine.rule,
      options=engine.options,
      gamma=engine.drafter.gamma,
    )

  one = lambda width: parts.Part(functools.partial(walk, width), WINDOWS)
  return {('verify', width): one(width) for width in widths}


def _drafting(engine, part, request) -> dict[Any, parts.Part]:
  """Windows of one drafter without a target, by how many tokens it drafts."""
  weights = engine.weights._replace(draft=part.params)

  def walk(count: int, steps: int):
    asked = request._replace(gamma_B=jnp.full_like(request.gamma_B, count))
    return parts.propose_along(
      weights,
      asked,
      jnp.int32(steps),
      target=engine.target.model,
      drafter=part.drafter,
      coupled=engine.rule.coupled,
    )

  one = lambda count: parts.Part(functools.partial(walk, count), DRAFTS)
  return {(part.drafter.name, x): one(x) for x in (0, 1, engine.drafter.gamma)}


def _request(engine):
  target = engine.target
  start = min(START, target.context // 2)
  text = (np.arange(start) % target.ids).tolist()
  source = text if target.model.encode else ()
  return requests.make(
    [requests.Item(text, 0, source=source)],
    ids=target.ids,
    context=target.context,
    max_new_tokens=min(WINDOWS, target.context - start),
    gamma=engine.drafter.gamma,
  )
