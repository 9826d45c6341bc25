"""Figures in one plain style: colours that also differ in grey, named curves.

Needs matplotlib (the extra `plots`). Shows nothing, changes nothing global.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib import axes as axes_lib
from matplotlib import figure

from specdec_jax.bench.intervals import Interval

Axes = axes_lib.Axes

STYLE: dict[Any, Any] = {
  'font.family': 'DejaVu Sans',  # comes with matplotlib: the same everywhere
  'font.size': 9,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.linewidth': 0.6,
  'axes.titlesize': 9,
  'axes.titlelocation': 'left',
  'lines.linewidth': 1.3,
  'lines.markersize': 5,
  'xtick.major.width': 0.6,
  'ytick.major.width': 0.6,
}
DASHES = ('-', '--', '-.', (0, (1, 1.2)), (0, (6, 1, 1, 1, 1, 1)))
MARKS = ('o', 's', '^', 'D', 'v')
# Okabe and Ito's: told apart by colour-blind readers too.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00')
PALE = '0.8'  # intervals and reference lines


def png(
  paint: Callable[[Axes], None], *, size: tuple[float, float] = (6.4, 4.0)
) -> bytes:
  """Returns a PNG with what paint(axes) draws; size in inches of 160 pixels."""
  with matplotlib.rc_context(STYLE):
    page = figure.Figure(figsize=size, dpi=160, layout='constrained')
    paint(page.subplots())
    out = io.BytesIO()
    page.savefig(out, format='png', metadata={'Software': None})
  return out.getvalue()


def label(axes: Axes, x: str, y: str, title: str = '') -> None:
  """Names the axes; the title says what is seen, not what is drawn."""
  axes.set(xlabel=x, ylabel=y, title=title)


def curve(
  axes: Axes,
  xs: Sequence[float],
  ys: Sequence[float],
  name: str,
  i: int,
  *,
  left: bool = False,
  **changes: Any,
) -> None:
  """Draws the i-th curve in its own colour, dash and mark, and names it.

  left: the name stands before the curve's first point, not after its last.
  changes: for matplotlib's Axes.plot.
  """
  look: dict[str, Any] = dict(
    linestyle=DASHES[i % len(DASHES)],
    color=COLOURS[i % len(COLOURS)],
    marker=MARKS[i % len(MARKS)],
    markevery=max(1, len(xs) // 8),
    markersize=4,
  )
  (drawn,) = axes.plot(xs, ys, **look | changes)
  at = 0 if left else -1
  axes.annotate(
    name,
    (xs[at], ys[at]),
    xytext=(-6 if left else 6, 0),
    textcoords='offset points',
    ha='right' if left else 'left',
    va='center',
    color=drawn.get_color(),
    annotation_clip=False,
  )


def whiskers(
  axes: Axes, found: Sequence[Interval], name: str, i: int, **changes: Any
) -> None:
  """Draws a point a row, with its interval; changes: for Axes.errorbar."""
  ends = [
    (x.value - x.low, x.high - x.value) if x.low is not None else (0, 0)
    for x in found
  ]
  look: dict[str, Any] = dict(fmt=MARKS[i], color=COLOURS[i], linewidth=0.9)
  axes.errorbar(
    [x.value for x in found],
    range(len(found)),
    xerr=np.transpose(ends),
    label=name,
    **look | changes,
  )


def level(axes: Axes, y: float) -> None:
  """Draws a thin line across at a value to compare with."""
  axes.axhline(y, color=PALE, linewidth=0.8, zorder=0)


def rows(axes: Axes, names: Sequence[str]) -> None:
  """Names the rows in a chart of points, the first one on top."""
  axes.set_yticks(range(len(names)), names)
  axes.set_ylim(len(names) - 0.5, -0.5)
  axes.tick_params(axis='y', length=0)
  axes.spines['left'].set_visible(False)
  axes.grid(axis='y', color='0.93', linewidth=0.6)
  axes.set_axisbelow(True)
