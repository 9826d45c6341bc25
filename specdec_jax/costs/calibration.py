"""Times a window's parts alone: a pass by its width, and drafting. Acceptance
does not matter: passes have scripted drafts, drafting has no target."""

import functools
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, hosts, printing, program, requests
from specdec_jax.costs import parts as parts_lib
from specdec_jax.drafters import method
from specdec_jax.io import files

# measure: tokens before the windows that are timed, windows, repeats.
START, WINDOWS, REPEATS = 128, 8, 3

# Runs of the benchmark; the cache folder has the user's own, under this name.
RUNS = pathlib.Path(__file__).with_name('runs.json')


class Calibration(NamedTuple):
  """Times of a window's parts, in plain steps but for `step`."""

  step: float  # seconds of a plain step of the target
  verify: dict[int, float]  # v(n), the cost of a verify pass, by its width n
  idle: float  # of a window in which nothing is proposed
  # Of drafting a window, by the drafter's name and the number of drafts; of a
  # drafter around others, that of each of those.
  propose: dict[str, dict[int, float]]
  repeats: tuple['Calibration', ...] = ()  # of which all is the median


def calibrate(
  arms: Sequence[Any], request: decode.Request, repeats: int
) -> Calibration:
  """Times all parts of bench.plan's arms, plain decoding first, alternating.
  The request has full rows; a sample's windows are its limits minus its
  lengths."""
  engines = {id(arm.engine): arm.engine for arm in arms[1:]}
  counts = {0, 1, *(arm.gamma for arm in arms)}
  compiling = printing.track(engines.values(), 'compiling the parts')
  found = _parts(compiling, request, counts)
  found['verify', 1] = _verify(arms[0].engine, request, 0)
  rounds = printing.track(range(repeats), 'calibrating')
  seconds = parts_lib.seconds(found, rounds)
  steps = seconds['verify', 1]
  costs = [
    {key: x[i] / step for key, x in seconds.items()}
    for i, step in enumerate(steps)
  ]
  middle = {key: statistics.median(x[key] for x in costs) for key in seconds}
  every = tuple(map(_of, steps, costs))
  return _of(statistics.median(steps), middle)._replace(repeats=every)


def measure(engine, rows: int = 1) -> dict[str, list[float]]:
  """Measures one engine's windows for drafters.adaptive; see `costs`. Takes a
  few seconds: greedy, some 128 tokens in the cache, `rows` rows, on a mesh at
  least one for each of its parts."""
  gamma, request = engine.drafter.gamma, _request(engine, rows)
  found = _parts([engine], request, {0, 1, gamma})
  seconds = parts_lib.seconds(found, range(REPEATS))
  middle = {key: statistics.median(x) for key, x in seconds.items()}
  # Each process has its own times; all have to choose alike.
  return hosts.from_first(lambda: costs(_of(1.0, middle), gamma))


def costs(found: Calibration, gamma: int) -> dict[str, list[float]]:
  """Computes costs of windows with 0 to gamma drafts, over one without, as
  drafters.adaptive.params takes them: 'verify' is the target's pass; a
  drafter's name is its drafting."""
  counts = np.arange(gamma + 1)
  passes = at_width(found.verify, counts[1:] + 1)
  out: dict[str, Any] = {'verify': np.array([found.idle, *passes])}
  out |= {name: interpolated(x, counts) for name, x in found.propose.items()}
  return {name: np.round(x / found.idle, 4).tolist() for name, x in out.items()}


@functools.cache
def between_runs() -> tuple[float, int]:
  """Returns (error of costs from one run to the next, runs that tell it): the
  root mean square over each run's mean log(measured / explained), from the
  user's own runs where four are known, else from all."""
  own = program.cache_folder() / RUNS.name
  kept = [files.read_json(x, {'runs': []})['runs'] for x in (own, RUNS)]
  rows = kept[0] if len(kept[0]) >= 4 else sum(kept, [])
  means = [np.log(x['over_explained']).mean() for x in rows]
  error = float(np.linalg.norm(means)) / len(rows) ** 0.5
  return hosts.from_first(lambda: (error, len(rows)))


def interpolated(timed: Mapping[int, float], wanted) -> np.ndarray:
  """Interpolates costs linearly between timed numbers of tokens."""
  tokens, costs = zip(*sorted(timed.items()), strict=True)
  return np.interp(wanted, tokens, costs)


def at_width(timed: Mapping[int, float], wanted) -> np.ndarray:
  """Looks up the costs of passes over numbers of tokens: each is as wide as the
  narrowest timed one that holds them, as in the loop."""
  tokens, costs = zip(*sorted(timed.items()), strict=True)
  return np.asarray(costs)[np.searchsorted(tokens, wanted)]


def _parts(
  engines: Iterable[Any], request: decode.Request, counts: set[int]
) -> dict[tuple[str, int], parts_lib.Part]:
  """Compiles every part but the plain step. Keys are ('verify', tokens in the
  pass), 0 for a window without drafts, and (drafter's name, drafts)."""
  out: dict[tuple[str, int], parts_lib.Part] = {}
  for engine in engines:
    for j in engine.options.bodies(engine.drafter.gamma):
      key = 'verify', j + 1 if j else 0
      if key not in out:  # The same for all.
        out[key] = _verify(engine, request, j)
    for part in _methods(engine):
      for count in counts:
        if (key := (part.drafter.name, count)) not in out:
          out[key] = _propose(engine, part, count, request)
  return out


def _methods(engine) -> Sequence[method.Method]:
  """Lists what is timed in an engine: its drafter, or those that it wraps."""
  alone = engine.drafter, engine.weights.draft
  return engine.parts or (method.Method(*alone, draft=engine.draft),)


def _verify(engine, request: decode.Request, count: int) -> parts_lib.Part:
  """Compiles windows that propose `count` of the engine's gamma, as a part."""
  fixed = engine.weights._replace(draft=()), request, jnp.int32(count)
  # One program serves all drafters of this gamma.
  drafter = decode.PLAIN._replace(gamma=engine.drafter.gamma)
  loop = engine.loop._replace(drafter=drafter)
  walk = lambda steps: parts_lib.verify_along(
    *fixed, jnp.int32(steps), loop=loop
  )
  walk(0)
  return parts_lib.Part(walk, _windows(request))


def _propose(
  engine, part: method.Method, count: int, request: decode.Request
) -> parts_lib.Part:
  """Compiles drafting, in samples of 0.1 s or more: a lookup takes no time."""
  asked = request._replace(gamma_B=jnp.full_like(request.gamma_B, count))
  fixed = engine.weights._replace(draft=part.params), asked
  loop = engine.loop._replace(drafter=part.drafter)
  walk = lambda steps: parts_lib.propose_along(
    *fixed, jnp.int32(steps), loop=loop
  )
  walk(1)
  steps = _windows(request)
  seconds, _ = parts_lib.timed(walk, steps)
  more = lambda: int(min(max(0.1 / seconds, 1), 1000))
  return parts_lib.Part(walk, steps * hosts.from_first(more))


def _windows(request: decode.Request) -> int:
  return int(jnp.max(request.limit_B - request.lengths_B))


def _of(step: float, found: Mapping[tuple[str, int], float]) -> Calibration:
  """Builds a Calibration from one time for every part."""
  by: dict[str, dict[int, float]] = {}
  # More tokens do not take less time: where they seem to, it was noise. A plain
  # step is the least, then a window that proposes nothing.
  for name, count in sorted(found, key=lambda x: (x != ('verify', 1), x)):
    timed = by.setdefault(name, {})
    timed[count] = max([found[name, count], *timed.values()])
  verify = by.pop('verify')
  idle = verify.pop(0, max(verify.values()))
  return Calibration(step, verify, idle, by)


def _request(engine, rows: int = 1) -> decode.Request:
  target, gamma = engine.target, engine.drafter.gamma
  # A draft of a shorter context would draft nothing past it, at no cost.
  drafts = [x.draft for x in _methods(engine) if x.draft]
  most = min(x.context for x in (target, *drafts))
  start = max(1, min(START, most // 2, most - WINDOWS - gamma))
  text = (np.arange(start) % target.ids).tolist()
  source = text if target.model.encode else ()
  rows = requests.rows_on(target.layout, rows)
  new = min(WINDOWS, target.context - start)
  item = requests.Item(text, 0, source=source, new=new)
  request = requests.make([item] * rows, gamma=gamma)
  return requests.place(request, target.layout)
