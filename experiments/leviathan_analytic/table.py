"""Computes Leviathan et al. 2023's (2211.17192) tables from its formulas.

Each function returns one comparison, computed by specdec_jax.costs.cost. Their
numbers are in experiments/papers.py.
"""

import math
from typing import NamedTuple

from experiments import papers, plots
from specdec_jax.bench import tables
from specdec_jax.costs import cost


class Table(NamedTuple):
  """lines: Markdown. good: whether every number is as the README claims."""

  lines: list[str]
  good: bool


def off(theirs: float, ours: float, digits: int) -> float:
  """Rounds ours to the printed digits; returns that minus theirs."""
  return round(round(ours, digits) - theirs, digits)


def compared(theirs: float, ours: float, digits: int) -> list[str]:
  """Returns the cells theirs, ours and gap; '0' if they round alike."""
  x = off(theirs, ours, digits)
  gap = f'{x:+.{digits}f}' if x else '0'
  return [f'{theirs:.{digits}f}', f'{ours:.{max(digits, 2) + 1}f}', gap]


def without_gap(head: list[str], lines: list[list], what: str) -> Table:
  """Makes a table and counts its lines without gap: good if that is all."""
  gaps = [i for i, column in enumerate(head) if column == 'gap']
  equal = sum(all(line[i] == '0' for i in gaps) for line in lines)
  summary = f'{equal} of {len(lines)} {what}'
  return Table([summary, '', *tables.grid(head, lines)], equal == len(lines))


ALPHAS = [i / 1000 for i in range(500, 900)]
ALPHA = 'alpha (acceptance rate of one drafted token)'


# --- table 1 -----------------------------------------------------------------


def free(alpha: float, gamma: int) -> tuple[float, float]:
  """Returns (operations, speed) at free drafts, theorems 3.11 and 3.8."""
  operations = (gamma + 1) / cost.expected_tokens(alpha, gamma)
  return operations, cost.improvement(alpha, gamma, 0)


def table1() -> Table:
  lines = []
  for alpha, gamma, *theirs in papers.TABLE1:
    pairs = zip(theirs, free(alpha, gamma), strict=True)
    operations, speed = (compared(*x, 2) for x in pairs)
    lines.append([alpha, gamma, *operations, *speed])
  head = ['alpha', 'gamma', 'operations, theirs', 'ours', 'gap']
  head += ['speed, theirs', 'ours', 'gap']
  return without_gap(head, lines, 'rows are equal to the print, 2 decimals.')


# --- figure 2 ----------------------------------------------------------------


def tokens(alpha: float, gamma: float) -> float:
  """Computes equation 1; its limit 1 / (1 - alpha) where gamma is infinite."""
  if gamma == math.inf:
    return 1 / (1 - alpha)
  return cost.expected_tokens(alpha, int(gamma))


def name(gamma: float) -> str:
  return 'infinite' if gamma == math.inf else str(gamma)


def fig2() -> Table:
  lines = []
  for gamma, theirs in papers.FIG2.items():
    first = compared(theirs[0], tokens(papers.FIRST, gamma), 3)
    last = compared(theirs[1], tokens(papers.LAST, gamma), 2)
    lines.append([name(gamma), *first, *last])
  head = ['gamma', f'at alpha {papers.FIRST}, theirs', 'ours', 'gap']
  head += [f'at alpha {papers.LAST}, theirs', 'ours', 'gap']
  return without_gap(head, lines, 'curves end as in the print.')


def draw_fig2(axes: plots.Axes) -> None:
  plots.level(axes, 1)
  for i, gamma in enumerate(papers.FIG2):
    ys = [tokens(alpha, gamma) for alpha in ALPHAS]
    plots.curve(axes, ALPHAS, ys, f'gamma {name(gamma)}', i)
  axes.text(0.505, 0.9, 'plain decoding', va='top', color='0.4')
  axes.set(xlim=(0.5, 0.9), ylim=(0, 10))
  plots.label(
    axes,
    ALPHA,
    'tokens a target pass',
    'Tokens a pass grow with the acceptance rate, by gamma (tokens drafted)',
  )


# --- figure 3 ----------------------------------------------------------------


def optimal_gamma(alpha: float, c: float) -> int:
  """Finds the gamma with the largest improvement; 0 where none is above 1."""
  return cost.best({g: cost.improvement(alpha, g, c) for g in range(1, 65)})


def steps(c: float) -> list[float]:
  """Finds the alphas, FIRST to LAST, at which the best gamma grows by one."""
  out, alpha = [], papers.FIRST
  gamma = optimal_gamma(alpha, c)
  while optimal_gamma(papers.LAST, c) > gamma:
    low, high = alpha, papers.LAST
    for _ in range(50):
      middle = (low + high) / 2
      more = optimal_gamma(middle, c) > gamma
      low, high = (low, middle) if more else (middle, high)
    alpha, gamma = high, optimal_gamma(high, c)
    out.append(high)
  return out


def fig3() -> Table:
  lines, equal, total, farthest, ends_agree = [], 0, 0, 0.0, True
  for c, (first, last, theirs) in papers.FIG3.items():
    ours = steps(c)
    ends = optimal_gamma(papers.FIRST, c), optimal_gamma(papers.LAST, c)
    ends_agree &= ends == (first, last) and len(ours) == len(theirs)
    pairs = list(zip(theirs, ours, strict=False))
    same = sum(off(*pair, 3) == 0 for pair in pairs)
    far = max(abs(x - y) for x, y in pairs)
    equal, total = equal + same, total + len(theirs)
    farthest = max(farthest, far)
    line = [c, first, ends[0], last, ends[1]]
    lines.append([*line, f'{same} of {len(ours)}', f'{far:.5f}'])
  head = ['c', f'gamma at alpha {papers.FIRST}, theirs', 'ours']
  head += [f'at {papers.LAST}, theirs', 'ours']
  head += ['steps equal to 3 decimals', 'farthest step']
  good = ends_agree and farthest < 0.0006
  summary = (
    f'All ends are equal; {equal} of {total} steps are equal to 3 decimals, '
    f'the farthest is {farthest:.5f} away.'
  )
  if not good:
    summary = 'Curves or steps are NOT those of the print.'
  return Table([summary, '', *tables.grid(head, lines)], good)


def draw_fig3(axes: plots.Axes) -> None:
  for i, c in enumerate(papers.FIG3):
    first = optimal_gamma(papers.FIRST, c)
    xs = [papers.FIRST, *steps(c), papers.LAST]
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


# --- figure 4 ----------------------------------------------------------------


def fig4() -> Table:
  lines = []
  for gamma, theirs in papers.FIG4.items():
    line = [gamma]
    for alpha, x in zip((papers.FIRST, papers.LAST), theirs, strict=True):
      operations, speed = free(alpha, gamma)
      line += [*compared(x, operations, 3), f'{speed:.4f}']
    lines.append(line)
  head = ['gamma']
  for alpha in (papers.FIRST, papers.LAST):
    head += [f'operations at {alpha}, theirs', 'ours', 'gap']
    head += [f'speed at {alpha}, ours']
  return without_gap(head, lines, 'curves of operations end as in the print.')


def draw_fig4(axes: plots.Axes) -> None:
  plots.level(axes, 1)
  for i, gamma in enumerate(papers.FIG4):
    operations, speed = zip(*(free(a, gamma) for a in ALPHAS), strict=True)
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


# --- table 4, column EXP -----------------------------------------------------


# How far rounding may have moved alpha, and c of table 4 and of appendix A.5.
HALF, HALF_C = 0.005, 0.0005


def interval(row: papers.Row) -> tuple[float, float]:
  """Ranges theorem 3.8 over all inputs that round to the printed ones."""
  low = cost.improvement(row.alpha - HALF, row.gamma, row.c + HALF)
  high = cost.improvement(row.alpha + HALF, row.gamma, row.c - HALF)
  return low, high


def equal(row: papers.Row) -> bool:
  return off(row.exp, cost.improvement(row.alpha, row.gamma, row.c), 1) == 0


def inside(row: papers.Row) -> bool:
  """Tells if inputs that round to the printed ones give the printed EXP."""
  (a, b), (low, high) = papers.printed(row.exp, 1), interval(row)
  return max(a, low) <= min(b, high)


def table4_exp() -> Table:
  lines = []
  for row in papers.TABLE4:
    low, high = interval(row)
    ours = cost.improvement(row.alpha, row.gamma, row.c)
    verdict = 'inside the interval only' if inside(row) else 'OUTSIDE'
    lines.append(
      [row.task, row.draft, row.temperature, row.gamma, row.alpha, row.c]
      + [row.emp, *compared(row.exp, ours, 1)]
      + [f'{low:.2f} to {high:.2f}', 'equal' if equal(row) else verdict]
    )
  head = ['task', 'draft', 'T', 'gamma', 'alpha', 'c', 'EMP, theirs']
  head += ['EXP, theirs', 'ours', 'gap', 'inputs before rounding give', '']
  rows = papers.TABLE4
  same, in_reach = sum(map(equal, rows)), sum(map(inside, rows))
  summary = (
    f'{same} of {len(rows)} rows are equal to the print, 1 decimal, from the '
    f'printed inputs; {in_reach} of {len(rows)} for some inputs that round '
    'to those.'
  )
  good = (same, in_reach) == (9, len(rows))
  return Table([summary, '', *tables.grid(head, lines)], good)


# --- appendix A.5 ------------------------------------------------------------

C = 0.015  # of appendix A.5
GAMMA = 8  # at temperature 0; at temperature 1 the paper does not give it


def best(alpha: float, c: float = C) -> tuple[int, float]:
  """Returns (gamma, speed) at the best gamma."""
  gamma = optimal_gamma(alpha, c)
  return gamma, cost.improvement(alpha, gamma, c)


def most(alpha: float) -> float:
  """Finds the largest speed at any gamma, over inputs that round to these."""
  return best(alpha + HALF, C - HALF_C)[1]


def lenience_speed() -> Table:
  every = papers.LENIENCE
  cold, warm, same, out_of_reach = [], [], 0, 0
  for lenience, (alpha, theirs) in zip(every, papers.A5[0], strict=True):
    cells = compared(theirs, cost.improvement(alpha, GAMMA, C), 1)
    same += cells[2] == '0'
    cold.append([lenience, alpha, *cells])
  for lenience, (alpha, theirs) in zip(every, papers.A5[1], strict=True):
    gamma, ours = best(alpha)
    low, _ = papers.printed(theirs, 1)
    out_of_reach += most(alpha) < low
    line = [lenience, alpha, theirs, f'{ours:.2f} (gamma {gamma})']
    line += [f'{ours / theirs - 1:+.0%}', f'{low:.2f}', f'{most(alpha):.2f}']
    warm.append(line)
  head = ['lenience', 'alpha', 'speed, theirs', 'ours', 'gap']
  more = ['the print needs at least', 'ours is at most']
  lines = [
    f'Temperature 0, gamma {GAMMA}, c = {C}: {same} of {len(cold)} speeds are '
    'equal to the print, 1 decimal. Every lenience below 1 is LOSSY.',
    '',
    *tables.grid(head, cold),
    '',
    f'Temperature 1, c = {C}, at the best gamma: {out_of_reach} of '
    f'{len(warm)} speeds are **out of reach** of theorem 3.8: no gamma and no '
    'inputs that round to those printed give them. Every lenience below 1 is '
    'LOSSY.',
    '',
    *tables.grid(head + more, warm),
  ]
  return Table(lines, (same, out_of_reach) == (len(cold), len(warm)))


COMPUTED = table1, fig2, fig3, fig4, table4_exp, lenience_speed
TABLES = {x.__name__: x for x in COMPUTED}
FIGURES = {'fig2': draw_fig2, 'fig3': draw_fig3, 'fig4': draw_fig4}
