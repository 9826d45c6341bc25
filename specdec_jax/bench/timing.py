"""Clocks of full generations, improvements made of them, and their ceiling.

A generation is one executable call. A block is one batch of prompts in one
repeat: all arms run in turn, so that drift of the machine cancels. One step of
plain decoding reads every weight once, so weight bytes over bandwidth bound its
time from below. Bandwidth is measured, not taken from a data sheet.
"""

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, hosts, machine, metrics, printing
from specdec_jax.bench import budget, intervals, records
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import parts
from specdec_jax.kernels import calls, pages
from specdec_jax.models import work

# The prefill alone is timed so often for each batch, unless that takes more
# than this share of what it is taken off; then once in each repeat.
_FILLS, _SHARE = 3, 1 / 8
# K of x_1K @ w_KN; N fills the bytes. Some shapes stream slower than others.
_ROWS = (1536, 4096, 8192)
# Bytes read: as many as by a step, but at least and at most these. Some caches
# hold hundreds of MB, and what decoding finds there is read there.
_LEAST, _MOST = 2**25, {'cpu': 2**28, 'other': 2**30}
# Reads in a row. The first after other work is slower than those in the midst
# of decoding: by a fifth on 2 threads, at times by half.
_READS = 6


class Runs(NamedTuple):
  """Runs of an arm on batches G of prompts.

  outputs: one for each batch; runs of a batch emit the same.
  total_RG: seconds of a generation, prefill included; NaN where not run.
  prefill_G: seconds of the batch's own prefill at its fastest.
  noise_G: by which the prefill usually takes longer.
  prompts: different ones in all batches.
  """

  outputs: list[decode.Output]
  total_RG: np.ndarray
  prefill_G: np.ndarray
  noise_G: np.ndarray
  prompts: int

  @property
  def seconds_G(self) -> np.ndarray:
    """Seconds of a generation, the mean of its repeats."""
    return np.nanmean(self.total_RG, 0)

  @property
  def tokens_G(self) -> np.ndarray:
    return np.array([metrics.emitted(x.info) for x in self.outputs])

  def picked(self, batches: Sequence[int]) -> 'Runs':
    """Those of some batches alone."""
    return self._replace(
      outputs=[self.outputs[g] for g in batches],
      total_RG=self.total_RG[:, batches],
      prefill_G=self.prefill_G[batches],
      noise_G=self.noise_G[batches],
    )


def compile_arms(arms, request: decode.Request):
  """By arm, its generate compiled at the request's shapes."""
  engines = {id(arm.engine): arm.engine for arm in arms}
  done = {
    key: engine.programs.generate.lower(engine.weights, request).compile()
    for key, engine in printing.track(engines.items(), 'compiling')
  }
  return {arm.name: done[id(arm.engine)] for arm in arms}


def first_step(arms: Sequence[plan_lib.Arm], group: plan_lib.Group):
  """(programs, Speed): plain decoding compiled, and a guess of all others."""
  compiling, programs = parts.timed(compile_arms, arms[:1], group.full)
  program = programs[arms[0].name]
  call = functools.partial(parts.timed, program, arms[0].engine.weights)
  call(group.prefill)
  prefill, _ = call(group.prefill)
  total, out = call(plan_lib.shortened(group.full, 4))
  step = max(total - prefill, 1e-6) / max(metrics.windows(out.info).sum(), 1)
  engines = {arm.drafter: arm.engine for arm in arms[1:]}.values()
  read = sum(parts.has_q(engine, group) for engine in engines)
  guess = {arm.name: 1.5 for arm in arms[1:]}
  speed = budget.Speed(step, prefill, compiling, len(engines), guess, read)
  return programs, speed


def measure(
  arms: Sequence[plan_lib.Arm],
  groups: Sequence[plan_lib.Group],
  programs,
  blocks: Iterable[tuple[int, int]],
) -> dict[str, Runs]:
  """By arm, its Runs; block by block, each of which begins with another arm.

  blocks: (repeat, index of the group), in order; they may end early.
  """
  total: dict[str, dict] = {arm.name: {} for arm in arms}
  prefill: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
  outputs: dict[str, list] = {arm.name: [] for arm in arms}
  for arm in arms:  # The first call of an executable is slower.
    parts.timed(programs[arm.name], arm.engine.weights, groups[0].prefill)
  for repeat, g in blocks:
    group, turn = groups[g], (repeat + g) % len(arms)
    for arm in (*arms[turn:], *arms[:turn]):
      call = functools.partial(programs[arm.name], arm.engine.weights)
      full = plan_lib.capped(arm, group.full)
      took, output = parts.timed(call, full)
      total[arm.name][repeat, g] = took
      if repeat == 0:
        outputs[arm.name].append(hosts.fetch(output))
        prefill[arm.name].append([])
      # Its own, for prompts and sources differ, and now, for machines do too.
      found, least = prefill[arm.name][g], repeat + 1 if g else _FILLS
      while len(found) < _FILLS and (
        len(found) < least or sum(found) < _SHARE * took
      ):
        found.append(parts.timed(call, group.prefill)[0])
  out = {}
  groups = groups[: len(outputs[arms[0].name])]
  prompts = len({item.id for group in groups for item in group.items})
  for arm in arms:
    seconds = total[arm.name]
    total_RG = np.full((1 + max(r for r, _ in seconds), len(groups)), np.nan)
    for at, x in seconds.items():
      total_RG[at] = x
    fills = prefill[arm.name]
    fastest_G = np.array([min(x) for x in fills])
    # Of batches whose prefill was timed more than once.
    usual = [np.median(x) / min(x) for x in fills if len(x) > 1]
    noise_G = (np.mean(usual) - 1) * fastest_G
    out[arm.name] = Runs(
      outputs[arm.name], total_RG, fastest_G, noise_G, prompts
    )
  return out


def tok_s(runs: Runs) -> float | None:
  """Tokens per second of decoding; None where that is too short to measure."""
  seconds = _seconds(runs, whole=False)
  return None if seconds is None else float(runs.tokens_G.sum() / seconds.sum())


def improvements(
  runs: Mapping[str, Runs], *, whole: bool = False, level: float = 0.95
) -> dict[str, intervals.Interval]:
  """By arm, speed over the first arm's; the intervals hold all at once.

  Fewer than intervals.FEWEST prompts, or one batch, give no intervals: prompts
  are the sample, and repeats of one batch do not tell how others would do.

  runs: of the same batches. whole: of requests with the prefill of target and
  draft; else of decoding alone. level: how often all intervals hold.
  """
  plain, *_ = runs
  seconds = {name: _seconds(x, whole) for name, x in runs.items()}
  known = {name: x for name, x in seconds.items() if x is not None}
  out = dict.fromkeys(runs, intervals.Interval())
  if plain not in known:
    return out
  tokens = [runs[name].tokens_G for name in known]
  # Copies that fill a batch are no further prompts.
  rows = sum(x.lengths_B.size for x in runs[plain].outputs)
  prompts = min(rows, runs[plain].prompts)
  found = intervals.speedups(tokens, list(known.values()), level, prompts)
  out[plain] = intervals.Interval(1.0, 1.0, 1.0)
  return out | dict(zip(list(known)[1:], found, strict=True))


def _seconds(runs: Runs, whole: bool) -> np.ndarray | None:
  """Seconds by batch; None where they are fewer than the prefill's vary by."""
  if whole:
    return runs.seconds_G
  # The fastest prefill: a slow one would make decoding look fast.
  decoding_G = runs.seconds_G - runs.prefill_G
  if decoding_G.sum() <= runs.noise_G.sum():
    return None
  return np.maximum(decoding_G, 1e-9)


def first_token(runs: Runs) -> float:
  """Seconds to the first token: the prefill and a mean window; a median."""
  calls_G = [max(metrics.windows(x.info).sum(), 1) for x in runs.outputs]
  windows_G = (runs.seconds_G - runs.prefill_G) / calls_G
  return float(np.median(runs.prefill_G + windows_G))


# --- the ceiling -------------------------------------------------------------


def ceiling(arms: Sequence[plan_lib.Arm], plan: plan_lib.Plan):
  """(Ceiling of plain decoding, the read to repeat)."""
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
  """Programs that read `size` bytes: x_1K @ w_KN, and a sum.

  size: from 32 MB to 256 MB on CPU, else to 1 GB; what is beyond is cut.
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
  """GB/s of one device by program, medians over calls; their largest as
  'sustained', and the best single call as 'best'."""
  found = {name: machine.repeated(read) for name, read in programs.items()}
  sustained = {name: statistics.median(x) for name, x in found.items()}
  best = max(map(max, found.values()))
  return sustained | {'sustained': max(sustained.values()), 'best': best}


def reading(blocks: Iterable, read: machine.Read, gb_s: list[float]):
  """The blocks; before each the GB/s of the fastest of _READS joins the list.

  The memory of a shared machine is not as fast a minute later.
  """
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
