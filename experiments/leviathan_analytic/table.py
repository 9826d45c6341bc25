"""The numbers of Leviathan et al. 2023 (2211.17192) and those of its formulas.

Each function returns one comparison, computed by specdec_jax.costs.cost.
The paper's figures print no numbers: values were read off the curves.
"""

import math
from typing import NamedTuple

from experiments import page
from specdec_jax.costs import cost

FIRST, LAST = 0.5, 0.899  # the ends of the x axis of the figures


class Table(NamedTuple):
  """lines: Markdown. good: whether every number is as the README claims."""

  lines: list[str]
  good: bool


def off(theirs: float, ours: float, digits: int) -> float:
  """Ours, rounded to the printed digits, minus theirs."""
  return round(round(ours, digits) - theirs, digits)


def compared(theirs: float, ours: float, digits: int) -> list[str]:
  """The cells theirs, ours and gap; the gap is '0' if they round alike."""
  x = off(theirs, ours, digits)
  gap = f'{x:+.{digits}f}' if x else '0'
  return [f'{theirs:.{digits}f}', f'{ours:.{max(digits, 2) + 1}f}', gap]


def cell(theirs: float, digits: int) -> tuple[float, float]:
  """The interval of values that round to what is printed."""
  half = 0.5 * 10**-digits
  return theirs - half, theirs + half


def without_gap(head: list[str], lines: list[list], what: str) -> Table:
  """A table and how many of its lines have no gap: good if that is all."""
  gaps = [i for i, column in enumerate(head) if column == 'gap']
  equal = sum(all(line[i] == '0' for i in gaps) for line in lines)
  summary = f'{equal} of {len(lines)} {what}'
  return Table([*page.table(head, lines), '', summary], equal == len(lines))


# --- table 1 -----------------------------------------------------------------

# alpha, gamma, OPERATIONS, SPEED, as printed (2 decimals); c = c^ = 0.
TABLE1 = (
  (0.6, 2, 1.53, 1.96),
  (0.7, 3, 1.58, 2.53),
  (0.8, 2, 1.23, 2.44),
  (0.8, 5, 1.63, 3.69),
  (0.9, 2, 1.11, 2.71),
  (0.9, 10, 1.60, 6.86),
)


def free(alpha: float, gamma: int) -> tuple[float, float]:
  """(operations, speed) where drafts cost nothing, theorems 3.11 and 3.8."""
  return cost.operations(alpha, gamma, 0), cost.improvement(alpha, gamma, 0)


def table1() -> Table:
  lines = []
  for alpha, gamma, *theirs in TABLE1:
    pairs = zip(theirs, free(alpha, gamma), strict=True)
    operations, speed = (compared(*x, 2) for x in pairs)
    lines.append([alpha, gamma, *operations, *speed])
  head = ['alpha', 'gamma', 'operations, theirs', 'ours', 'gap']
  head += ['speed, theirs', 'ours', 'gap']
  return without_gap(head, lines, 'rows are equal to the print, 2 decimals.')


# --- figure 2 ----------------------------------------------------------------

# gamma -> the curve at alpha FIRST (3 decimals) and at LAST (2 decimals).
FIG2 = {
  1: (1.5, 1.90),
  3: (1.875, 3.43),
  5: (1.969, 4.67),
  7: (1.992, 5.68),
  math.inf: (2.0, 9.90),
}


def tokens(alpha: float, gamma: float) -> float:
  """Equation 1; its limit 1 / (1 - alpha) where gamma is infinite."""
  if gamma == math.inf:
    return 1 / (1 - alpha)
  return cost.expected_tokens(alpha, int(gamma))


def name(gamma: float) -> str:
  return 'infinite' if gamma == math.inf else str(gamma)


def fig2() -> Table:
  lines = []
  for gamma, theirs in FIG2.items():
    first = compared(theirs[0], tokens(FIRST, gamma), 3)
    last = compared(theirs[1], tokens(LAST, gamma), 2)
    lines.append([name(gamma), *first, *last])
  head = ['gamma', f'at alpha {FIRST}, theirs', 'ours', 'gap']
  head += [f'at alpha {LAST}, theirs', 'ours', 'gap']
  return without_gap(head, lines, 'curves end as in the print.')


# --- figure 3 ----------------------------------------------------------------

# c -> best gamma at FIRST and at LAST, and the alphas at which it grows by one.
# fmt: off
FIG3 = {
  0.01: (5, 24, (
    .518, .580, .629, .670, .705, .733, .758, .779, .797, .813, .827, .839,
    .850, .860, .869, .877, .884, .891, .897)),
  0.02: (4, 19, (
    .517, .591, .649, .695, .732, .763, .788, .810, .828, .843, .857, .869,
    .879, .888, .896)),
  0.05: (3, 13, (
    .543, .634, .700, .750, .788, .818, .842, .862, .878, .891)),
  0.1: (2, 10, (.533, .652, .732, .788, .828, .857, .880, .898)),
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


def fig3() -> Table:
  lines, equal, total, farthest, ends_agree = [], 0, 0, 0.0, True
  for c, (first, last, theirs) in FIG3.items():
    ours = steps(c)
    ends = cost.optimal_gamma(FIRST, c), cost.optimal_gamma(LAST, c)
    ends_agree &= ends == (first, last) and len(ours) == len(theirs)
    pairs = list(zip(theirs, ours, strict=False))
    same = sum(off(*pair, 3) == 0 for pair in pairs)
    far = max(abs(x - y) for x, y in pairs)
    equal, total = equal + same, total + len(theirs)
    farthest = max(farthest, far)
    line = [c, first, ends[0], last, ends[1]]
    lines.append([*line, f'{same} of {len(ours)}', f'{far:.5f}'])
  head = ['c', f'gamma at alpha {FIRST}, theirs', 'ours']
  head += [f'at {LAST}, theirs', 'ours']
  head += ['steps equal to 3 decimals', 'farthest step']
  good = ends_agree and farthest < 0.0006
  summary = (
    f'All ends are equal; {equal} of {total} steps are equal to 3 decimals, '
    f'the farthest is {farthest:.5f} away.'
  )
  if not good:
    summary = 'Curves or steps are NOT those of the print.'
  return Table([*page.table(head, lines), '', summary], good)


# --- figure 4 ----------------------------------------------------------------

# gamma -> operations at alpha FIRST and LAST (3 decimals); c = c^ = 0.
FIG4 = {
  1: (1.333, 1.053),
  3: (2.133, 1.165),
  5: (3.048, 1.284),
  7: (4.016, 1.409),
  10: (5.503, 1.610),
}


def fig4() -> Table:
  lines = []
  for gamma, theirs in FIG4.items():
    line = [gamma]
    for alpha, x in zip((FIRST, LAST), theirs, strict=True):
      operations, speed = free(alpha, gamma)
      line += [*compared(x, operations, 3), f'{speed:.4f}']
    lines.append(line)
  head = ['gamma']
  for alpha in (FIRST, LAST):
    head += [f'operations at {alpha}, theirs', 'ours', 'gap']
    head += [f'speed at {alpha}, ours']
  return without_gap(head, lines, 'curves of operations end as in the print.')


# --- table 4, column EXP -----------------------------------------------------


class Row(NamedTuple):
  """A printed row: emp was measured, exp is theorem 3.8 (1 decimal)."""

  task: str
  draft: str
  temperature: int
  gamma: int
  alpha: float
  c: float
  exp: float
  emp: float


TABLE4 = (
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
# How far rounding may have moved alpha, and c of table 4 and of appendix A.5.
HALF, HALF_C = 0.005, 0.0005


def improvement(row: Row) -> float:
  return cost.improvement(row.alpha, row.gamma, row.c)


def interval(row: Row) -> tuple[float, float]:
  """Range of theorem 3.8 over all inputs that round to the printed ones."""
  low = cost.improvement(row.alpha - HALF, row.gamma, row.c + HALF)
  high = cost.improvement(row.alpha + HALF, row.gamma, row.c - HALF)
  return low, high


def equal(row: Row) -> bool:
  return off(row.exp, improvement(row), 1) == 0


def inside(row: Row) -> bool:
  """Whether some inputs that round to the printed ones give the printed EXP."""
  (a, b), (low, high) = cell(row.exp, 1), interval(row)
  return max(a, low) <= min(b, high)


def table4_exp() -> Table:
  lines = []
  for row in TABLE4:
    low, high = interval(row)
    verdict = 'inside the interval only' if inside(row) else 'OUTSIDE'
    lines.append(
      [row.task, row.draft, row.temperature, row.gamma, row.alpha, row.c]
      + [row.emp, *compared(row.exp, improvement(row), 1)]
      + [f'{low:.2f} to {high:.2f}', 'equal' if equal(row) else verdict]
    )
  head = ['task', 'draft', 'T', 'gamma', 'alpha', 'c', 'EMP, theirs']
  head += ['EXP, theirs', 'ours', 'gap', 'inputs before rounding give', '']
  same, in_reach = sum(map(equal, TABLE4)), sum(map(inside, TABLE4))
  summary = (
    f'{same} of {len(TABLE4)} rows are equal to the print, 1 decimal, from the '
    f'printed inputs; {in_reach} of {len(TABLE4)} for some inputs that round '
    'to those.'
  )
  good = (same, in_reach) == (9, len(TABLE4))
  return Table([*page.table(head, lines), '', summary], good)


# --- appendix A.5 ------------------------------------------------------------

C = 0.015
LENIENCE = (1.0, 0.5, 0.3, 0.1)
# T5-small drafting for T5-XXL on EnDe: temperature -> (alpha, speed) by
# lenience. The last speed is printed as "5X", read as 5.0.
A5 = {
  0: ((0.75, 3.3), (0.75, 3.3), (0.8, 3.9), (0.87, 4.9)),
  1: ((0.62, 2.5), (0.71, 3.1), (0.76, 3.6), (0.84, 5.0)),
}
GAMMA = 8  # at temperature 0; at temperature 1 the paper does not give it


def best(alpha: float, c: float = C) -> tuple[int, float]:
  """(gamma, speed) at the best gamma."""
  gamma = cost.optimal_gamma(alpha, c)
  return gamma, cost.improvement(alpha, gamma, c)


def most(alpha: float) -> float:
  """The largest speed at any gamma, over inputs that round to these."""
  return best(alpha + HALF, C - HALF_C)[1]


def lenience_speed() -> Table:
  cold, same = [], 0
  for lenience, (alpha, theirs) in zip(LENIENCE, A5[0], strict=True):
    cells = compared(theirs, cost.improvement(alpha, GAMMA, C), 1)
    same += cells[2] == '0'
    cold.append([lenience, alpha, *cells])
  warm, out_of_reach = [], 0
  for lenience, (alpha, theirs) in zip(LENIENCE, A5[1], strict=True):
    gamma, ours = best(alpha)
    low, _ = cell(theirs, 1)
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
    *page.table(head, cold),
    '',
    f'Temperature 1, c = {C}, at the best gamma: {out_of_reach} of '
    f'{len(warm)} speeds are **out of reach** of theorem 3.8: no gamma and no '
    'inputs that round to those printed give them. Every lenience below 1 is '
    'LOSSY.',
    '',
    *page.table(head + more, warm),
  ]
  return Table(lines, (same, out_of_reach) == (len(cold), len(warm)))


TABLES = {
  'table1': table1,
  'fig2': fig2,
  'fig3': fig3,
  'fig4': fig4,
  'table4_exp': table4_exp,
  'lenience_speed': lenience_speed,
}
