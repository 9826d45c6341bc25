"""Figures 2, 3 and 4, from the formulas."""

from experiments import papers, plots
from experiments.leviathan_analytic import table

ALPHAS = [i / 1000 for i in range(500, 900)]
ALPHA = 'alpha (acceptance rate of one drafted token)'


def fig2(axes: plots.Axes) -> None:
  plots.level(axes, 1)
  for i, gamma in enumerate(papers.FIG2):
    ys = [table.tokens(alpha, gamma) for alpha in ALPHAS]
    plots.curve(axes, ALPHAS, ys, f'gamma {table.name(gamma)}', i)
  axes.text(0.505, 0.9, 'plain decoding', va='top', color='0.4')
  axes.set(xlim=(0.5, 0.9), ylim=(0, 10))
  plots.label(
    axes,
    ALPHA,
    'tokens a target pass',
    'Tokens a pass grow with the acceptance rate, by gamma (tokens drafted)',
  )


def fig3(axes: plots.Axes) -> None:
  for i, c in enumerate(papers.FIG3):
    first = table.optimal_gamma(papers.FIRST, c)
    xs = [papers.FIRST, *table.steps(c), papers.LAST]
    ys = [*range(first, first + len(xs) - 1)]
    look = dict(drawstyle='steps-post', marker='')
    plots.curve(axes, xs, [*ys, ys[-1]], f'c = {c}', i, **look)
  axes.set(xlim=(0.5, 0.9), ylim=(0, 25))
  plots.label(
    axes,
    ALPHA,
    'best gamma (tokens drafted a window)',
    'The best draft length, by c (time of a draft step over a target step)',
  )


def fig4(axes: plots.Axes) -> None:
  plots.level(axes, 1)
  for i, gamma in enumerate(papers.FIG4):
    operations, speed = zip(
      *(table.free(a, gamma) for a in ALPHAS), strict=True
    )
    name = f'gamma {gamma}'
    plots.curve(axes, ALPHAS, speed, name, i, linestyle='-')
    plots.curve(axes, ALPHAS, operations, name, i, linestyle=':', left=True)
  axes.text(0.53, 5.9, 'dotted: operations')
  axes.text(0.82, 5.9, 'solid: speed', ha='right')
  axes.set(xlim=(0.42, 0.9), ylim=(0, 7))  # names stand on the left
  axes.set_xticks([0.5, 0.6, 0.7, 0.8, 0.9])
  plots.label(
    axes,
    ALPHA,
    'times plain decoding, drafts free (c = 0)',
    'Speed and operations by gamma (tokens drafted)',
  )


# Name: (draws on axes, size in inches).
FIGURES = {
  'fig2': (fig2, (6.4, 4.0)),
  'fig3': (fig3, (6.4, 4.0)),
  'fig4': (fig4, (6.4, 4.0)),
}
