"""Papers' cells beside ours, and the rule that says what became of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import ticker

from experiments import papers, plots
from specdec_jax.bench import intervals, tables

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
  """A paper's printed number, and ours."""

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
  why: str = ''  # what our cells say of a difference, in a few words


def speed(
  cell: str, theirs: float, digits: int, place: str, ours: Any, why: str
) -> Claim:
  """Claims a printed speed; ours: an Interval as its JSON is read."""
  x = intervals.Interval(**ours)
  above = intervals.Interval(*(None if y is None else y - 1.0 for y in x))
  ends = papers.printed(theirs, digits)
  look: dict[str, Any] = dict(form='{:.2f}x', none=1.0, against='1x', sign=1)
  prints = f'{theirs:.{digits}f}x'
  return Claim(cell, prints, place, *ends, x, apart=above, why=why, **look)


def outcome(x: Claim) -> str:
  """Returns one of OUTCOMES, by RULE."""
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
  """Counts outcomes, speed apart from quality; 'no interval' only if any."""
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


def told(every: Sequence[Claim]) -> str:
  """Says how many of the paper's cells have each outcome."""
  if not every:
    return "None of the paper's cells has one of ours."
  found = '; '.join(
    f'{of}: ' + ', '.join(f'{n} {name}' for name, n in own.items())
    for of, own in counts(every).items()
  )
  return f'**Of {found}.**'


def lines(every: Sequence[Claim]) -> list[str]:
  """Writes a line for each of the paper's cells, and the rule of outcomes."""
  if not every:
    return []
  head = ['outcome', 'the paper', 'prints', 'ours', 'row, draft', 'reason']
  rows = [
    [outcome(x), x.cell, x.prints, tables.interval(x.ours, x.form), x.place]
    + [reason(x)]
    for x in every
  ]
  return [*tables.grid(head, rows), '', RULE]


def reason(x: Claim) -> str:
  """Says in a few words why ours differs, or on which side it is."""
  found, side = outcome(x), 'above' if x.sign > 0 else 'below'
  if found in ('reproduced', 'no interval'):
    return ''
  if found == 'cannot tell':
    return 'meets it, but is too wide'
  if x.why or x.sign:
    near = 'not shown to be ' * (found == 'not')
    return x.why or f'{near}{side} {x.against}'
  return 'above it' if x.ours.low > x.high else 'below it'


def figure(every: Sequence[Claim]) -> bytes:
  """Draws theirs beside ours as a PNG: for the first thing, such as speed."""
  some = [x for x in every if x.of == every[0].of]
  share, few = '%' in some[0].form, len(some) < 10

  def paint(axes: plots.Axes) -> None:
    between = '\n' if few else ': '
    plots.rows(axes, [f'{x.cell}{between}{x.place}' for x in some])
    theirs = [
      intervals.Interval((x.low + x.high) / 2, x.low, x.high) for x in some
    ]
    plots.whiskers(axes, [x.ours for x in some], 'ours, 95 %', 0)
    plots.whiskers(axes, theirs, 'the paper', 1, markerfacecolor='none')
    axes.axvline(some[0].none, color=plots.PALE, linewidth=0.8, zorder=0)
    if share:
      axes.xaxis.set_major_formatter(ticker.PercentFormatter(1, 0))
    axes.legend(
      frameon=False, loc='lower right', bbox_to_anchor=(1, 1), ncols=2
    )
    plots.label(axes, some[0].of + ' gained' * share, '')

  return plots.png(paint, size=(6.4, 1.2 + (0.2 + 0.2 * few) * len(some)))
