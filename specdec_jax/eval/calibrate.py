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
from specdec_jax.drafters import scripted
from specdec_jax.eval import acceptance


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Times of the parts, in seconds; ratios are to a plain step of the target.

  step: one plain step. verify: v(n), by width. propose: seconds a window, by
  arm. c: time of a drafted token over a plain step, by arm.
  """

  step: float
  step_spread: float
  verify: dict[int, float]
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
    arms: bench.Arm, plain decoding first.
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
  script = (wrong_BL, jnp.full_like(wrong_BL, max(a.gamma for a in arms)))
  runs: dict[Any, Callable[[decode.Request], float]] = {}
  for width in sorted({arm.gamma + 1 for arm in arms}):
    weights = types.Weights(engine.target.params, script)
    if width == 1:
      weights, program = engine.weights, plain
    else:
      drafter = _scripted(width - 1)
      programs = decode.programs(
        arms[0].model, drafter, engine.rule, engine.options
      )
      program, _ = compiled(programs.generate, weights, request)
    runs[width] = _window_seconds(program, weights, request)
  for arm in arms[1:]:
    runs[arm.name] = _propose_seconds(arm, request._replace(tokens_BL=text))
  for run in runs.values():
    run()
  times = {key: [] for key in runs}
  for _ in track(range(repeats), 'calibrating'):
    for key, run in runs.items():
      times[key].append(run())
  ratio = lambda key: statistics.median(
    t / s for t, s in zip(times[key], times[1], strict=True)
  )
  step = statistics.median(times[1])
  return Calibration(
    step=step,
    step_spread=float(np.ptp(times[1])),
    verify={key: ratio(key) for key in runs if isinstance(key, int)},
    propose={a.name: statistics.median(times[a.name]) for a in arms[1:]},
    c={a.name: ratio(a.name) / a.gamma for a in arms[1:]},
  )


def _window_seconds(program, weights, request):
  """() -> seconds a window: the whole call less its prefill."""
  none = request._replace(limit_B=request.lengths_B)

  def run():
    before = seconds(lambda: program(weights, none))
    start = time.perf_counter()
    out = jax.block_until_ready(program(weights, request))
    return (time.perf_counter() - start - before) / int(out.info.calls)

  return run


def _propose_seconds(arm, request):
  """() -> seconds a window of drafting alone, along the text."""
  steps = int(jnp.max(request.limit_B - request.lengths_B))
  weights = arm.engine.weights._replace(target=())
  program, _ = compiled(
    acceptance.walk,
    weights,
    request,
    jnp.int32(0),
    drafter=arm.engine.drafter,
    coupled=arm.engine.rule.coupled,
    vocab=arm.model.vocab,
  )

  def run():
    before = seconds(lambda: program(weights, request, jnp.int32(0)))
    after = seconds(lambda: program(weights, request, jnp.int32(steps)))
    return max(after - before, 0.0) / steps

  return run


@functools.cache
def _scripted(gamma: int) -> types.Drafter:
  # One object per gamma, or decode.programs would compile again.
  return scripted.make(gamma=gamma)
