"""How much of a benchmark fits into its minutes, planned as it gets known.

First after one timed step of plain decoding, again when everything is compiled,
and once more when the acceptance on other prompts tells how fast each method
is. The settings of the config are upper bounds.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from specdec_jax import hosts, program
from specdec_jax.bench import intervals, timing
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import parts

# Shares of the time for calibration and for the prompts to predict from.
_CALIBRATION, _OTHERS = 0.1, 0.25
# Tokens of an answer below which fewer prompts are better than shorter ones,
# and below which nothing is measured.
_SHORT, _SHORTEST = 32, 8
_ENOUGH = intervals.FEWEST  # batches of judged prompts


class Clock(NamedTuple):
  """seconds: of the whole process, its start and compilation included."""

  seconds: float = math.inf

  def left(self) -> float:
    return self.seconds - hosts.from_first(program.elapsed)

  def share(self, part: float) -> 'Clock':
    """The clock that ends when this share of the time left is spent."""
    return Clock(
      self.seconds - (1 - part) * self.left() if self.limited else math.inf
    )

  @property
  def limited(self) -> bool:
    return math.isfinite(self.seconds)


UNLIMITED = Clock()


def clock(minutes: float) -> Clock:
  """Of the flag --minutes; 0 is no limit."""
  if not 0 <= minutes < math.inf:
    raise ValueError(f'minutes={minutes}: must be 0 (no limit) or more')
  return Clock(60 * minutes if minutes else math.inf)


class Speed(NamedTuple):
  """The speed of a batch as far as it is known, in seconds.

  step: of plain decoding; prefill: of its prompts; compile: of its program.
  drafters: how many; those that differ in gamma share what is compiled.
  factors: by method, time of a token over plain decoding's.
  """

  step: float
  prefill: float
  compile: float
  drafters: int
  factors: dict[str, float]

  def others(self, tokens: int) -> float:
    """Seconds of a batch of other prompts in all methods."""
    return sum(
      1.5 * self.prefill + tokens * self.step * x for x in self.factors.values()
    )

  def judged(self, tokens: int) -> float:
    """Seconds of a judged batch in all arms, and of its prefill alone."""
    decoding = tokens * self.step * (1 + sum(self.factors.values()))
    return 1.15 * decoding + self.prefill * (2 + 3 * len(self.factors))

  def compiling(self) -> float:
    """Seconds of all that is compiled after plain decoding."""
    return self.compile * 7 * self.drafters

  def closing(self) -> float:
    """Seconds of teacher-forced acceptance, the audit and the verdict."""
    return 3 + 1.5 * self.compile * self.drafters


def fit(
  plan: plan_lib.Plan, speed: Speed, seconds: float
) -> plan_lib.Plan | None:
  """The plan cut to these seconds; None if not one batch fits.

  Prefers answers of the full length, then many prompts, then repeats.
  """
  if not math.isfinite(seconds):
    return plan
  rows = plan.bench.batch_size
  batches = lambda items: -(-len(items) // rows)
  others, judged = batches(plan.calibration), batches(plan.test)
  halves = [plan.max_new_tokens]
  while halves[-1] >= 2 * _SHORTEST:
    halves.append(halves[-1] // 2)
  for enough, least in (
    *((_ENOUGH, _SHORT), (_ENOUGH, _SHORT // 2)),
    *((2, _SHORT // 2), (1, 1)),
  ):
    for tokens in halves:
      n = min(others, max(2, int(_OTHERS * seconds / speed.others(tokens))))
      rest = seconds - n * speed.others(tokens)
      m = min(judged, int(rest / speed.judged(tokens)))
      if m >= min(enough, judged) and tokens >= min(least, halves[0]):
        repeats = int(rest / speed.judged(tokens) / m)
        return _cut(plan, n * rows, m * rows, tokens, repeats)
  return None


def _cut(plan, others: int, judged: int, tokens: int, repeats: int):
  bench = dataclasses.replace(
    plan.bench, repeats=min(plan.bench.repeats, max(repeats, 1))
  )
  return plan._replace(
    calibration=spread(plan.calibration)[:others],
    test=spread(plan.test)[:judged],
    max_new_tokens=tokens,
    bench=bench,
  )


def spread(items: Sequence) -> tuple:
  """The items in an order in which the first few are of many categories."""
  seen: dict[str, int] = {}
  turns = []
  for item in items:
    turns.append(seen.get(item.category, 0))
    seen[item.category] = turns[-1] + 1
  order = sorted(range(len(items)), key=lambda i: turns[i])
  return tuple(items[i] for i in order)


# --- the three plans ---------------------------------------------------------


def first_step(arms: Sequence[plan_lib.Arm], plan: plan_lib.Plan, track):
  """Compiles plain decoding and times it; (Speed, programs by arm)."""
  (first, *_) = plan_lib.groups(arms, plan, plan.test[:1])
  programs = timing.compile_arms(arms[:1], first.full, track)
  program, seconds = programs[arms[0].name]
  weights, host = arms[0].engine.weights, first.host
  few_B = np.minimum(host.lengths_B + 4, host.limit_B)
  few = first.full._replace(limit_B=few_B)
  parts.timed(program, weights, first.prefill)
  prefill, _ = parts.timed(program, weights, first.prefill)
  total, out = parts.timed(program, weights, few)
  step = max(total - prefill, 1e-6) / max(int(out.info.calls), 1)
  factors = {arm.name: 1.5 for arm in arms[1:]}
  drafters = len({arm.drafter for arm in arms[1:]})
  return Speed(step, prefill, seconds, drafters, factors), programs


def first_fit(plan: plan_lib.Plan, speed: Speed, clock: Clock) -> plan_lib.Plan:
  """The plan before anything but plain decoding is compiled.

  Raises:
    ValueError: not one prompt fits.
  """
  left = clock.left() - speed.compiling() - speed.closing()
  found = fit(plan, speed, left * (1 - _CALIBRATION))
  # Compiling is guessed on the safe side.
  found = found or fit(plan, speed, left + clock.seconds * _CALIBRATION)
  if found is None:
    tokens = min(_SHORTEST, plan.max_new_tokens)
    least = min(2, len(plan.calibration)) * speed.others(tokens)
    least = (least + speed.judged(tokens)) / (1 - _CALIBRATION)
    seconds = clock.seconds - left + least
    raise ValueError(
      f'minutes={clock.seconds / 60:g}: one short answer in every method takes '
      f'some {seconds / 60:.1f} with loading and compiling; give more, or '
      'fewer decode.methods and decode.gammas'
    )
  return found


def calibration(speed: Speed, widths: int, clock: Clock) -> tuple[int, int]:
  """(windows in a sample, repeats) of the calibration."""
  if not clock.limited:
    return 64, 5
  # A pass of every width, idle ones, and drafting; the warm-up is a repeat.
  once = speed.step * 1.2 * (widths + 1 + len(speed.factors))
  windows = _CALIBRATION * clock.seconds / 4 / once
  return min(64, max(4, int(windows))), 3


def width(log_gains: Any, prompts: int, arms: int) -> float | None:
  """Half of the 95 % interval to expect, as a share of the improvement.

  Args:
    log_gains: logarithm of the improvement on each of some other prompts.
    prompts: that are judged.
    arms: whose intervals are to hold at once; taken as independent.
  """
  if len(log_gains) < 2 or prompts < intervals.FEWEST:
    return None
  t = stats.t.ppf(1 - 0.025 / arms, prompts - 1)
  return float(t * np.std(log_gains, ddof=1) / prompts**0.5)


def last_fit(
  plan: plan_lib.Plan, speed: Speed, gains: list[dict[str, float]], clock: Clock
) -> tuple[plan_lib.Plan, float | None]:
  """The plan at the speed of each method, and the width of its intervals.

  gains: predicted improvement by method, on each batch of other prompts.
  """
  if not gains:
    return plan, None
  by = {name: np.array([x[name] for x in gains]) for name in gains[0]}
  factors = {name: 1 / float(np.mean(x)) for name, x in by.items()}
  left = clock.left() - speed.closing()
  speed = speed._replace(factors=factors)
  fitted = fit(plan._replace(calibration=()), speed, left) or plan
  count = len(fitted.test)
  widths = [width(np.log(x), count, len(by)) for x in by.values()]
  known = [x for x in widths if x is not None]
  return fitted._replace(calibration=plan.calibration), max(known, default=None)


def blocks(
  groups: int, repeats: int, clock: Clock, track: plan_lib.Track
) -> Iterator[tuple[int, int]]:
  """(repeat, group) of every block that can be finished in time, and one."""
  jobs = [(r, g) for r in range(repeats) for g in range(groups)]
  start = clock.left()
  for done, job in enumerate(track(jobs, 'timing')):
    # Less is left than a block took on average.
    if done and clock.left() * (done + 1) < start:
      return
    yield job
