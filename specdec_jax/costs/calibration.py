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
  idle: cost of a window in which nothing is proposed.
  propose: cost of drafting a window, by arm.
  c: cost of a drafted token, by arm.
  repeats: the same of every repeat; the above are medians over them.
  """

  step: float
  verify: dict[int, float]
  idle: float
  propose: dict[str, float]
  c: dict[str, float]
  repeats: tuple['Calibration', ...] = ()


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
  seconds = parts_lib.seconds(found, track(range(repeats), 'calibrating'))
  each = tuple(
    _costs(arms, {key: x[i] for key, x in seconds.items()})
    for i in range(repeats)
  )
  step = statistics.median(seconds['verify', 1])
  return _middle(each, step)._replace(repeats=each)


def _parts(arms, request: decode.Request, track) -> dict[Any, parts_lib.Part]:
  """Compiles every part: (verify or idle, width) and (propose, arm)."""
  steps = int(jnp.max(request.limit_B - request.lengths_B))
  plain, drafting = arms[0].engine, {id(x.engine): x.engine for x in arms[1:]}
  walk = _verify(plain, request, 0)
  out = {('verify', 1): parts_lib.Part(lambda n: walk(0, n), steps)}
  for engine in track(drafting.values(), 'compiling the parts'):
    gamma = engine.drafter.gamma
    if len(out) == 1:  # The same for all.
      wide = _verify(engine, request, gamma)
      for j in engine.options.bodies(gamma):
        part = parts_lib.Part(lambda n, f=wide, j=j: f(j, n), steps)
        out[('verify', j + 1) if j else ('idle', 0)] = part
    program = _propose(engine, request)
    for arm in arms[1:]:
      if arm.engine is engine:
        out['propose', arm.name] = _long(arm, program, request, steps)
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


def _propose(engine, request: decode.Request):
  program, _ = parts_lib.compiled(
    parts_lib.propose_along,
    engine.weights,
    request,
    jnp.int32(0),
    target=engine.target.model,
    drafter=engine.drafter,
    coupled=engine.rule.coupled,
  )
  return program


def _long(
  arm: Any, program, request: decode.Request, steps: int
) -> parts_lib.Part:
  """Drafting of an arm, often enough to last 0.2 s: a lookup takes no time."""
  most_B = jnp.minimum(request.gamma_B, arm.gamma)
  mine = request._replace(gamma_B=most_B)
  walk = lambda n: program(arm.engine.weights, mine, jnp.int32(n))
  walk(1)
  seconds, _ = parts_lib.timed(walk, steps)
  return parts_lib.Part(walk, steps * int(min(max(0.2 / seconds, 1), 1000)))


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
    idle=of('idle').get(0, max(of('verify').values())),
    propose=propose,
    c={a.name: propose[a.name] / a.gamma for a in arms[1:]},
  )


def _middle(each: Sequence[Calibration], step: float) -> Calibration:
  median = lambda get: statistics.median(get(x) for x in each)
  middle = lambda name: {
    key: median(lambda x, key=key: getattr(x, name)[key])
    for key in getattr(each[0], name)
  }
  verify, propose, c = map(middle, ('verify', 'propose', 'c'))
  return Calibration(step, verify, median(lambda x: x.idle), propose, c)
