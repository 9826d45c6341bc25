"""Compares predicted and measured improvements, in words and figures."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import page, plots
from specdec_jax.costs import cost

NEAR = 0.03  # of 1: whether to speculate makes no difference there


class Cell(NamedTuple):
  """One method at one gamma on the test prompts.

  pair: models; temperature: sampling's. category: ''; older results have some.
  predicted, low, high (90 % interval): from other prompts than measured.
  """

  pair: str
  temperature: float
  category: str
  drafter: str
  gamma: int
  predicted: float
  low: float | None
  high: float | None
  measured: float


class Summary(NamedTuple):
  """sure: how many have an interval; covered: the share of them whose interval
  holds the measured value.

  choices: sets of cells that differ in gamma only; regret: mean of how much
  faster the best gamma (0 too) is than the predicted one; worst: the largest.
  told: cells that are not near 1; right: share of them predicted on its side.
  """

  sure: int
  covered: float | None
  choices: int
  regret: float | None
  worst: float | None
  told: int
  right: float | None


def of(doc: Mapping[str, Any], pair: str) -> list[Cell]:
  """Lists the cells of a benchmark's document, as its JSON is read."""
  warm = doc['setting']['sampling']['temperature']
  return [
    Cell(
      *(pair, warm, '', x['drafter'], x['gamma']),
      *(told['improvement'], told['low'], told['high']),
      x['improvement']['value'],
    )
    for x in doc['rows']
    if (told := x.get('predicted'))
  ]


def summary(cells: Sequence[Cell]) -> Summary:
  sure = [x for x in cells if x.low is not None]
  told = [x for x in cells if abs(x.measured - 1) > NEAR]
  sets: dict[Any, list[Cell]] = {}
  for x in cells:
    key = x.pair, x.temperature, x.category, x.drafter
    sets.setdefault(key, []).append(x)
  regrets = [_regret(found) for found in sets.values()]
  mean = lambda values: statistics.mean(values) if values else None
  return Summary(
    len(sure),
    mean([x.low <= x.measured <= x.high for x in sure]),
    len(regrets),
    mean(regrets),
    max(regrets, default=None),
    len(told),
    mean([(x.predicted > 1) == (x.measured > 1) for x in told]),
  )


def _regret(cells: Sequence[Cell]) -> float:
  """Computes how much faster the best gamma is than the predicted one."""
  chosen = cost.best({x.gamma: x.predicted for x in cells})
  measured = {0: 1.0} | {x.gamma: x.measured for x in cells}
  return max(measured.values()) / measured[chosen] - 1


def markdown(cells: Sequence[Cell], caption: str) -> str:
  """Writes the summaries by drafter and temperature, then all cells."""
  groups = {'all': cells}
  for x in cells:
    groups.setdefault(f'{x.drafter}, T = {x.temperature:g}', []).append(x)
  rows = [(name, summary(found)) for name, found in groups.items()]
  whole = [x for x in cells if not x.category]
  return page.text(
    page.Part(caption, SUMMARIES, rows),
    page.Part('All categories together:', CELLS, whole),
  )


SUMMARIES = (
  'cells=0, 90 % intervals hold=1.covered:.1%, of=1.sure, regret=1.regret:.1%, '
  'worst=1.worst:.1%, of=1.choices, speculate or not=1.right:.1%, of=1.told'
)
CELLS = (
  'drafter, gamma, T=temperature:g, predicted:.2fx, from=low:.2f, to=high:.2f, '
  'measured:.2fx'
)


def figure(cells: Sequence[Cell]) -> bytes:
  """Draws every method with its 90 % interval as a PNG, its categories pale."""
  drafters = sorted({x.drafter for x in cells})
  warms = sorted({x.temperature for x in cells})

  def paint(axes: plots.Axes) -> None:
    each = [x for x in cells if x.category]
    pale = dict(color=plots.PALE, markersize=3, linestyle='none', zorder=1)
    if each:
      xs, ys = [x.predicted for x in each], [x.measured for x in each]
      axes.plot(xs, ys, 'o', label='prompts of one category', **pale)
    for i, drafter in enumerate(drafters):
      for warm in warms:
        found = [
          x
          for x in cells
          if (x.drafter, x.temperature, x.category) == (drafter, warm, '')
        ]
        look = dict(color=plots.COLOURS[i], linewidth=0.9, markersize=6)
        hollow = {} if warm == warms[0] else dict(markerfacecolor='white')
        axes.errorbar(
          [x.predicted for x in found],
          [x.measured for x in found],
          # What the intervals reach below and above; nothing without one.
          xerr=[
            [x.predicted - (x.low or x.predicted) for x in found],
            [(x.high or x.predicted) - x.predicted for x in found],
          ],
          fmt=plots.MARKS[i],
          label=f'{drafter}, temperature {warm:g}',
          **look | hollow,
        )
    axes.axline((1, 1), slope=1, color='0.6', linewidth=0.8, zorder=0)
    axes.text(0.84, 0.79, 'measured = predicted', color='0.4')
    axes.set(xlim=(0.7, 2.1), ylim=(0.7, 2.1))
    axes.legend(frameon=False, loc='upper left', fontsize=8)
    plots.label(
      axes,
      'predicted before the run, with its 90 % interval (times plain decoding)',
      'measured (times plain decoding)',
      'Is the predicted speed the measured one?',
    )

  return plots.png(paint, size=(6.4, 5.0))
