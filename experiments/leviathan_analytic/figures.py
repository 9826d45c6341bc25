"""The six comparisons as figures: printed values beside computed ones."""

from experiments import papers, plots
from experiments.leviathan_analytic import table
from specdec_jax.costs import cost

ALPHAS = [i / 1000 for i in range(500, 900)]
ALPHA = 'alpha (acceptance rate of one drafted token)'


def table1(axes: plots.Axes) -> None:
  names = [
    f'alpha {alpha}, gamma {gamma}' for alpha, gamma, *_ in papers.TABLE1
  ]
  plots.rows(axes, names)
  ys, drawn = range(len(names)), []
  for i, (mark, name) in enumerate((('s', 'operations'), ('o', 'speed'))):
    theirs = [row[2 + i] for row in papers.TABLE1]
    ours = [table.free(*row[:2])[i] for row in papers.TABLE1]
    for xs, whose in ((theirs, 'theirs'), (ours, 'ours')):
      dot = plots.points(axes, xs, ys, theirs=whose == 'theirs', mark=mark)
      dot.set_label(f'{name}, {whose}')
      drawn.append(dot)
  axes.legend(handles=drawn, frameon=False, loc='upper right')
  axes.axvline(1, color=plots.PALE, linewidth=0.8, zorder=0)
  plots.label(
    axes,
    'times plain decoding, drafts free (c = 0)',
    'acceptance rate, draft length',
    'Drafts that cost nothing: the printed numbers (theirs) and the formulas',
  )


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
    first = cost.optimal_gamma(papers.FIRST, c)
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


def table4_exp(axes: plots.Axes) -> None:
  rows, ys = papers.TABLE4, range(len(papers.TABLE4))
  plots.rows(axes, [f'{r.task}, {r.draft}, T={r.temperature}' for r in rows])
  low, high = zip(*map(table.interval, rows), strict=True)
  bar = axes.hlines(ys, low, high, color=plots.PALE, linewidth=7, zorder=1)
  exp = plots.cells(axes, [papers.printed(r.exp, 1) for r in rows], ys)
  ours = list(map(table.improvement, rows))
  dot = plots.points(axes, ours, ys, theirs=False, mark='o')
  (emp,) = axes.plot([r.emp for r in rows], ys, 'x', color='0.45')
  axes.legend(
    [exp, dot, bar, emp],
    ['rounds to EXP, theirs', 'formula (theorem 3.8)']
    + ['formula, inputs +- rounding', 'EMP, theirs'],
    frameon=False,
    loc='lower right',
  )
  plots.label(
    axes,
    'times the speed of plain decoding',
    'task, draft model, temperature',
    'Table 4: the expected (EXP) and measured (EMP) speed',
  )


def lenience_speed(axes: plots.Axes) -> None:
  lossy = lambda x: f'{x} LOSSY' if x < 1 else f'{x}'
  names = [
    f'T={t}, lenience {lossy(x)}' for t in (0, 1) for x in papers.LENIENCE
  ]
  plots.rows(axes, names)
  ys, warm = range(len(names)), [alpha for alpha, _ in papers.A5[1]]
  ours = [cost.improvement(a, table.GAMMA, table.C) for a, _ in papers.A5[0]]
  ours += [table.best(alpha)[1] for alpha in warm]
  low = [table.best(a - table.HALF, table.C + table.HALF_C)[1] for a in warm]
  bar = axes.hlines(
    ys[len(papers.LENIENCE) :],
    low,
    list(map(table.most, warm)),
    color=plots.PALE,
    linewidth=7,
    zorder=1,
  )
  theirs = [speed for t in (0, 1) for _, speed in papers.A5[t]]
  box = plots.cells(axes, [papers.printed(x, 1) for x in theirs], ys)
  dot = plots.points(axes, ours, ys, theirs=False, mark='o')
  axes.legend(
    [box, dot, bar],
    [
      'rounds to theirs',
      'formula (theorem 3.8)',
      'formula, inputs +- rounding',
    ],
    frameon=False,
    loc='upper right',
  )
  plots.label(
    axes,
    'times the speed of plain decoding (c = 0.015)',
    'temperature, lenience',
    'What lenience buys: the printed speeds (theirs) and the formula',
  )


# Name: (draws on axes, size in inches).
FIGURES = {
  'table1': (table1, (6.4, 2.8)),
  'fig2': (fig2, (6.4, 4.0)),
  'fig3': (fig3, (6.4, 4.0)),
  'fig4': (fig4, (6.4, 4.0)),
  'table4_exp': (table4_exp, (6.4, 4.4)),
  'lenience_speed': (lenience_speed, (6.4, 3.4)),
}
