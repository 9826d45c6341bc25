"""Times full generations, compares their speeds, and measures the ceiling.

In a block, a batch in one repeat, all arms run in turn, so that drift cancels.
Weight bytes over bandwidth, which is measured, bound a plain step from below.
"""

import functools
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, hosts, machine, metrics, printing, program
from specdec_jax.bench import budget, identity, intervals, predict, records
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.costs import parts
from specdec_jax.kernels import calls, pages
from specdec_jax.models import work

# K of x_1K @ w_KN; N fills the bytes. Some shapes stream slower than others.
_ROWS = (1536, 4096, 8192)
# Bytes read: as many as by a step, but at least and at most these. Some caches
# hold hundreds of MB, and what decoding finds there is read there.
_LEAST, _MOST = 2**25, {'cpu': 2**28, 'other': 2**30}
# Reads in a row. The first after other work is slower than those in the midst
# of decoding: by a fifth on 2 threads, at times by half.
_READS = 6


class Runs(NamedTuple):
  """An arm's runs on batches G of prompts.

  answers, outputs: equal in all runs of a batch.
  tokens_G: emitted. prompts_G: different ones; no two batches share one.
  kind_G: category; '' for none, and for a batch with several prompts.
  repeats_G: how often it ran. decoding_G: seconds of all windows, a mean.
  prefill_G: seconds before them; arms with one engine share theirs.
  """

  answers: records.Answers
  outputs: list[Any]
  tokens_G: np.ndarray
  prompts_G: np.ndarray
  kind_G: np.ndarray
  repeats_G: np.ndarray
  decoding_G: np.ndarray
  prefill_G: np.ndarray

  def picked(self, batches: Sequence[int]) -> 'Runs':
    """Keeps some batches alone."""
    answers, outputs, *arrays = self
    mine = {at: x for at, x in answers.items() if at[0] in batches}
    picked = (x[batches] for x in arrays)
    return Runs(mine, [outputs[g] for g in batches], *picked)


def compile_arms(arms, request: decode.Request) -> dict[str, decode.Programs]:
  """Compiles what `turn` runs, for the request's shapes."""
  engines = {id(arm.engine): arm.engine for arm in arms}
  read, done = {}, {}
  for key, engine in printing.track(engines.items(), 'compiling'):
    p, asked = engine.programs, (engine.weights, request)
    if (kind := _kind(engine)) not in read:
      alone = engine.weights._replace(draft=()), request
      opened, empty = _compiled(p.opened, *alone)
      read[kind] = opened, *_compiled(p.read, *alone, empty)
    opened, reader, reading = read[kind]
    begin, begun = _compiled(p.begin, *asked, reading)
    finish, _ = _compiled(p.finish, *asked, *begun)
    done[key] = p._replace(
      opened=opened, read=reader, begin=begin, finish=finish
    )
  return {arm.name: done[id(arm.engine)] for arm in arms}


def _compiled(program, *args):
  """Returns (the compiled program, what it returns: shapes and shardings)."""
  made = program.lower(*args).compile()
  place = lambda x, where: x.update(sharding=where)
  out = jax.eval_shape(program, *args)
  return made, jax.tree.map(place, out, made.output_shardings)


def _kind(engine):
  """Returns what a reading of the prompts depends on."""
  return engine.options.chunk, engine.drafter.taps


def first_step(arms, group: plan_lib.Group, tok_s: float, check):
  """Compiles plain decoding and guesses the rest: (programs, Speed). tok_s: the
  ceiling's. check(Speed): refuses once too little time is left."""
  engines = {arm.drafter: arm.engine for arm in arms[1:]}.values()
  read = sum(not engine.parts for engine in engines)
  own = sum(bool(x.draft or any(y.draft for y in x.parts)) for x in engines)
  fills = len({_kind(arm.engine) for arm in arms}) + 0.5 * own
  guess = len(engines), {arm.name: 1.5 for arm in arms[1:]}, read, fills
  speed = budget.Speed(1 / tok_s, 1 / tok_s, 0.0, *guess)
  check(speed)
  compiling, programs = parts.timed(compile_arms, arms[:1], group.full)
  check(speed := speed._replace(compile=compiling))
  few = group._replace(full=plan_lib.shortened(group.full, 4))
  turn(arms[:1], programs, few)  # the first call is slower
  (ran,) = turn(arms[:1], programs, few).values()
  step = ran.decoding / max(ran.output.info.calls_B.max(), 1)
  check(speed := speed._replace(step=step, prefill=ran.prefill))
  return programs, speed


class Ran(NamedTuple):
  """One arm on one batch: seconds by part, and its output on the host."""

  prefill: float
  decoding: float
  output: Any


def turn(
  arms: Sequence[plan_lib.Arm],
  programs: Mapping[str, decode.Programs],
  group: plan_lib.Group,
) -> dict[str, Ran]:
  """Runs every arm on one batch, in this order; the target reads the prompts
  once for all that need the same of it, a drafter once for all its gammas."""
  readings, begun, out = {}, {}, {}
  for i, arm in enumerate(arms):
    engine, program, request = arm.engine, programs[arm.name], group.full
    key, kind, weights = id(engine), _kind(engine), engine.weights
    later = [x.engine for x in arms[i + 1 :]]
    if key not in begun:
      read = lambda *x, p=program: p.read(*x, p.opened(*x))
      alone = weights._replace(draft=()), request
      known = readings.pop(kind, None) or parts.timed(read, *alone)
      took, state = parts.timed(program.begin, weights, request, known[1])
      begun[key] = known[0] + took, state
      if any(x is not engine and _kind(x) == kind for x in later):
        readings[kind] = known
      del known
    prefill, state = begun.pop(key)
    if any(x is engine for x in later):
      begun[key] = prefill, state  # what is given to a program is gone
      state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    request = plan_lib.capped(arm, request)
    took, (state, info) = parts.timed(program.finish, weights, request, *state)
    done = decode.Output(state.tokens_BL, state.lengths_B, info)
    out[arm.name] = Ran(prefill, took, hosts.fetch(done))
    del state, done  # a cache, that the next one needs no second beside it
  return out


def measure(
  arms: Sequence[plan_lib.Arm],
  groups: Sequence[plan_lib.Group],
  programs: Mapping[str, decode.Programs],
  blocks: Iterable[tuple[int, int]],
) -> dict[str, Runs]:
  """Runs every arm on blocks, (repeat, group index) in order, which may end
  early; each begins with another engine."""
  none = groups[0]._replace(full=plan_lib.shortened(groups[0].full, 0))
  turn(arms, programs, none)  # The first call of an executable is slower.
  pairs = enumerate(itertools.pairwise(arms), 1)
  firsts = [0, *(i for i, (a, b) in pairs if a.engine is not b.engine)]
  ran: dict[int, list[dict[str, Ran]]] = {}  # by batch
  for repeat, g in blocks:
    at = firsts[(repeat + g) % len(firsts)]
    found = turn((*arms[at:], *arms[:at]), programs, groups[g])
    if repeat:  # the same again
      found = {name: x._replace(output=None) for name, x in found.items()}
    ran.setdefault(g, []).append(found)
  groups = groups[: len(ran)]
  repeats_G = np.array([len(ran[g]) for g in range(len(groups))])
  prompts_G = np.array([len({x.id for x in group.items}) for group in groups])
  alone = lambda x: x.items[0].category if len(x.items) == 1 else ''
  kind_G = np.array([alone(group) for group in groups])
  out = {}
  for arm in arms:
    mine = [[found[arm.name] for found in ran[g]] for g in range(len(groups))]
    outputs = [x[0].output for x in mine]
    out[arm.name] = Runs(
      plan_lib.answers(groups, outputs),
      outputs,
      np.array([metrics.emitted(x.info) for x in outputs]),
      *(prompts_G, kind_G, repeats_G),
      np.array([np.mean([y.decoding for y in x]) for x in mine]),
      np.array([np.mean([y.prefill for y in x]) for x in mine]),
    )
  return out


class Measured(NamedTuple):
  """What arms did on a plan's test prompts.

  plan: with the prompts and repeats that ran, which took `seconds`.
  runs: by arm. rows: all that is measured of each.
  failed: requests with broken logits; then no row is valid.
  """

  plan: plan_lib.Plan
  runs: dict[str, Runs]
  rows: list[records.Row]
  failed: list[records.Failure]
  seconds: float


def measured(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  programs: Mapping[str, decode.Programs] | None = None,
  blocks: Iterable[tuple[int, int]] | None = None,
  calibration: calibration_lib.Calibration | None = None,
  *,
  level: float = 0.95,
) -> Measured:
  """Runs a plan's test prompts, one or more, compares the texts and sums up;
  arms[0] decodes plainly.

  programs: all arms', if they are compiled already.
  blocks: as in `measure`; all if None. calibration, level: as in `rows`.
  """
  groups = plan_lib.groups(arms, plan, plan.test)
  programs = programs or compile_arms(arms, groups[0].full)
  if blocks is None:
    blocks = budget.blocks(len(groups), plan.bench.repeats, budget.UNLIMITED)
  start = program.elapsed()
  runs = measure(arms, groups, programs, blocks)
  seconds, plain = program.elapsed() - start, runs[arms[0].name]
  repeats_G = plain.repeats_G
  plan = plan_lib.cut(plan, len(repeats_G), int(repeats_G.min()))
  answers = {name: x.answers for name, x in runs.items()}
  failed = identity.failures(answers)
  whole = improvements(runs, whole=True)
  alphas = predict.alphas(arms, groups[: plan.batches], plain.outputs)
  audits = identity.compare(arms, plan, answers)
  found = [
    row._replace(
      whole=whole[row.name],
      time_to_first_token=first_token(runs[row.name]),
      alpha=alphas.get(row.name),
    )
    for row in rows(arms, runs, audits, None if failed else calibration, level)
  ]
  return Measured(plan, runs, found, failed, seconds)


def rows(
  arms: Sequence[plan_lib.Arm],
  runs: Mapping[str, Runs],
  audits: Mapping[str, records.Audit],
  calibration: calibration_lib.Calibration | None = None,
  level: float = 0.95,
) -> list[records.Row]:
  """Sums up every arm's speed and counts; a calibration also explains them.
  level: how often all intervals hold."""
  improvement, explained = improvements(runs, level=level), {}
  if calibration:
    outputs = {name: x.outputs for name, x in runs.items()}
    explained = predict.improvements(arms, calibration, outputs)
  return [
    records.Row(
      *(arm.name, arm.drafter, arm.gamma),
      metrics.summary(metrics.join(runs[arm.name].outputs)),
      tok_s=tok_s(runs[arm.name]),
      improvement=improvement[arm.name],
      explained=explained.get(arm.name),
      audit=audits.get(arm.name),
    )
    for arm in arms
  ]


def tok_s(runs: Runs) -> float:
  """Returns tokens per second of decoding."""
  return float(runs.tokens_G.sum() / runs.decoding_G.sum())


def improvements(
  runs: Mapping[str, Runs], *, whole: bool = False, level: float = 0.95
) -> dict[str, intervals.Interval]:
  """Returns speeds by arm over the first one's; intervals hold all at once.

  Fewer than intervals.FEWEST prompts, or one batch, give none: prompts are the
  sample, as repeats do not tell how others would do. Where there are so many
  categories they are the sample: prompts in one are alike.

  runs: on the same batches. whole: with both models' prefill, else decoding
    alone. level: how often all intervals hold.
  """
  plain = next(iter(runs.values()))
  unit_GU = intervals.units(plain.kind_G)
  found = intervals.speedups(
    [x.tokens_G @ unit_GU for x in runs.values()],
    [(x.decoding_G + whole * x.prefill_G) @ unit_GU for x in runs.values()],
    level,
    # Copies that fill a batch are no further prompts.
    int(plain.prompts_G.sum()),
  )
  one = intervals.Interval(1.0, 1.0, 1.0)
  return dict(zip(runs, [one, *found], strict=True))


def first_token(runs: Runs) -> float:
  """Returns seconds of prefill and a mean window, the batches' median."""
  calls_G = [max(x.info.calls_B.max(), 1) for x in runs.outputs]
  return float(np.median(runs.prefill_G + runs.decoding_G / calls_G))


# --- the ceiling -------------------------------------------------------------


def ceiling(arms: Sequence[plan_lib.Arm], plan: plan_lib.Plan):
  """Measures plain decoding's Ceiling; returns it and the read to repeat."""
  target = arms[0].engine.target
  models = [target, *(a.engine.draft for a in arms if a.engine.draft)]
  devices = 1 if target.layout is None else target.layout.mesh.size
  # A step reads the weights, on average half the answer in the cache, and what
  # the encoder left.
  prompt = np.mean([len(item.tokens) for item in plan.test])
  source = np.mean([len(item.source) for item in plan.test])
  slots = float(prompt) + plan.max_new_tokens / 2
  rows = plan.bench.batch_size
  step = work.step_bytes(target.params)
  step += work.slot_bytes(target.model, rows) * slots
  step += work.source_bytes(target.model, target.params, rows) * source
  packed = any(m.lm_config and m.lm_config.run.packed for m in models)
  size, small = int(step / devices), plan.bench.small
  programs = {
    d: reads(d, size, packed=packed, small=small)
    for d in sorted({m.dtype for m in models})
  }
  gb_s = hosts.from_first(
    lambda: {d: bandwidth(x) for d, x in programs.items()}
  )
  mine = gb_s[target.dtype]
  tok_s = float(rows * mine['sustained'] * 1e9 * devices / step)
  fastest = max(programs[target.dtype], key=lambda name: mine[name])
  return records.Ceiling(gb_s, tok_s), programs[target.dtype][fastest]


def reads(
  dtype: str,
  size: int = max(_MOST.values()),
  *,
  packed: bool = False,
  small: bool = False,
) -> dict[str, machine.Read]:
  """Makes programs that read `size` bytes: x_1K @ w_KN, and a sum.

  size: raised to 32 MB; cut to 256 MB on CPU, elsewhere to 1 GB.
  packed: also by the CPU kernels, which read faster than XLA.
  small: arrays that fit into a cache, for a smoke test; no bound.
  """
  most = _MOST['cpu' if jax.default_backend() == 'cpu' else 'other']
  size = 2**20 if small else min(max(size, _LEAST), most)
  size //= jnp.dtype(dtype).itemsize
  filled = lambda *shape: pages.enlarge(machine.filled(shape, dtype))
  out = {}
  for K in _ROWS[:1] if small else _ROWS:
    N = size // K // 128 * 128
    x_1K, w_KN = jnp.ones((1, K), dtype), filled(K, N)
    out[f'matvec {K}x{N}'] = functools.partial(
      machine.read, machine.matvec, x_1K, w_KN
    )
  if packed:
    x_1K = jnp.ones((1, _ROWS[0]))
    panels = filled(size // x_1K.size // calls.WIDE, x_1K.size, calls.WIDE)
    out['kernel'] = functools.partial(machine.read, _kernel, x_1K, panels)
  out['sum'] = functools.partial(machine.read, _sum, filled(size))
  return out


def bandwidth(programs: Mapping[str, machine.Read]) -> dict[str, float]:
  """Measures GB/s by program, medians of calls; 'sustained' is their largest,
  'best' the best single call."""
  found = {name: machine.repeated(read) for name, read in programs.items()}
  sustained = {name: statistics.median(x) for name, x in found.items()}
  best = max(map(max, found.values()))
  return sustained | {'sustained': max(sustained.values()), 'best': best}


def reading(blocks: Iterable, read: machine.Read, gb_s: list[float]):
  """Yields the blocks; before each, adds the fastest of _READS in GB/s, as a
  shared machine's memory is not as fast a minute later."""
  fastest = lambda: max(read() for _ in range(_READS))
  for block in blocks:
    gb_s.append(hosts.from_first(fastest))
    yield block


@jax.jit
def _kernel(x_1K, panels):
  return calls.linear(x_1K, panels, len(panels) * calls.WIDE)


@jax.jit
def _sum(x):
  return jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32))
