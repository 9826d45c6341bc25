"""Leviathan et al. 2023, figure 3: the best gamma against alpha."""

from typing import NamedTuple

from experiments import analytic, page
from specdec_jax.analysis import plots
from specdec_jax.bench import cost

FIRST, LAST = 0.5, 0.899


class Curve(NamedTuple):
  """One curve: a transcription, the figure prints no numbers.

  first, last: gamma at both ends. steps: the alphas at which it grows by one.
  """

  first: int
  last: int
  steps: tuple[float, ...]


# fmt: off
PRINT = {
  0.01: Curve(5, 24, (
    .518, .580, .629, .670, .705, .733, .758, .779, .797, .813, .827, .839,
    .850, .860, .869, .877, .884, .891, .897)),
  0.02: Curve(4, 19, (
    .517, .591, .649, .695, .732, .763, .788, .810, .828, .843, .857, .869,
    .879, .888, .896)),
  0.05: Curve(3, 13, (
    .543, .634, .700, .750, .788, .818, .842, .862, .878, .891)),
  0.1: Curve(2, 10, (.533, .652, .732, .788, .828, .857, .880, .898)),
}
# fmt: on


def steps(c: float) -> list[float]:
  """The alphas of FIRST to LAST at which the best gamma grows by one."""
  out, alpha = [], FIRST
  gamma = cost.optimal_gamma(alpha, c)
  while cost.optimal_gamma(LAST, c) > gamma:
    low, high = alpha, LAST
    for _ in range(50):
      middle = (low + high) / 2
      more = cost.optimal_gamma(middle, c) > gamma
      low, high = (low, middle) if more else (middle, high)
    alpha, gamma = high, cost.optimal_gamma(high, c)
    out.append(high)
  return out


def compute() -> analytic.Found:
  lines, same, worst, total, good = [], 0, 0.0, 0, True
  for c, theirs in PRINT.items():
    mine = steps(c)
    ends = cost.optimal_gamma(FIRST, c), cost.optimal_gamma(LAST, c)
    equal = [analytic.off(*x, 3) == 0 for x in zip(theirs.steps, mine)]  # noqa: B905
    far = [abs(x - y) for x, y in zip(theirs.steps, mine)]  # noqa: B905
    good &= ends == theirs[:2] and len(mine) == len(theirs.steps)
    same, total = same + sum(equal), total + len(theirs.steps)
    worst = max(worst, *far)
    shown = f'{sum(equal)} of {len(mine)} | {max(far):.5f}'
    pairs = zip(theirs[:2], ends, strict=True)
    lines.append([c, *(f'{x} | {y}' for x, y in pairs), shown])
  head = ['c', 'gamma at alpha 0.5, theirs', 'ours']
  head += ['at 0.899, theirs', 'ours', 'steps equal to 3 decimals']
  head += ['farthest step']
  said = (
    f'All ends are equal; {same} of {total} steps are equal to 3 decimals, the '
    f'farthest lies {worst:.5f} away.'
  )
  good &= worst < 0.0006
  if not good:
    said = 'Curves or steps are NOT those of the print.'
  return analytic.Found([*page.table(head, lines), '', said], good)


def paint(axes: plots.Axes) -> None:
  for i, c in enumerate(PRINT):
    first = cost.optimal_gamma(FIRST, c)
    xs = [FIRST, *steps(c), LAST]
    ys = [*range(first, first + len(xs) - 1)]
    plots.curve(
      axes, xs, [*ys, ys[-1]], f'c = {c}', i, drawstyle='steps-post', marker=''
    )
  axes.set(xlim=(0.5, 0.9), ylim=(0, 25))
  plots.label(axes, 'alpha', 'best gamma')


EXPERIMENT = analytic.Experiment('leviathan_fig3', compute, paint)

if __name__ == '__main__':
  analytic.launch(EXPERIMENT)
