"""Clocks: full generations, streams, and single parts of a window.

A generation is one executable call. A request with room for no token times the
prefill, one with room for one token the time to the first token. Within every
repeat the arms alternate, so that drift of the machine hits all of them.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, types
from specdec_jax.bench import metrics, predict
from specdec_jax.bench import plan as plan_lib
from specdec_jax.drafters import scripted


class Runs(NamedTuple):
  """Runs of an arm: outputs[group], and seconds by repeat R and group G.

  total_RG, prefill_RG, first_RG: of requests full, none and first of
    plan.Group.
  compile_seconds: of the executable.
  """

  outputs: list[decode.Output]
  total_RG: np.ndarray
  prefill_RG: np.ndarray
  first_RG: np.ndarray
  compile_seconds: float


def compiled(jitted, *args, **statics):
  """Returns (executable, seconds to trace, lower and compile it)."""
  start = time.perf_counter()
  done = jitted.lower(*args, **statics).compile()
  return done, time.perf_counter() - start


def timed(run: Callable, *args) -> tuple[float, Any]:
  """Returns (seconds, result) of run(*args)."""
  start = time.perf_counter()
  result = jax.block_until_ready(run(*args))
  return time.perf_counter() - start, result


def compile_arms(arms, request: decode.Request, track, description='compiling'):
  """By arm, compiled() of its generate at the request's shapes."""
  return {
    arm.name: compiled(
      arm.engine.programs.generate, arm.engine.weights, request
    )
    for arm in track(arms, description)
  }


def measure(
  arms: Sequence[plan_lib.Arm],
  groups: Sequence[plan_lib.Group],
  programs,
  repeats: int,
  track: plan_lib.Track,
) -> dict[str, Runs]:
  """Times all arms, alternating by group; each repeat begins with another arm.

  Args:
    arms: plain decoding and the methods.
    groups: batches of prompts.
    programs: by arm, from compile_arms.
    repeats: timed runs of every arm.
    track: shows progress.

  Returns:
    Runs by arm.
  """
  runs = {}
  for arm in arms:
    program, compile_seconds = programs[arm.name]
    zeros = lambda: np.zeros((repeats, len(groups)))
    runs[arm.name] = Runs([], zeros(), zeros(), zeros(), compile_seconds)
    # Warm up: the first call of an executable is slower.
    timed(program, arm.engine.weights, groups[0].first)
  jobs = list(itertools.product(range(repeats), range(len(groups))))
  for repeat, g in track(jobs, 'timing'):
    turn = (repeat + g) % len(arms)
    for arm in (*arms[turn:], *arms[:turn]):
      mine, group = runs[arm.name], groups[g]
      call = functools.partial(programs[arm.name][0], arm.engine.weights)
      mine.prefill_RG[repeat, g], _ = timed(call, group.none)
      mine.first_RG[repeat, g], _ = timed(call, group.first)
      mine.total_RG[repeat, g], output = timed(call, group.full)
      if repeat == 0:
        mine.outputs.append(jax.device_get(output))
  return runs


def speeds(runs: Runs, pick: Sequence[int] | None = None) -> list[float | None]:
  """Tokens per second of every repeat, over the groups in `pick` (None: all).

  The prefill's time is subtracted. None, too short to measure, where decoding
  takes no longer than the prefill's time varies.
  """
  chosen = list(range(len(runs.outputs)) if pick is None else pick)
  emitted = metrics.summary(
    metrics.join([runs.outputs[g] for g in chosen])
  ).emitted_tokens
  # The fastest prefill of each group: a slow one would make decoding look fast.
  prefill_RG = runs.prefill_RG[:, chosen]
  prefill = prefill_RG.min(0).sum()
  noise = np.median(prefill_RG, 0).sum() - prefill
  decoding_R = runs.total_RG[:, chosen].sum(1) - prefill
  return [
    emitted / seconds if seconds > noise else None
    for seconds in decoding_R.tolist()
  ]


def improvement(
  mine: Runs, plain: Runs, pick: Sequence[int] | None = None
) -> metrics.Spread:
  """Speed over plain decoding's, repeat by repeat, over the chosen groups."""
  pairs = zip(speeds(mine, pick), speeds(plain, pick), strict=True)
  return metrics.spread([m and p and m / p for m, p in pairs])


def stream(arms, groups, track: plan_lib.Track) -> dict[str, list[list[float]]]:
  """Decodes window by window from the host, noting when tokens come out.

  Returns, by arm, the clock in seconds for every token of every prompt.
  """
  stamps = {}
  for arm in track(arms, 'streaming') if groups else ():
    _stream(arm, groups[0])  # compiles
    stamps[arm.name] = [x for group in groups for x in _stream(arm, group)]
  return stamps


def _stream(arm: plan_lib.Arm, group: plan_lib.Group) -> list[list[float]]:
  programs, weights = arm.engine.programs, arm.engine.weights
  request = group.full
  state, info = programs.start(weights, request)
  before = np.asarray(state.lengths_B)
  stamps: list[list[float]] = [[] for _ in group.items]
  while np.asarray(state.live_B).any():
    state, info = programs.step(weights, request, state, info)
    after, now = np.asarray(state.lengths_B), time.perf_counter()
    for row, emitted in zip(stamps, after - before, strict=False):
      row.extend([now] * int(emitted))
    before = after
  return stamps


# --- the parts alone ---------------------------------------------------------


class Calibration(NamedTuple):
  """Times of the parts of a window, in plain steps but for `step`.

  step: seconds of a plain step of the target.
  verify: v(n), the cost of a verify pass, by its width n.
  idle: cost of a window in which nothing is proposed, by the width of its
    program's other windows.
  propose: cost of drafting a window, by arm.
  c: cost of a drafted token, by arm.
  """

  step: float
  verify: dict[int, float]
  idle: dict[int, float]
  propose: dict[str, float]
  c: dict[str, float]


def calibrate(
  arms: Sequence[plan_lib.Arm],
  request: decode.Request,
  *,
  plain,
  repeats: int,
  track: plan_lib.Track,
) -> Calibration:
  """Times every verify width and every drafter of the arms, alternating.

  Independent of acceptance: verification is timed with scripted drafts that are
  always rejected, drafting without a target.

  Args:
    arms: plain decoding first.
    request: full rows; limit - length is how many windows are timed.
    plain: the executable of plain decoding at the request's shapes.
    repeats: of each measurement; medians are taken.
  """
  engine = arms[0].engine
  # A stop would end the measurement early.
  request = request._replace(stop_BX=jnp.full_like(request.stop_BX, -1))
  text_BL = plain(engine.weights, request).tokens_BL
  samplers = _verify_samplers(arms, request, plain, text_BL)
  for arm in arms[1:]:
    samplers['propose', arm.name] = _propose_sampler(
      arm, request._replace(tokens_BL=text_BL)
    )
  for sample in samplers.values():
    sample()  # warms up
  samples: dict[Any, list[Sample]] = {key: [] for key in samplers}
  for _ in track(range(repeats), 'calibrating'):
    for key, sample in samplers.items():
      samples[key].append(sample())
  seconds = {key: _each(found) for key, found in samples.items()}
  steps = seconds['verify', 1]
  # In plain steps of the same repeat, by width or arm.
  of = lambda part: {
    name: statistics.median(
      x / step for x, step in zip(seconds[kind, name], steps, strict=True)
    )
    for kind, name in seconds
    if kind == part
  }
  propose = of('propose')
  return Calibration(
    step=statistics.median(steps),
    verify=of('verify'),
    idle=of('idle'),
    propose=propose,
    c={a.name: propose[a.name] / a.gamma for a in arms[1:]},
  )


class Sample(NamedTuple):
  """Seconds of a call with some windows, and of the same without any."""

  seconds: float
  without: float
  windows: int


def _each(samples: list[Sample]) -> list[float]:
  """Seconds a window of every sample.

  Subtracts the fastest call without windows: a slow one would hide their cost.
  """
  without = min(x.without for x in samples)
  return [max(x.seconds - without, 1e-9) / x.windows for x in samples]


def _verify_samplers(arms, request, plain, text_BL) -> dict[Any, Callable]:
  """('verify' or 'idle', width) -> a function that returns a Sample."""
  engine = arms[0].engine

  def sampler(program, weights):
    none = request._replace(limit_B=request.lengths_B)

    def sample():
      without, _ = timed(program, weights, none)
      seconds, out = timed(program, weights, request)
      return Sample(seconds, without, int(out.info.calls))

    return sample

  samplers = {('verify', 1): sampler(plain, engine.weights)}
  # The text with every id moved by one is rejected, but for luck in a sampled
  # run; the window is still one window then.
  wrong_BL = (text_BL + 1) % engine.target.ids
  for width in sorted({arm.gamma + 1 for arm in arms} - {1}):
    programs = decode.programs(
      engine.target.model, _scripted(width - 1), engine.rule, engine.options
    )
    script = lambda count: types.Weights(
      engine.target.params, (wrong_BL, jnp.full_like(wrong_BL, count))
    )
    program, _ = compiled(programs.generate, script(0), request)
    for part, count in (('verify', width - 1), ('idle', 0)):
      samplers[part, width] = sampler(program, script(count))
  return samplers


def _propose_sampler(arm: plan_lib.Arm, request: decode.Request):
  """A function that returns a Sample of drafting alone along the text."""
  span = int(jnp.max(request.limit_B - request.lengths_B))
  weights = arm.engine.weights
  program, _ = compiled(
    predict.propose_along,
    weights,
    request,
    jnp.int32(0),
    target=arm.engine.target.model,
    drafter=arm.engine.drafter,
    coupled=arm.engine.rule.coupled,
  )
  walk = lambda steps: timed(program, weights, request, jnp.int32(steps))[0]
  # A lookup takes microseconds, so enough of them to last 0.2 s are timed.
  walk(span)
  steps = span * int(min(max(0.2 / walk(span), 1), 1000))
  return lambda: Sample(walk(steps), walk(0), steps)


@functools.cache
def _scripted(gamma: int) -> types.Drafter:
  # One object per gamma: decode.programs would compile again for an equal one.
  return scripted.make(gamma=gamma)
