"""Cells of papers beside ours, and the rule that says what became of them."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments import page
from specdec_jax.bench import intervals

RULE = (
  'reproduced: our 95 % interval meets the numbers that round to what the '
  'paper prints. same direction: it does not, but all of our interval is on '
  "the paper's side of what is named there. not: neither. no interval: one "
  'request.'
)
OUTCOMES = 'reproduced', 'same direction', 'not', 'no interval'


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
  if x.ours.low <= x.high and x.low <= x.ours.high:
    return 'reproduced'
  low, high = x.apart.low, x.apart.high
  if x.sign and low is not None and high is not None:
    if (low if x.sign > 0 else -high) > 0:
      return 'same direction'
  return 'not'


def counts(every: Sequence[Claim]) -> dict[str, int]:
  """How many have each outcome; 'no interval' only if one has."""
  found = [outcome(x) for x in every]
  return {
    name: found.count(name)
    for name in OUTCOMES
    if name != 'no interval' or name in found
  }


def lines(every: Sequence[Claim]) -> list[str]:
  """What became of the paper's cells, the rule, and a line for each."""
  if not every:
    return ["None of the paper's cells has one of ours.", '']
  told = ', '.join(f'{n} {name}' for name, n in counts(every).items())
  head = ['outcome', 'the paper', 'prints', 'ours', '', 'why']
  rows = [
    [outcome(x), x.cell, x.prints, x.place, page.interval(x.ours, x.form)]
    + [_why(x)]
    for x in every
  ]
  return [f'**{told}.** {RULE}', '', *page.table(head, rows), '']


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
  if x.sign:
    side = 'above' if x.sign > 0 else 'below'
    is_ = 'is' if found == 'same direction' else 'not shown to be'
    told.append(f'{is_} {side} {x.against}')
  return '; '.join(told + [x.why] * bool(x.why))
