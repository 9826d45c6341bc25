"""Measures a row's alpha, and puts ours beside theirs."""

import math
import statistics
from collections.abc import Iterator

import numpy as np

from experiments import claims as claims_lib
from experiments import empirical, papers, resampled
from experiments import loaded as loaded_lib
from experiments.page import Part
from experiments.rows import Cells, Rows

WARM = (0.0, 1.0)


def measure(loaded: loaded_lib.Loaded, asked: empirical.Asked):
  """Sums each request by draft and temperature; 'again': the next seed's."""
  cells = []
  for temperature in WARM:
    each = [
      loaded_lib.traces(loaded, temperature, asked.tokens, seed)
      for seed in ((0, 1) if temperature else (0,))
    ]
    for name in loaded.engines:
      sums = [
        [[len(x.tokens), math.fsum(x.overlap)] for x in found[name]]
        for found in each
      ]
      cell = {'draft': name, 'temperature': temperature, 'requests': sums[0]}
      cells.append(cell | ({'again': sums[1]} if temperature else {}))
  return cells


def parts(cells: Cells, every: Rows) -> list[Part]:
  ours = [
    {'target': every[name].name, 'draft': draft.name}
    | {
      at: empirical.interval(_sums(cells[name], draft.name, warm), 1)
      for at, warm in zip(('cold', 'warm'), WARM, strict=True)
    }
    for name in cells
    for draft in every[name].drafts
  ]
  tokens = []
  for name, found in cells.items():  # those of all drafts are the same
    each = (_sums(found, found[0]['draft'], warm) for warm in WARM)
    counts = (sum(n for n, _ in sums) for sums in each)
    tokens.append(f'{name} ' + ' and '.join(f'{x:,}' for x in counts))
  return [
    Part(
      'Alpha of ours with its 95 % interval over requests. Tokens of the '
      f'target at T = 0 and at T = 1: {"; ".join(tokens)}. {seeds(cells)}',
      'target, draft, T = 0=cold:.2f, T = 1=warm:.2f',
      ours,
    ),
    Part(
      'Theirs.',
      'target, draft, T = 0=greedy:.2f, T = 1=sampled:.2f',
      papers.TABLE3,
    ),
  ]


def claims(cells: Cells, every: Rows) -> list[claims_lib.Claim]:
  """Claims every alpha; its direction is against the paper's draft above it."""
  out = []
  beside = lambda x: empirical.beside(every, cells, x.target, x.draft)
  for theirs, above in zip(papers.TABLE3, (None, *papers.TABLE3), strict=False):
    if above and above.target != theirs.target:
      above = None
    for name, draft in beside(theirs):
      lower = beside(above) if above else []
      for warm in WARM:
        print_of = lambda x, warm=warm: x.sampled if warm else x.greedy
        sums = _sums(cells[name], draft.name, warm)
        means = empirical.means(sums, 1)
        extra = {}
        if above and lower:
          base = _sums(cells[name], lower[0][1].name, warm)
          apart = means - empirical.means(base, 1)
          extra = {
            'against': above.draft,
            'sign': int(np.sign(print_of(theirs) - print_of(above))),
            'apart': resampled.interval(apart, len(sums)),
          }
        cell = f'{theirs.target}, {theirs.draft}, T = {warm:g}'
        place, x = f'{every[name].name}, {draft.name}', print_of(theirs)
        given = cell, f'{x:.2f}', place, *papers.printed(x, 2)
        ours = resampled.interval(means, len(sums))
        out.append(claims_lib.Claim(*given, ours, of='acceptance', **extra))
  return out


def _sums(cells, draft: str, warm: float):
  """Sums for every request: its tokens, and alpha over them."""
  wanted = draft, warm
  (x,) = (x for x in cells if (x['draft'], x['temperature']) == wanted)
  return x['requests']


def _differences(cells: Cells) -> Iterator[float]:
  """Yields how far two seeds' alphas are apart, in their standard errors."""
  for found in cells.values():
    for x in found:
      both = [x['requests'], x.get('again', [])]
      if min(map(len, both)) > 1:
        one, two = (empirical.means(sums, 1) for sums in both)
        error = math.hypot(np.std(one[1:]), np.std(two[1:]))
        yield abs(one[0] - two[0]) / error if error else 0.0


def seeds(cells: Cells) -> str:
  """Tells if two seeds agree, by Bonferroni's limit for the whole table."""
  found = list(_differences(cells))
  if not found:
    return 'No alpha has two seeds of several requests.'
  limit = statistics.NormalDist().inv_cdf(1 - 0.01 / 2 / len(found))
  outside = sum(x > limit for x in found)
  return (
    f'Two seeds at T = 1: {outside} of {len(found)} alphas differ by more than '
    'the 99 % interval of their difference (Bonferroni: '
    f'{limit:.1f} standard errors); the largest difference is '
    f'{max(found):.1f}.'
  )


WHY = 'other models and texts; a wider draft is not accepted more'
TABLE = empirical.Table('leviathan_table3', measure, parts, claims, WHY)
