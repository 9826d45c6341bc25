"""Clocks of full generations, and improvements made of them.

A generation is one executable call. A block is one batch of prompts in one
repeat: all arms run in turn, so that drift of the machine cancels.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax import decode, hosts, metrics
from specdec_jax.bench import intervals
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import parts

# The prefill alone is timed so often for each batch, unless that takes more
# than this share of what it is taken off; then once in each repeat.
_FILLS, _SHARE = 3, 1 / 8


class Runs(NamedTuple):
  """Runs of an arm on batches G of prompts.

  outputs: one for each batch; runs of a batch emit the same.
  total_RG: seconds of a generation, prefill included; NaN where not run.
  prefill_G: seconds of the batch's own prefill at its fastest.
  noise_G: by which the prefill usually takes longer.
  compile_seconds: of the executable.
  prompts: different ones in all batches; None: every row has its own.
  """

  outputs: list[decode.Output]
  total_RG: np.ndarray
  prefill_G: np.ndarray
  noise_G: np.ndarray
  compile_seconds: float
  prompts: int | None = None

  @property
  def seconds_G(self) -> np.ndarray:
    """Seconds of a generation, the mean of its repeats."""
    return np.nanmean(self.total_RG, 0)

  @property
  def tokens_G(self) -> np.ndarray:
    return np.array(
      [
        metrics.summary(metrics.rows(x.info)).emitted_tokens
        for x in self.outputs
      ]
    )


def compile_arms(arms, request: decode.Request, track, description='compiling'):
  """By arm, parts.compiled() of its generate at the request's shapes."""
  engines = {id(arm.engine): arm.engine for arm in arms}
  done = {
    key: parts.compiled(engine.programs.generate, engine.weights, request)
    for key, engine in track(engines.items(), description)
  }
  return {arm.name: done[id(arm.engine)] for arm in arms}


def measure(
  arms: Sequence[plan_lib.Arm],
  groups: Sequence[plan_lib.Group],
  programs,
  blocks: Iterable[tuple[int, int]],
) -> dict[str, Runs]:
  """Times all arms, block by block; each block begins with another arm.

  Args:
    arms: plain decoding and the methods.
    groups: batches of prompts.
    programs: by arm, from compile_arms.
    blocks: (repeat, index of the group), in order; they may end early.

  Returns:
    Runs by arm, of the groups that were run.
  """
  total: dict[str, dict] = {arm.name: {} for arm in arms}
  prefill: dict[str, list[list[float]]] = {arm.name: [] for arm in arms}
  outputs: dict[str, list] = {arm.name: [] for arm in arms}
  for arm in arms:  # The first call of an executable is slower.
    parts.timed(programs[arm.name][0], arm.engine.weights, groups[0].prefill)
  for repeat, g in blocks:
    group, turn = groups[g], (repeat + g) % len(arms)
    for arm in (*arms[turn:], *arms[:turn]):
      call = functools.partial(programs[arm.name][0], arm.engine.weights)
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
    compiling = programs[arm.name][1]
    out[arm.name] = Runs(
      outputs[arm.name], total_RG, fastest_G, noise_G, compiling, prompts
    )
  return out


def tok_s(runs: Runs) -> float | None:
  """Tokens per second of decoding, over all batches.

  None where decoding takes no longer than the prefill's time varies: too short
  to measure.
  """
  seconds = _seconds(runs, list(range(len(runs.outputs))), whole=False)
  return None if seconds is None else float(runs.tokens_G.sum() / seconds.sum())


def improvements(
  runs: Mapping[str, Runs],
  pick: Sequence[int] | None = None,
  *,
  whole: bool = False,
  level: float = 0.95,
) -> dict[str, intervals.Interval]:
  """By arm, speed over the first arm's; the intervals hold all at once.

  Fewer than intervals.FEWEST prompts, or one batch, give no intervals: prompts
  are the sample, and repeats of one batch do not tell how others would do.

  Args:
    runs: by arm, of the same batches; plain decoding first.
    pick: batches; None: all.
    whole: of whole requests, the prefill of target and draft included; else of
      decoding alone.
    level: how often all intervals hold.
  """
  plain, *_ = runs
  count = len(runs[plain].outputs)
  chosen = list(range(count)) if pick is None else list(pick)
  seconds = {name: _seconds(x, chosen, whole) for name, x in runs.items()}
  known = {name: x for name, x in seconds.items() if x is not None}
  out = dict.fromkeys(runs, intervals.Interval())
  if plain not in known:
    return out
  tokens = [runs[name].tokens_G[chosen] for name in known]
  found = intervals.speedups(tokens, list(known.values()), level)
  if _prompts(runs[plain], chosen) < intervals.FEWEST:
    found = [intervals.Interval(x.value) for x in found]
  out[plain] = intervals.Interval(1.0, 1.0, 1.0)
  return out | dict(zip(list(known)[1:], found, strict=True))


def improvement(
  mine: Runs,
  plain: Runs,
  pick: Sequence[int] | None = None,
  *,
  whole: bool = False,
) -> intervals.Interval:
  """improvements of one arm that was chosen before it was measured."""
  return improvements({'plain': plain, 'mine': mine}, pick, whole=whole)['mine']


def _prompts(runs: Runs, chosen: list[int]) -> int:
  """How many different prompts are in these batches, at most."""
  rows = sum(runs.outputs[g].lengths_B.size for g in chosen)
  return rows if runs.prompts is None else min(rows, runs.prompts)


def _seconds(runs: Runs, chosen: list[int], whole: bool) -> np.ndarray | None:
  """Seconds by batch; None if too short to measure."""
  if whole:
    return runs.seconds_G[chosen]
  # The fastest prefill: a slow one would make decoding look fast.
  decoding_G = runs.seconds_G[chosen] - runs.prefill_G[chosen]
  if decoding_G.sum() <= runs.noise_G[chosen].sum():
    return None
  return np.maximum(decoding_G, 1e-9)


def first_token(runs: Runs) -> float:
  """Seconds to the first token: the prefill and a mean window; a median."""
  calls_G = [max(int(x.info.calls), 1) for x in runs.outputs]
  windows_G = (runs.seconds_G - runs.prefill_G) / calls_G
  return float(np.median(runs.prefill_G + windows_G))
