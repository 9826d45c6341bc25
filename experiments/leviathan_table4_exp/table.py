"""Leviathan et al. 2023, table 4: the expected improvement, EXP."""

from typing import NamedTuple

from experiments import analytic, page
from specdec_jax.analysis import plots
from specdec_jax.bench import cost

HALF = 0.005  # alpha and c are printed with 2 decimals


class Row(NamedTuple):
  """As printed: emp is what they measured, exp is theorem 3.8 (1 decimal)."""

  task: str
  draft: str
  temperature: int
  gamma: int
  alpha: float
  c: float
  exp: float
  emp: float


PRINT = (
  Row('EnDe', 'T5-small', 0, 7, 0.75, 0.02, 3.2, 3.4),
  Row('EnDe', 'T5-base', 0, 7, 0.80, 0.04, 3.3, 2.8),
  Row('EnDe', 'T5-large', 0, 7, 0.82, 0.11, 2.5, 1.7),
  Row('EnDe', 'T5-small', 1, 7, 0.62, 0.02, 2.3, 2.6),
  Row('EnDe', 'T5-base', 1, 5, 0.68, 0.04, 2.4, 2.4),
  Row('EnDe', 'T5-large', 1, 3, 0.71, 0.11, 2.0, 1.4),
  Row('CNNDM', 'T5-small', 0, 5, 0.65, 0.02, 2.4, 3.1),
  Row('CNNDM', 'T5-base', 0, 5, 0.73, 0.04, 2.6, 3.0),
  Row('CNNDM', 'T5-large', 0, 3, 0.74, 0.11, 2.0, 2.2),
  Row('CNNDM', 'T5-small', 1, 5, 0.53, 0.02, 1.9, 2.3),
  Row('CNNDM', 'T5-base', 1, 3, 0.55, 0.04, 1.8, 2.2),
  Row('CNNDM', 'T5-large', 1, 3, 0.56, 0.11, 1.6, 1.7),
)


def ours(row: Row) -> float:
  return cost.improvement(row.alpha, row.gamma, row.c)


def interval(row: Row) -> tuple[float, float]:
  """What theorem 3.8 gives for inputs that round to those printed."""
  low = cost.improvement(row.alpha - HALF, row.gamma, row.c + HALF)
  high = cost.improvement(row.alpha + HALF, row.gamma, row.c - HALF)
  return low, high


def equal(row: Row) -> bool:
  return analytic.off(row.exp, ours(row), 1) == 0


def inside(row: Row) -> bool:
  """Whether some inputs that round to the print give what it says."""
  return analytic.meet(analytic.cell(row.exp, 1), interval(row))


def compute() -> analytic.Found:
  lines = []
  for row in PRINT:
    low, high = interval(row)
    how = 'inside the interval only' if inside(row) else 'OUTSIDE'
    lines.append(
      [row.task, row.draft, row.temperature, row.gamma, row.alpha, row.c]
      + [row.emp, row.exp, f'{ours(row):.3f}']
      + [analytic.gap(row.exp, ours(row), 1), f'{low:.2f} to {high:.2f}']
      + ['equal' if equal(row) else how]
    )
  head = ['task', 'draft', 'T', 'gamma', 'alpha', 'c', 'EMP, theirs']
  head += ['EXP, theirs', 'ours', 'gap', 'inputs before rounding give', '']
  same, in_reach = sum(map(equal, PRINT)), sum(map(inside, PRINT))
  said = (
    f'{same} of {len(PRINT)} rows are equal to the print, 1 decimal, from the '
    f'printed inputs; {in_reach} of {len(PRINT)} for some inputs that round to '
    'those.'
  )
  return analytic.Found(
    [*page.table(head, lines), '', said],
    (same, in_reach) == (9, len(PRINT)),
  )


def paint(axes: plots.Axes) -> None:
  plots.rows(axes, [f'{r.task}, {r.draft}, T={r.temperature}' for r in PRINT])
  ys = range(len(PRINT))
  low, high = zip(*map(interval, PRINT), strict=True)
  bar = axes.hlines(ys, low, high, color=plots.PALE, linewidth=7, zorder=1)
  exp = plots.cells(axes, [analytic.cell(r.exp, 1) for r in PRINT], ys)
  dot = plots.points(axes, list(map(ours, PRINT)), ys, theirs=False, mark='o')
  (emp,) = axes.plot([r.emp for r in PRINT], ys, 'x', color='0.45')
  axes.legend(
    [exp, dot, bar, emp],
    [
      'rounds to EXP, theirs',
      'theorem 3.8',
      'inputs before rounding',
      'EMP, theirs',
    ],
    frameon=False,
    loc='lower right',
  )
  plots.label(axes, 'improvement over plain decoding', '')


EXPERIMENT = analytic.Experiment(
  'leviathan_table4_exp', compute, paint, (6.4, 4.4)
)

if __name__ == '__main__':
  analytic.launch(EXPERIMENT)
