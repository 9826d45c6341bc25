"""Fits a benchmark into its minutes; the config's settings are upper bounds.

Plans once, when the parts are timed and everything is compiled: how long an
answer may be, and how many calibration prompts run; the others are judged. Half
of the time is for test prompts. If the fewest do not fit, leaves out the
slowest arms; if not all fit, those that cannot win by the calibration prompts.
Then test prompts run until the time is over.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from specdec_jax import hosts, printing, program
from specdec_jax.bench import intervals, prompts, records
from specdec_jax.bench import plan as plan_lib

# Shares of the time for timing the parts, for the calibration prompts, and kept
# for the test prompts: half for timing them, the rest for alpha and the audit.
_PARTS, _PROMPTS, _TESTS = 0.1, 0.25, 0.6
_SHORTEST = 8  # tokens of an answer
# Calibration prompts, where answers can be shorter for more: one of every kind
# of the built-in ones.
_FEWEST = 7
WINDOWS = 64  # of a sample when the parts are timed


class Clock(NamedTuple):
  """seconds: for the whole process, with its start and compilation."""

  seconds: float = math.inf

  def left(self) -> float:
    return self.seconds - hosts.from_first(program.elapsed)

  def later(self, seconds: float) -> 'Clock':
    return Clock(self.seconds + seconds)

  def share(self, part: float) -> 'Clock':
    """Returns a clock that ends when this share of the time left is spent."""
    gone = hosts.from_first(program.elapsed)
    return Clock(gone + part * (self.seconds - gone))

  @property
  def limited(self) -> bool:
    return math.isfinite(self.seconds)


UNLIMITED = Clock()


def clock(minutes: float) -> Clock:
  """Reads the flag --minutes; 0 is no limit."""
  if not 0 <= minutes < math.inf:
    raise ValueError(f'minutes={minutes}: must be 0 (no limit) or more')
  return Clock(60 * minutes if minutes else math.inf)


class Speed(NamedTuple):
  """A batch's speed as far as it is known, in seconds.

  step: of plain decoding; prefill: its prompts; compile: its programs.
  drafters: how many; gammas of one share programs and prefills.
  factors: by method, a token's time over plain decoding's.
  read: drafters for whose alpha texts are read again at the end.
  fills: what a prompt's prefills take, in the target's: one for each set of
    features, half a one for each drafter with a model.
  """

  step: float
  prefill: float
  compile: float
  drafters: int
  factors: dict[str, float]
  read: int
  fills: float

  def calibration(self, tokens: int) -> float:
    """Estimates a batch of calibration prompts in all methods; 0 if there are
    none."""
    spent = tokens * self.step * sum(self.factors.values())
    return spent + self.prefill * self.fills * bool(self.factors)

  def test(self, tokens: int) -> float:
    """Estimates a batch of test prompts in all arms, prefill and alpha too."""
    decoding = 1.15 * tokens * self.step * (1 + sum(self.factors.values()))
    return decoding + self.prefill * self.fills + self.alpha(tokens)

  def alpha(self, tokens: int) -> float:
    """Estimates how long target and draft read a batch's texts again."""
    return self.read * (1.5 * self.prefill + tokens * self.step / 3)

  def compiling(self) -> float:
    """Estimates all compilation after plain decoding's."""
    return self.compile * 7 * self.drafters

  def closing(self) -> float:
    """Estimates the verdict, the audit and compiling what measures alpha."""
    return 3 + 0.75 * self.compile * self.drafters

  def least(self, plan: plan_lib.Plan) -> float:
    """Estimates the fewest calibration and test prompts, answered shortly."""
    tokens = min(_SHORTEST, plan.max_new_tokens)
    known = -(-len(plan.calibration) // plan.bench.batch_size)
    spent = min(known, records.FEWEST) * self.calibration(tokens)
    return spent + min(plan.batches, intervals.FEWEST) * self.test(tokens)

  def only(self, names: Sequence[str], drafters: int) -> 'Speed':
    """Returns that of these methods alone, of so many drafters."""
    factors = {name: self.factors[name] for name in names}
    read = min(self.read, drafters)
    return self._replace(factors=factors, drafters=drafters, read=read)


def check(plan: plan_lib.Plan, speed: Speed, clock: Clock) -> None:
  """Raises ValueError, before all methods are compiled, if the clock has too
  little time for the fewest prompts with one method."""
  if not clock.limited:
    return

  def minutes(speed: Speed) -> float:
    least = speed.least(plan) + speed.compiling() + speed.closing()
    # Compiling is guessed on the safe side.
    over = least - clock.left() - _PARTS * clock.seconds
    return (clock.seconds + over / (1 - _PARTS)) / 60

  first = [*speed.factors][:1]
  one = minutes(speed.only(first, len(first)))
  if 60 * one > clock.seconds:
    raise ValueError(
      f'minutes={clock.seconds / 60:g}: a few short answers take some '
      f'{one:.1f} with one of decode.methods and decode.gammas, '
      f'{minutes(speed):.1f} with all, with loading and compiling; give more'
    )


def afford(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  speed: Speed,
  clock: Clock,
) -> tuple[Speed, dict[str, str]]:
  """Leaves out the slowest arms, all but one, until the fewest prompts fit;
  returns (Speed of the others, why by arm)."""
  out: dict[str, str] = {}
  while len(speed.factors) > 1 and speed.least(plan) > clock.left():
    slowest = max(speed.factors, key=speed.factors.__getitem__)
    out[slowest] = 'no time for it'
    left = [name for name in speed.factors if name != slowest]
    speed = speed.only(left, len({x.drafter for x in arms if x.name in left}))
  return speed, out


def windows(speed: Speed, widths: int, clock: Clock) -> tuple[int, int]:
  """Returns (windows in a sample, repeats) for timing the parts."""
  # A pass of every width, idle ones, and drafting; the warm-up is a repeat.
  once = speed.step * 1.2 * (widths + 1 + len(speed.factors))
  count = min(WINDOWS, max(4, _PARTS * clock.seconds / 4 / once))
  return int(count), 3 if clock.limited else 5


def fit(plan: plan_lib.Plan, speed: Speed, clock: Clock) -> plan_lib.Plan:
  """Cuts calibration prompts and new tokens to the time that is left.

  Halves answers until seven calibration prompts leave test prompts their share
  of all time, and enough for six batches, as intervals need. The first few
  prompts of either kind cover many categories.
  """
  if not clock.limited:
    return plan
  seconds, rows = clock.left(), plan.bench.batch_size
  batches = -(-len(plan.calibration) // rows)
  tokens = plan.max_new_tokens
  while True:
    each = speed.calibration(tokens)
    least = min(plan.batches, intervals.FEWEST) * speed.test(tokens)
    room = seconds - max(least, _TESTS * clock.seconds)
    count = int(min(room, _PROMPTS * seconds) / each) if each else batches
    shortest = tokens < 2 * _SHORTEST
    count = min(batches, max(records.FEWEST if shortest else _FEWEST, count))
    if shortest or count * each <= room:
      break
    tokens //= 2
  known = spread(plan.calibration)
  cut = count * rows
  test = (*spread(plan.test), *known[cut:])
  return plan._replace(
    calibration=known[:cut], test=test, max_new_tokens=tokens
  )


def spread(items: Sequence) -> tuple:
  """Orders items so that the first few cover many categories."""
  turns = itertools.zip_longest(*prompts.by_category(items))
  return tuple(x for turn in turns for x in turn if x is not None)


def expected(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  speed: Speed,
  gains: Mapping[str, np.ndarray],
  clock: Clock,
) -> tuple[plan_lib.Plan, float | None]:
  """Returns the plan with the test prompts that will fit, and half the 95 %
  interval to expect, as a share of the improvement.

  gains: predicted improvement by arm, on each calibration batch.
  """
  known = [x for x in arms if x.name in gains]
  if clock.limited:
    factors = {x.name: 1 / float(np.mean(gains[x.name])) for x in known}
    drafters = len({x.drafter for x in known})
    speed = speed._replace(factors=factors or speed.factors, drafters=drafters)
    blocks = max(int(clock.left() / speed.test(plan.max_new_tokens)), 1)
    batches = min(blocks, plan.batches)
    repeats = min(plan.bench.repeats, blocks // batches)
    plan = plan_lib.cut(plan, batches, repeats)
  rows = plan.bench.batch_size
  each = [gains[x.name] for x in known]
  spreads = [np.std(np.log(x), ddof=1) for x in each if len(x) > 1]
  if len(plan.test) < intervals.FEWEST or plan.batches < 2 or not spreads:
    return plan, None
  kinds = [x.category for x in plan.test] if rows == 1 else [''] * plan.batches
  # All hold at once; methods are taken as independent.
  units = intervals.units(kinds).shape[1]
  t = stats.t.ppf(1 - 0.025 / len(known), units - 1)
  return plan, float(t * max(spreads) / units**0.5)


def left_out(
  arms: Sequence[plan_lib.Arm], predicted: Mapping[str, records.Prediction]
) -> dict[str, str]:
  """Says by arm why it cannot win: its predicted 90 % interval is below plain
  decoding, or below what its drafter's best gamma is predicted. Where that is
  true for all, the best arm stays."""
  known = [x for x in arms if x.name in predicted]
  value = lambda arm: predicted[arm.name].improvement
  best = {arm.drafter: arm for arm in sorted(known, key=value)}
  out = {}
  for arm in known:
    x, other = predicted[arm.name], best[arm.drafter]
    if x.high is None or x.high >= max(1, value(other)):
      continue
    out[arm.name] = f'{x.low:.2f}x to {x.high:.2f}x'
    if x.high >= 1:
      out[arm.name] += f', {other.name} {value(other):.2f}x'
  if out and len(out) == len(predicted):
    out.pop(max(best.values(), key=value).name, None)
  return out


def blocks(
  groups: int, repeats: int, clock: Clock, after: float = 0.0
) -> Iterator[tuple[int, int]]:
  """Yields (repeat, group) for every block that ends in time, at least one.
  after: seconds that each group takes once all are run."""
  jobs = [(r, g) for r in range(repeats) for g in range(groups)]
  start = clock.left()
  for done, job in enumerate(printing.track(jobs, 'timing')):
    left = clock.left()
    # Less is left than a block took on average.
    read = min(done + 1, groups, records.READ)
    if done and left - after * read < (start - left) / done:
      return
    yield job
