"""Cells of papers beside ours, and the rule that says what became of them."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments import page, plots
from specdec_jax.bench import intervals

RULE = (
  'reproduced: our 95 % interval meets the numbers that round to what the '
  'paper prints. same direction: it does not, but all of our interval is on '
  "the paper's side of what is named there. not: neither. no interval: one "
  'request.'
)
OUTCOMES = 'reproduced', 'same direction', 'not', 'no interval'


class Claim(NamedTuple):
  """A number that a paper prints, and ours.

  cell, prints: of the paper, and what it prints. place: our row and draft.
  low, high: the numbers that round to what is printed; two that are far apart
    where a paper gives a range.
  ours: with its 95 % interval.
  form: of a number, for str.format.
  against, sign, apart: what a direction is judged against, in words; the
    paper's side of it, -1 or 1; ours minus it. A sign of 0: no direction.
  why: what our cells say of a difference.
  """

  cell: str
  prints: str
  place: str
  low: float
  high: float
  ours: intervals.Interval
  form: str = '{:.2f}'
  against: str = ''
  sign: int = 0
  apart: intervals.Interval = intervals.Interval()
  why: str = ''


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


def counted(every: Sequence[Claim]) -> str:
  """2 reproduced, 1 same direction, 0 not."""
  found = [outcome(x) for x in every]
  counts = {name: found.count(name) for name in OUTCOMES}
  if not counts['no interval']:
    del counts['no interval']
  return ', '.join(f'{n} {name}' for name, n in counts.items())


def lines(every: Sequence[Claim]) -> list[str]:
  """The table of claims, below its rule; none of no claims."""
  if not every:
    return []
  head = ['the paper', 'prints', 'ours', '', 'outcome', 'why']
  rows = [
    [x.cell, x.prints, x.place, _ours(x), outcome(x), _why(x)] for x in every
  ]
  return [f'{RULE} Here: {counted(every)}.', '', *page.table(head, rows)]


def value(x: Claim) -> str:
  """Ours, without its interval."""
  return 'too short' if x.ours.value is None else x.form.format(x.ours.value)


def _ours(x: Claim) -> str:
  return value(x) if x.ours.value is None else page.interval(x.ours, x.form)


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


def figure(every: Sequence[Claim]) -> bytes:
  """A PNG: rings are the paper's numbers, dots ours with their intervals."""

  def paint(axes: plots.Axes) -> None:
    ys = range(len(every))
    plots.rows(axes, [f'{x.cell}: {x.place}' for x in every])
    for y, x in zip(ys, every, strict=True):
      axes.plot([x.low, x.high], [y, y], color=plots.PALE, linewidth=4)
      if x.ours.low is not None and x.ours.high is not None:
        axes.plot([x.ours.low, x.ours.high], [y, y], color='0.0', linewidth=1)
    middle = [(x.low + x.high) / 2 for x in every]
    mine = [float('nan') if (v := x.ours.value) is None else v for x in every]
    plots.points(axes, middle, ys, theirs=True, mark='o')
    plots.points(axes, mine, ys, theirs=False, mark='o')
    plots.label(axes, 'rings: the paper; dots: ours with 95 % intervals', '')

  return plots.png(paint, size=(7.5, 0.6 + 0.26 * len(every)))
