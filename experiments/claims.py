"""Cells of papers beside ours, and the rule that says what became of them."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments import page
from specdec_jax.bench import intervals

RULE = (
  'reproduced: our 95 % interval meets the numbers that round to what the '
  "paper prints, and is narrower than half of the paper's effect (of a speed "
  'what is above 1x). same direction: not so, but all of it is on the '
  "paper's side of what is named there; what a theorem says is not counted. "
  'cannot tell: it meets them, and is wider. not: none of these. no interval: '
  'one request.'
)
OUTCOMES = 'reproduced', 'same direction', 'not', 'cannot tell', 'no interval'


class Claim(NamedTuple):
  """A number that a paper prints, and ours."""

  cell: str  # of the paper
  prints: str  # what stands in it
  place: str  # our row and draft
  # What rounds to what is printed; far apart where a paper gives a range.
  low: float
  high: float
  ours: intervals.Interval
  form: str = '{:.2f}'
  of: str = 'speed'  # what it is a number of; each is counted apart
  none: float = 0.0  # the number of no effect: 1 of a speed
  # What a direction is judged against, in words; the paper's side of it, -1 or
  # 1, or 0 for no direction; ours minus it.
  against: str = ''
  sign: int = 0
  apart: intervals.Interval = intervals.Interval()
  why: str = ''  # what our cells say of a difference


def minus(x: intervals.Interval, value: float) -> intervals.Interval:
  """An interval, shifted."""
  return intervals.Interval(*(None if y is None else y - value for y in x))


def outcome(x: Claim) -> str:
  """One of OUTCOMES, by RULE."""
  if x.ours.low is None or x.ours.high is None:
    return 'no interval'
  meets = x.ours.low <= x.high and x.low <= x.ours.high
  effect = min(abs(end - x.none) for end in (x.low, x.high))
  if meets and x.ours.high - x.ours.low < effect / 2:
    return 'reproduced'
  low, high = x.apart.low, x.apart.high
  if x.sign and low is not None and high is not None:
    if (low if x.sign > 0 else -high) > 0:
      return 'same direction'
  return 'cannot tell' if meets else 'not'


def counts(every: Sequence[Claim]) -> dict[str, dict[str, int]]:
  """Of each thing that claims are of, how many have each outcome.

  'no interval' only if one has.
  """
  found: dict[str, list[str]] = {}
  for x in every:
    found.setdefault(x.of, []).append(outcome(x))
  return {
    of: {
      name: own.count(name)
      for name in OUTCOMES
      if name != 'no interval' or name in own
    }
    for of, own in found.items()
  }


def lines(every: Sequence[Claim]) -> list[str]:
  """What became of the paper's cells, the rule, and a line for each."""
  if not every:
    return ["None of the paper's cells has one of ours.", '']
  told = '; '.join(
    f'{of}: ' + ', '.join(f'{n} {name}' for name, n in own.items())
    for of, own in counts(every).items()
  )
  head = ['outcome', 'the paper', 'prints', 'ours', '', 'why']
  rows = [
    [outcome(x), x.cell, x.prints, x.place, page.interval(x.ours, x.form)]
    + [_why(x)]
    for x in every
  ]
  return [f'**Of {told}.** {RULE}', '', *page.table(head, rows), '']


def _why(x: Claim) -> str:
  """How far away, on which side of what, and what the cells say."""
  found = outcome(x)
  if found in ('reproduced', 'no interval'):
    return ''
  low, high = x.ours.low, x.ours.high
  assert low is not None and high is not None
  away = low - x.high if low > x.high else x.low - high
  far = x.form.replace('+', '').format(away)
  told = [f'{"above" if low > x.high else "below"} by {far} or more']
  if away <= 0:
    told = ['meets it, but is too wide']
  if x.sign:
    side = 'above' if x.sign > 0 else 'below'
    is_ = 'is' if found == 'same direction' else 'not shown to be'
    told.append(f'{is_} {side} {x.against}')
  return '; '.join(told + [x.why] * bool(x.why))
