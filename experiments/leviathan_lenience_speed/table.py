"""Leviathan et al. 2023, appendix A.5: the speed of lenient acceptance."""

from experiments import analytic, page
from specdec_jax.analysis import plots
from specdec_jax.bench import cost

C = 0.015
LENIENCE = (1.0, 0.5, 0.3, 0.1)
# As printed, T5-small drafting for T5-XXL on EnDe: temperature ->
# (alpha, speed) by lenience. The print says "5X", which is read as 5.0.
PRINT = {
  0: ((0.75, 3.3), (0.75, 3.3), (0.8, 3.9), (0.87, 4.9)),
  1: ((0.62, 2.5), (0.71, 3.1), (0.76, 3.6), (0.84, 5.0)),
}
GAMMA = 8  # at temperature 0; at temperature 1 the paper does not say
HALF, HALF_C = 0.005, 0.0005  # how far rounding may have moved alpha and c


def best(alpha: float, c: float = C) -> tuple[int, float]:
  """(gamma, speed) at the gamma that is best."""
  gamma = cost.optimal_gamma(alpha, c)
  return gamma, cost.improvement(alpha, gamma, c)


def most(alpha: float) -> float:
  """The largest speed of any gamma and of any inputs that round to these."""
  return best(alpha + HALF, C - HALF_C)[1]


def compute() -> analytic.Found:
  cold, equal = [], 0
  for lenience, (alpha, theirs) in zip(LENIENCE, PRINT[0], strict=True):
    mine = cost.improvement(alpha, GAMMA, C)
    gap = analytic.gap(theirs, mine, 1)
    equal += gap == '0'
    cold.append([lenience, alpha, theirs, f'{mine:.3f}', gap])
  warm, out_of_reach = [], 0
  for lenience, (alpha, theirs) in zip(LENIENCE, PRINT[1], strict=True):
    gamma, mine = best(alpha)
    low, _ = analytic.cell(theirs, 1)
    out_of_reach += most(alpha) < low
    warm.append(
      [lenience, alpha, theirs, f'{mine:.2f} (gamma {gamma})']
      + [f'{mine / theirs - 1:+.0%}', f'{low:.2f}', f'{most(alpha):.2f}']
    )
  said = [
    f'Temperature 0, gamma {GAMMA}, c = {C}: {equal} of {len(cold)} speeds are '
    'equal to the print, 1 decimal. Every lenience below 1 is LOSSY.',
    f'Temperature 1, c = {C}, at the best gamma: {out_of_reach} of '
    f'{len(warm)} speeds are **out of reach** of theorem 3.8: no gamma and no '
    'inputs that round to those printed give them. Every lenience below 1 is '
    'LOSSY.',
  ]
  head = ['lenience', 'alpha', 'speed, theirs', 'ours', 'gap']
  more = ['the print needs at least', 'ours is at most']
  return analytic.Found(
    [said[0], '', *page.table(head, cold), '', said[1], '']
    + page.table(head + more, warm),
    (equal, out_of_reach) == (len(cold), len(warm)),
  )


def paint(axes: plots.Axes) -> None:
  lossy = lambda x: f'{x} LOSSY' if x < 1 else f'{x}'
  plots.rows(
    axes, [f'T={t}, lenience {lossy(x)}' for t in PRINT for x in LENIENCE]
  )
  ys = range(2 * len(LENIENCE))
  mine = [cost.improvement(alpha, GAMMA, C) for alpha, _ in PRINT[0]]
  mine += [best(alpha)[1] for alpha, _ in PRINT[1]]
  warm = [best(alpha - HALF, C + HALF_C)[1] for alpha, _ in PRINT[1]]
  bar = axes.hlines(
    ys[len(LENIENCE) :],
    warm,
    [most(alpha) for alpha, _ in PRINT[1]],
    color=plots.PALE,
    linewidth=7,
    zorder=1,
  )
  theirs = [speed for t in PRINT for _, speed in PRINT[t]]
  box = plots.cells(axes, [analytic.cell(x, 1) for x in theirs], ys)
  dot = plots.points(axes, mine, ys, theirs=False, mark='o')
  axes.legend(
    [box, dot, bar],
    ['rounds to theirs', 'theorem 3.8', 'inputs before rounding'],
    frameon=False,
    loc='upper right',
  )
  plots.label(axes, 'speed over plain decoding, c = 0.015', '')


EXPERIMENT = analytic.Experiment(
  'leviathan_lenience_speed', compute, paint, (6.4, 3.4)
)

if __name__ == '__main__':
  analytic.launch(EXPERIMENT)
