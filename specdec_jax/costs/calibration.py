"""Times the parts of a window alone: a pass by its width, and drafting.

Independent of acceptance: passes are timed with scripted drafts, drafting
without a target.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax import decode
from specdec_jax.costs import parts as parts_lib


class Calibration(NamedTuple):
  """Times of the parts of a window, in plain steps but for `step`.

  step: seconds of a plain step of the target.
  verify: v(n), the cost of a verify pass, by its width n.
  idle: cost of a window in which nothing is proposed, by the width of its
    program's other windows.
  propose: cost of drafting a window, by arm.
  c: cost of a drafted token, by arm.
  repeats: the same of every repeat; the above are medians over them.
  """

  step: float
  verify: dict[int, float]
  idle: dict[int, float]
  propose: dict[str, float]
  c: dict[str, float]
  repeats: tuple['Calibration', ...] = ()


class Part(NamedTuple):
  """A part of a window: walk(steps) runs it that often; steps in a sample."""

  walk: Callable[[int], Any]
  steps: int


def calibrate(
  arms: Sequence[Any], request: decode.Request, repeats: int, track
) -> Calibration:
  """Times all parts, alternating.

  Args:
    arms: bench.plan.Arm, plain decoding first.
    request: full rows; its limits minus its lengths are the windows that a
      sample has.
    repeats: of each measurement.
    track: shows progress.
  """
  found = _parts(arms, request, track)
  none = {}
  for key, part in found.items():
    part.walk(0)  # the first call is slower
    none[key] = min(parts_lib.timed(part.walk, 0)[0] for _ in range(2))
  seconds: dict[Any, list[float]] = {key: [] for key in found}
  for _ in track(range(repeats), 'calibrating'):
    for key, (walk, steps) in found.items():
      took, _ = parts_lib.timed(walk, steps)
      seconds[key].append(max(took - none[key], 1e-9) / steps)
  each = tuple(
    _costs(arms, {key: x[i] for key, x in seconds.items()})
    for i in range(repeats)
  )
  step = statistics.median(seconds['verify', 1])
  return _middle(each, step)._replace(repeats=each)


def _parts(arms, request: decode.Request, track) -> dict[Any, Part]:
  """Compiles every part: (verify or idle, width) and (propose, arm)."""
  steps = int(jnp.max(request.limit_B - request.lengths_B))
  widths = sorted({arm.gamma + 1 for arm in arms})
  out = {}
  for kind, key in track(
    [*(('verify', n) for n in widths), *(('propose', a) for a in arms[1:])],
    'compiling the parts',
  ):
    if kind == 'propose':
      out[kind, key.name] = _propose(key, request, steps)
      continue
    walk = _verify(arms[0].engine, request, key - 1)
    out[kind, key] = Part(lambda n, f=walk, k=key: f(k - 1, n), steps)
    if key > 1:
      out['idle', key] = Part(lambda n, f=walk: f(0, n), steps)
  return out


def _verify(engine, request: decode.Request, gamma: int) -> Callable:
  """(count, steps) -> windows that propose `count` of gamma tokens."""
  statics = dict(
    target=engine.target.model,
    rule=engine.rule,
    options=engine.options,
    gamma=gamma,
  )
  args = lambda *n: (
    engine.weights._replace(draft=()),
    request,
    *map(jnp.int32, n),
  )
  program, _ = parts_lib.compiled(
    parts_lib.verify_along, *args(0, 0), **statics
  )
  return lambda *n: program(*args(*n))


def _propose(arm: Any, request: decode.Request, steps: int) -> Part:
  args = lambda n: (arm.engine.weights, request, jnp.int32(n))
  program, _ = parts_lib.compiled(
    parts_lib.propose_along,
    *args(0),
    target=arm.engine.target.model,
    drafter=arm.engine.drafter,
    coupled=arm.engine.rule.coupled,
  )
  walk = lambda n: program(*args(n))
  walk(1)
  seconds, _ = parts_lib.timed(walk, steps)
  # A lookup takes microseconds, so enough of them to last 0.2 s are timed.
  return Part(walk, steps * int(min(max(0.2 / seconds, 1), 1000)))


def _costs(arms, seconds: dict[Any, float]) -> Calibration:
  """One repeat in plain steps of the same repeat."""
  step = seconds['verify', 1]
  of = lambda part: {
    key: x / step for (kind, key), x in seconds.items() if kind == part
  }
  propose = of('propose')
  return Calibration(
    step=step,
    verify=of('verify'),
    idle=of('idle'),
    propose=propose,
    c={a.name: propose[a.name] / a.gamma for a in arms[1:]},
  )


def _middle(each: Sequence[Calibration], step: float) -> Calibration:
  middle = lambda name: {
    key: statistics.median(getattr(x, name)[key] for x in each)
    for key in getattr(each[0], name)
  }
  verify, idle, propose, c = map(middle, ('verify', 'idle', 'propose', 'c'))
  return Calibration(step, verify, idle, propose, c)
