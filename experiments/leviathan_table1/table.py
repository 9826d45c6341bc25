"""Leviathan et al. 2023, table 1: arithmetic and speed, free drafts."""

from experiments import analytic, page
from specdec_jax.analysis import plots
from specdec_jax.bench import cost

# alpha, gamma, OPERATIONS, SPEED, as printed (2 decimals).
PRINT = (
  (0.6, 2, 1.53, 1.96),
  (0.7, 3, 1.58, 2.53),
  (0.8, 2, 1.23, 2.44),
  (0.8, 5, 1.63, 3.69),
  (0.9, 2, 1.11, 2.71),
  (0.9, 10, 1.60, 6.86),
)
C = 0.0  # both of the paper's c and c^


def ours(alpha: float, gamma: int) -> tuple[float, float]:
  """(operations, speed), theorems 3.11 and 3.8."""
  return cost.operations(alpha, gamma, C), cost.improvement(alpha, gamma, C)


def compute() -> analytic.Found:
  lines, equal = [], 0
  for alpha, gamma, *theirs in PRINT:
    mine = ours(alpha, gamma)
    gaps = [analytic.gap(*x, 2) for x in zip(theirs, mine, strict=True)]
    equal += gaps == ['0', '0']
    cells = zip(theirs, mine, gaps, strict=True)
    cells = [f'{x:.2f} | {y:.4f} | {g}' for x, y, g in cells]
    lines.append([alpha, gamma, *cells])
  head = ['alpha', 'gamma']
  for name in ('operations', 'speed'):
    head += [f'{name}, theirs', 'ours', 'gap']
  said = f'{equal} of {len(PRINT)} rows are equal to the print, 2 decimals.'
  return analytic.Found(
    [*page.table(head, lines), '', said], equal == len(PRINT)
  )


def paint(axes: plots.Axes) -> None:
  names = [f'alpha {alpha}, gamma {gamma}' for alpha, gamma, *_ in PRINT]
  plots.rows(axes, names)
  ys, drawn = range(len(PRINT)), []
  for i, (mark, name) in enumerate((('s', 'operations'), ('o', 'speed'))):
    theirs = [row[2 + i] for row in PRINT]
    mine = [ours(*row[:2])[i] for row in PRINT]
    for xs, whose in ((theirs, 'theirs'), (mine, 'ours')):
      dot = plots.points(axes, xs, ys, theirs=whose == 'theirs', mark=mark)
      dot.set_label(f'{name}, {whose}')
      drawn.append(dot)
  axes.legend(handles=drawn, frameon=False, loc='upper right')
  axes.axvline(1, color=plots.PALE, linewidth=0.8, zorder=0)
  plots.label(axes, 'times plain decoding, c = 0', '')


EXPERIMENT = analytic.Experiment('leviathan_table1', compute, paint, (6.4, 2.8))

if __name__ == '__main__':
  analytic.launch(EXPERIMENT)
