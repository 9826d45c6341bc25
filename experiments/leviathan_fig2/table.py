"""Leviathan et al. 2023, figure 2: tokens of a window against alpha."""

import math

from experiments import analytic, page
from specdec_jax.analysis import plots
from specdec_jax.bench import cost

ALPHAS = [i / 1000 for i in range(500, 900)]
GAMMAS = (1, 3, 5, 7, math.inf)
# gamma -> the curve at alpha 0.5 (3 decimals) and at its right end, alpha
# 0.899 (2 decimals): a transcription, the figure prints no numbers.
PRINT = {
  1: (1.5, 1.90),
  3: (1.875, 3.43),
  5: (1.969, 4.67),
  7: (1.992, 5.68),
  math.inf: (2.0, 9.90),
}


def tokens(alpha: float, gamma: float) -> float:
  """Equation 1; its limit 1 / (1 - a) where gamma is infinite."""
  if gamma == math.inf:
    return 1 / (1 - alpha)
  return cost.expected_tokens(alpha, int(gamma))


def compute() -> analytic.Found:
  lines, equal = [], 0
  for gamma, theirs in PRINT.items():
    cells = []
    for alpha, x, digits in zip(
      (ALPHAS[0], ALPHAS[-1]), theirs, (3, 2), strict=True
    ):
      y = tokens(alpha, gamma)
      cells += [f'{x:.{digits}f}', f'{y:.4f}', analytic.gap(x, y, digits)]
    equal += cells[2] == cells[5] == '0'
    lines.append([name(gamma), *cells])
  head = ['gamma', 'at alpha 0.5, theirs', 'ours', 'gap']
  head += ['at alpha 0.899, theirs', 'ours', 'gap']
  said = f'{equal} of {len(PRINT)} curves have the ends of the print.'
  return analytic.Found(
    [*page.table(head, lines), '', said], equal == len(PRINT)
  )


def name(gamma: float) -> str:
  return 'infinite' if gamma == math.inf else str(gamma)


def paint(axes: plots.Axes) -> None:
  plots.level(axes, 1)
  for i, gamma in enumerate(GAMMAS):
    ys = [tokens(alpha, gamma) for alpha in ALPHAS]
    plots.curve(axes, ALPHAS, ys, f'gamma {name(gamma)}', i)
  axes.text(0.505, 0.9, 'plain decoding', va='top', color='0.4')
  axes.set(xlim=(0.5, 0.9), ylim=(0, 10))
  plots.label(axes, 'alpha', 'tokens a window')


EXPERIMENT = analytic.Experiment('leviathan_fig2', compute, paint)

if __name__ == '__main__':
  analytic.launch(EXPERIMENT)
