"""The figure of the experiment: measured against predicted improvements."""

from collections.abc import Sequence

from experiments import plots
from experiments.prediction import cells as cells_lib


def figure(cells: Sequence[cells_lib.Cell]) -> bytes:
  """A PNG: every method with its 90 % interval, its categories as pale dots."""
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
          xerr=_spread(found),
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


def _spread(cells: Sequence[cells_lib.Cell]) -> list[list[float]]:
  """What the intervals reach below and above the predictions; 0 without one."""
  low = [x.predicted - (x.predicted if x.low is None else x.low) for x in cells]
  high = [
    (x.predicted if x.high is None else x.high) - x.predicted for x in cells
  ]
  return [low, high]
