"""Clocks: full generations, streams, and single parts of a window.

A generation is one executable call. A request with room for no token times the
prefill, one with room for one token the time to the first token. Within every
repeat the arms alternate, so that drift of the machine hits all of them.
"""

import functools
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
  """Runs of an arm: outputs[group], and seconds as [repeat][group].

  total, prefill, first: of requests full, none and first of plan.Group.
  compile_seconds: of the executable.
  """

  outputs: list[decode.Output]
  total: list[list[float]]
  prefill: list[list[float]]
  first: list[list[float]]
  compile_seconds: float


def compiled(jitted, *args, **statics):
  """Returns (executable, seconds to trace, lower and compile it)."""
  start = time.perf_counter()
  done = jitted.lower(*args, **statics).compile()
  return done, time.perf_counter() - start


def seconds(run: Callable[[], Any]) -> float:
  start = time.perf_counter()
  jax.block_until_ready(run())
  return time.perf_counter() - start


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
    arms: plain decoding first.
    groups: the requests.
    programs: by arm, from compile_arms.
    repeats: of everything.
    track: a progress bar.

  Returns:
    Runs by arm.
  """
  runs = {a.name: Runs([], [], [], [], programs[a.name][1]) for a in arms}
  for arm in arms:
    # Warm up: the first call of an executable is slower.
    program = programs[arm.name][0]
    jax.block_until_ready(program(arm.engine.weights, groups[0].first))
  jobs = [(r, g) for r in range(repeats) for g in range(len(groups))]
  for repeat, g in track(jobs, 'timing'):
    turn = (repeat + g) % len(arms)
    for arm in (*arms[turn:], *arms[:turn]):
      program, weights = programs[arm.name][0], arm.engine.weights
      took = lambda request, p=program, w=weights: seconds(
        lambda: p(w, request)
      )
      mine, group = runs[arm.name], groups[g]
      if g == 0:
        for times in (mine.total, mine.prefill, mine.first):
          times.append([])
      mine.prefill[repeat].append(took(group.none))
      mine.first[repeat].append(took(group.first))
      start = time.perf_counter()
      output = jax.block_until_ready(program(weights, group.full))
      mine.total[repeat].append(time.perf_counter() - start)
      if repeat == 0:
        mine.outputs.append(jax.device_get(output))
  return runs


def speeds(runs: Runs, pick: Sequence[int] | None = None) -> list[float | None]:
  """Tokens per second of every repeat, over the groups in `pick` (None: all).

  None, too short to measure, where decoding takes no longer than the prefill's
  time varies.
  """
  chosen = list(range(len(runs.outputs)) if pick is None else pick)
  emitted = metrics.summary(metrics.join([runs.outputs[g] for g in chosen]))
  # The fastest prefill of each group: a slow one would make decoding look fast.
  prefill_RG = np.asarray(runs.prefill)[:, chosen]
  prefill = float(np.min(prefill_RG, 0).sum())
  noise = float(np.median(prefill_RG, 0).sum()) - prefill
  return [
    metrics.tokens_per_second(
      emitted.emitted_tokens, sum(total[g] for g in chosen), prefill, noise
    )
    for total in runs.total
  ]


def improvement(
  mine: Runs, plain: Runs, pick: Sequence[int] | None = None
) -> metrics.Spread:
  """Speed over plain decoding's, repeat by repeat, over the chosen groups."""
  return metrics.walltime_improvement(speeds(mine, pick), speeds(plain, pick))


def stream(arms, groups, track: plan_lib.Track) -> dict[str, list[list[float]]]:
  """Decodes window by window from the host, noting when tokens come out.

  Returns, by arm, the clock in seconds for every token of every prompt.
  """
  stamps: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
  for arm in track(arms, 'streaming') if groups else ():
    programs, weights = arm.engine.programs, arm.engine.weights
    # The first run compiles; its own times are thrown away.
    for group in (groups[0], *groups):
      request = group.full
      state, info = jax.block_until_ready(programs.start(weights, request))
      before = np.asarray(state.lengths_B)
      rows: list[list[float]] = [[] for _ in group.items]
      while np.asarray(state.live_B).any():
        state, info = programs.step(weights, request, state, info)
        after, now = np.asarray(state.lengths_B), time.perf_counter()
        for row, n in zip(rows, after - before, strict=False):
          row.extend([now] * int(n))
        before = after
      stamps[arm.name] += rows
    stamps[arm.name] = stamps[arm.name][len(groups[0].items) :]
  return stamps


def texts(groups, outputs) -> list[list[int]]:
  """Emitted tokens of every prompt, in the groups' order."""
  return [
    out.tokens_BL[row, group.host.lengths_B[row] : out.lengths_B[row]].tolist()
    for group, out in zip(groups, outputs, strict=True)
    for row in range(len(group.items))
  ]


# --- the parts alone ---------------------------------------------------------


class Calibration(NamedTuple):
  """Times of the parts of a window, in plain steps unless given in seconds.

  step: seconds of a plain step of the target.
  step_spread: largest less smallest of its repeats, in seconds.
  verify: v(n), the cost of a verify pass, by its width n.
  idle: cost of a window in which nothing is proposed, by the width of its
    program's other windows.
  propose: seconds of drafting a window, by arm.
  c: cost of a drafted token, by arm.
  """

  step: float
  step_spread: float
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
    track: a progress bar.
  """
  engine = arms[0].engine
  # A stop would end the measurement early.
  request = request._replace(stop_BX=jnp.full_like(request.stop_BX, -1))
  text = plain(engine.weights, request).tokens_BL
  runs = _verify_runs(arms, request, plain, text)
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
  step, propose = statistics.median(times['verify', 1]), of('propose')
  return Calibration(
    step=step,
    step_spread=float(np.ptp(times['verify', 1])),
    verify=of('verify'),
    idle=of('idle'),
    propose={name: x * step for name, x in propose.items()},
    c={a.name: propose[a.name] / a.gamma for a in arms[1:]},
  )


def _verify_runs(arms, request, plain, text_BL) -> dict[Any, Callable]:
  """('verify' or 'idle', width) -> a sample of its windows, for _each."""
  engine = arms[0].engine
  runs = {('verify', 1): _window_seconds(plain, engine.weights, request)}
  # The text with every id moved by one is rejected, but for luck in a sampled
  # run; the window is still one window then.
  wrong_BL = (text_BL + 1) % engine.target.ids
  for width in sorted({arm.gamma + 1 for arm in arms} - {1}):
    programs = decode.programs(
      arms[0].model, _scripted(width - 1), engine.rule, engine.options
    )
    script = lambda count: types.Weights(
      engine.target.params, (wrong_BL, jnp.full_like(wrong_BL, count))
    )
    program, _ = compiled(programs.generate, script(0), request)
    for part, count in (('verify', width - 1), ('idle', 0)):
      runs[part, width] = _window_seconds(program, script(count), request)
  return runs


def _each(samples: list[tuple[float, float, int]]) -> list[float]:
  """Seconds a window of samples (call, call without windows, windows).

  Subtracts the fastest call without windows: a slow one would hide their cost.
  """
  before = min(sample[1] for sample in samples)
  return [max(whole - before, 1e-9) / n for whole, _, n in samples]


def _window_seconds(program, weights, request):
  none = request._replace(limit_B=request.lengths_B)

  def run():
    before = seconds(lambda: program(weights, none))
    start = time.perf_counter()
    out = jax.block_until_ready(program(weights, request))
    whole = time.perf_counter() - start
    return whole, before, int(out.info.calls)

  return run


def _propose_seconds(arm: plan_lib.Arm, request: decode.Request):
  """() -> a sample of drafting alone along the text, for _each."""
  span = int(jnp.max(request.limit_B - request.lengths_B))
  weights = arm.engine.weights
  program, _ = compiled(
    predict.propose_along,
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
  # A lookup takes microseconds, so enough of them to last 0.2 s are timed.
  walk(span)
  steps = span * int(min(max(0.2 / walk(span), 1), 1000))
  return lambda: (walk(steps), walk(0), steps)


@functools.cache
def _scripted(gamma: int) -> types.Drafter:
  # One object per gamma: decode.programs would compile again for an equal one.
  return scripted.make(gamma=gamma)
