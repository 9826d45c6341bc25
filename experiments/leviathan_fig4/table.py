"""Leviathan et al. 2023, figure 4: speed and arithmetic, free drafts."""

from experiments import analytic, page
from specdec_jax.analysis import plots
from specdec_jax.bench import cost

ALPHAS = [i / 1000 for i in range(500, 900)]
# gamma -> operations at alpha 0.5 and at the right end, alpha 0.899 (3
# decimals): a transcription, the figure prints no numbers.
PRINT = {
  1: (1.333, 1.053),
  3: (2.133, 1.165),
  5: (3.048, 1.284),
  7: (4.016, 1.409),
  10: (5.503, 1.610),
}
C = 0.0


def compute() -> analytic.Found:
  lines, equal = [], 0
  for gamma, theirs in PRINT.items():
    cells = []
    for alpha, x in zip((ALPHAS[0], ALPHAS[-1]), theirs, strict=True):
      y = cost.operations(alpha, gamma, C)
      cells += [f'{x:.3f}', f'{y:.4f}', analytic.gap(x, y, 3)]
      cells += [f'{cost.improvement(alpha, gamma, C):.4f}']
    equal += cells[2] == cells[6] == '0'
    lines.append([gamma, *cells])
  head = ['gamma']
  for alpha in (0.5, 0.899):
    head += [f'operations at {alpha}, theirs', 'ours', 'gap']
    head += [f'speed at {alpha}, ours']
  said = f'{equal} of {len(PRINT)} curves of operations end as in the print.'
  return analytic.Found(
    [*page.table(head, lines), '', said], equal == len(PRINT)
  )


def paint(axes: plots.Axes) -> None:
  plots.level(axes, 1)
  for i, gamma in enumerate(PRINT):
    speed = [cost.improvement(alpha, gamma, C) for alpha in ALPHAS]
    ops = [cost.operations(alpha, gamma, C) for alpha in ALPHAS]
    name = f'gamma {gamma}'
    plots.curve(axes, ALPHAS, speed, name, i, linestyle='-')
    plots.curve(axes, ALPHAS, ops, name, i, linestyle=':', left=True)
  axes.text(0.53, 5.9, 'dotted: operations')
  axes.text(0.82, 5.9, 'solid: speed', ha='right')
  axes.set(xlim=(0.42, 0.9), ylim=(0, 7))  # names stand on the left
  axes.set_xticks([0.5, 0.6, 0.7, 0.8, 0.9])
  plots.label(axes, 'alpha', 'times plain decoding, c = 0')


EXPERIMENT = analytic.Experiment('leviathan_fig4', compute, paint)

if __name__ == '__main__':
  analytic.launch(EXPERIMENT)
