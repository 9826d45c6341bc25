"""Costs of the windows of one engine, for drafters.adaptive."""

import statistics
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import requests
from specdec_jax.costs import parts

# Tokens before the windows that are timed, windows of a sample, and samples.
START, WINDOWS, REPEATS = 128, 8, 3


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
  gamma, model = engine.drafter.gamma, engine.target.model
  request = requests.place(_request(engine), engine.target.layout)
  shared = dict(target=model, rule=engine.rule, options=engine.options)
  weights = engine.weights._replace(draft=())
  widths = sorted({*(w for w in engine.options.widths if w < gamma), gamma})

  def verify(count: int, steps: int):
    numbers = jnp.int32(count), jnp.int32(steps)
    return parts.verify_along(weights, request, *numbers, gamma=gamma, **shared)

  walks: dict[Any, Any] = {
    ('verify', w): (lambda n, w=w: verify(w, n), WINDOWS) for w in widths
  }
  for part in engine.parts:
    own = engine.weights._replace(draft=part.params)

    def draft(count: int, steps: int, part=part, own=own):
      asked = request._replace(gamma_B=jnp.full_like(request.gamma_B, count))
      return parts.propose_along(
        own,
        asked,
        jnp.int32(steps),
        target=model,
        drafter=part.drafter,
        coupled=engine.rule.coupled,
      )

    for count in {0, 1, gamma}:
      walks[part.drafter.name, count] = lambda n, c=count, f=draft: f(c, n), 32
  seconds = _seconds(walks)
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


def _request(engine):
  target = engine.target
  start = min(START, target.context // 2)
  text = (np.arange(start) % target.ids).tolist()
  source = text[:1] if target.model.encode else ()
  return requests.make(
    [requests.Item(text, 0, source=source)],
    ids=target.ids,
    context=target.context,
    max_new_tokens=min(WINDOWS, target.context - start),
    gamma=engine.drafter.gamma,
  )


def _seconds(walks: dict[Any, Any]) -> dict[Any, float]:
  """Seconds a step of every walk; the walks take turns."""
  samples: dict[Any, list[float]] = {key: [] for key in walks}
  for walk, _ in walks.values():
    parts.timed(walk, 1)  # compiles
  for _ in range(REPEATS):
    for key, (walk, steps) in walks.items():
      none, some = (parts.timed(walk, n)[0] for n in (0, steps))
      samples[key].append(max(some - none, 0.0) / steps)
  return {key: statistics.median(x) for key, x in samples.items()}
