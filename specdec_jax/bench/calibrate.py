"""What the parts cost alone: v(n), the propose time of each drafter, and c.

Nothing here looks at how well a drafter guesses: verification is timed with a
script that is always wrong, drafting without a target.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, types
from specdec_jax.bench import acceptance
from specdec_jax.drafters import scripted


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Times of the parts, in seconds; ratios are to a plain step of the target.

  step: one plain step. verify: v(n), by width. idle: a window in which nothing
  is proposed, by the width of its program's other windows. propose: seconds a
  window, by arm. c: time of a drafted token over a plain step, by arm.
  """

  step: float
  step_spread: float
  verify: dict[int, float]
  idle: dict[int, float]
  propose: dict[str, float]
  c: dict[str, float]


def compiled(jitted, *args, **statics):
  """(the executable, seconds to trace, lower and compile it)."""
  start = time.perf_counter()
  done = jitted.lower(*args, **statics).compile()
  return done, time.perf_counter() - start


def seconds(run: Callable[[], Any]) -> float:
  start = time.perf_counter()
  jax.block_until_ready(run())
  return time.perf_counter() - start


def measure(
  arms, request: decode.Request, *, plain, repeats: int, track
) -> Calibration:
  """Times every width and every drafter of the arms, in turns.

  Args:
    arms: timing.Arm, plain decoding first.
    request: full rows; limit - length is how many windows are timed.
    plain: the executable of plain decoding at the request's shapes.
    repeats: of each measurement; medians are taken.
    track: progress bar, track(iterable, description).
  """
  engine = arms[0].engine
  # A stop would end the measurement early.
  request = request._replace(stop_BX=jnp.full_like(request.stop_BX, -1))
  text = plain(engine.weights, request).tokens_BL
  # Nothing but luck accepts the text moved by one id; where a sampled run does,
  # the window is still one window.
  wrong_BL = (text + 1) % engine.target.ids
  runs: dict[Any, Callable[[], tuple[float, float, int]]] = {}
  for width in sorted({arm.gamma + 1 for arm in arms}):
    if width == 1:
      runs['verify', 1] = _window_seconds(plain, engine.weights, request)
      continue
    drafter = _scripted(width - 1)
    programs = decode.programs(
      arms[0].model, drafter, engine.rule, engine.options
    )
    script = lambda count: types.Weights(
      engine.target.params, (wrong_BL, jnp.full_like(wrong_BL, count))
    )
    program, _ = compiled(programs.generate, script(0), request)
    for part, count in (('verify', width - 1), ('idle', 0)):
      runs[part, width] = _window_seconds(program, script(count), request)
  for arm in arms[1:]:
    runs['propose', arm.name] = _propose_seconds(
      arm, request._replace(tokens_BL=text)
    )
  for run in runs.values():
    run()
  found: dict[Any, list[tuple[float, float, int]]] = {key: [] for key in runs}
  for _ in track(range(repeats), 'calibrating'):
    for key, run in runs.items():
      found[key].append(run())
  times = {key: _each(samples) for key, samples in found.items()}
  ratio = lambda key: statistics.median(
    t / s for t, s in zip(times[key], times['verify', 1], strict=True)
  )
  of = lambda part: {key[1]: ratio(key) for key in runs if key[0] == part}
  step = statistics.median(times['verify', 1])
  return Calibration(
    step=step,
    step_spread=float(np.ptp(times['verify', 1])),
    verify=of('verify'),
    idle=of('idle'),
    propose={name: x * step for name, x in of('propose').items()},
    c={a.name: of('propose')[a.name] / a.gamma for a in arms[1:]},
  )


def _each(samples: list[tuple[float, float, int]]) -> list[float]:
  """Seconds a window from (whole call, the call without windows, windows).

  Less the fastest call without windows: a slow one must not hide their cost.
  """
  before = min(sample[1] for sample in samples)
  return [max(whole - before, 1e-9) / n for whole, _, n in samples]


def _window_seconds(program, weights, request):
  """() -> a sample for _each."""
  none = request._replace(limit_B=request.lengths_B)

  def run():
    before = seconds(lambda: program(weights, none))
    start = time.perf_counter()
    out = jax.block_until_ready(program(weights, request))
    whole = time.perf_counter() - start
    return whole, before, int(out.info.calls)

  return run


def _propose_seconds(arm, request):
  """() -> a sample of drafting alone, along the text."""
  span = int(jnp.max(request.limit_B - request.lengths_B))
  weights = arm.engine.weights
  program, _ = compiled(
    acceptance.walk,
    weights,
    request,
    jnp.int32(0),
    target=arm.model,
    drafter=arm.engine.drafter,
    coupled=arm.engine.rule.coupled,
  )

  walk = lambda steps: seconds(
    lambda: program(weights, request, jnp.int32(steps))
  )
  # A lookup takes microseconds: as many as last a fifth of a second.
  walk(span)
  steps = span * int(min(max(0.2 / walk(span), 1), 1000))

  return lambda: (walk(steps), walk(0), steps)


@functools.cache
def _scripted(gamma: int) -> types.Drafter:
  # One object per gamma, or decode.programs would compile again.
  return scripted.make(gamma=gamma)
