"""Clocks of full generations, and improvements made of them.

A generation is one executable call. A block is one batch of prompts in one
repeat: all arms run in turn, so that drift of the machine cancels.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import decode, sharding
from specdec_jax.bench import metrics
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import parts


class Runs(NamedTuple):
  """Runs of an arm on batches G of prompts.

  outputs: one for each batch; runs of a batch emit the same.
  total_RG: seconds of a generation, prefill included; NaN where not run.
  prefill_G: seconds of the prefill at its fastest.
  noise_G: by which the prefill usually takes longer.
  compile_seconds: of the executable.
  """

  outputs: list[decode.Output]
  total_RG: np.ndarray
  prefill_G: np.ndarray
  noise_G: np.ndarray
  compile_seconds: float

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
  prefill: dict[Any, list[float]] = {}
  outputs: dict[str, list] = {arm.name: [] for arm in arms}
  for arm in arms:  # The first call of an executable is slower.
    parts.timed(programs[arm.name][0], arm.engine.weights, groups[0].none)
  for repeat, g in blocks:
    group, turn = groups[g], (repeat + g) % len(arms)
    for arm in (*arms[turn:], *arms[:turn]):
      call = functools.partial(programs[arm.name][0], arm.engine.weights)
      full = plan_lib.capped(arm, group.full)
      total[arm.name][repeat, g], output = parts.timed(call, full)
      # It depends on the number of chunks only, and takes a while.
      found = prefill.setdefault((arm.name, group.chunks), [])
      if len(found) < 3:
        found.append(parts.timed(call, group.none)[0])
      if repeat == 0:
        outputs[arm.name].append(sharding.fetch(output))
  out = {}
  groups = groups[: len(outputs[arms[0].name])]
  for arm in arms:
    seconds = total[arm.name]
    total_RG = np.full((1 + max(r for r, _ in seconds), len(groups)), np.nan)
    for at, x in seconds.items():
      total_RG[at] = x
    fills = [prefill[arm.name, group.chunks] for group in groups]
    fastest_G = np.array([min(x) for x in fills])
    noise_G = np.array([np.median(x) for x in fills]) - fastest_G
    out[arm.name] = Runs(
      outputs[arm.name], total_RG, fastest_G, noise_G, programs[arm.name][1]
    )
  return out


def tok_s(runs: Runs) -> float | None:
  """Tokens per second of decoding, over all batches.

  None where decoding takes no longer than the prefill's time varies: too short
  to measure.
  """
  seconds = _seconds(runs, list(range(len(runs.outputs))), whole=False)
  return None if seconds is None else float(runs.tokens_G.sum() / seconds.sum())


def improvement(
  mine: Runs,
  plain: Runs,
  pick: Sequence[int] | None = None,
  *,
  whole: bool = False,
) -> metrics.Interval:
  """Speed over plain decoding's, over the batches in `pick` (None: all).

  whole: of whole requests, the prefill of target and draft included; else of
    decoding alone.
  """
  chosen = list(range(len(plain.outputs))) if pick is None else list(pick)
  if len(chosen) == 1 and plain.outputs[chosen[0]].lengths_B.size > 1:
    # One batch of several prompts: its repeats are drawn instead.
    mine, plain = (_by_repeat(x, chosen[0]) for x in (mine, plain))
    chosen = list(range(min(len(mine.outputs), len(plain.outputs))))
  seconds_AG = [_seconds(x, chosen, whole) for x in (mine, plain)]
  if any(x is None for x in seconds_AG):
    return metrics.Interval()
  tokens_AG = [x.tokens_G[chosen] for x in (mine, plain)]
  return metrics.speedup(tokens_AG, seconds_AG)


def _by_repeat(runs: Runs, g: int) -> Runs:
  """The repeats of one batch as if they were batches."""
  total_R = runs.total_RG[:, g]
  total_R = total_R[~np.isnan(total_R)]
  each = lambda x: np.repeat(x[g], len(total_R))
  return runs._replace(
    outputs=[runs.outputs[g]] * len(total_R),
    total_RG=total_R[None],
    prefill_G=each(runs.prefill_G),
    noise_G=each(runs.noise_G),
  )


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
