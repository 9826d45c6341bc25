"""Measures alpha of a row, and puts ours beside theirs."""

import math
import statistics
from collections.abc import Iterator

import numpy as np

from experiments import claims as claims_lib
from experiments import empirical, page, papers
from experiments import rows as rows_lib
from specdec_jax.bench import intervals

WARM = (0.0, 1.0)


def measure(loaded: rows_lib.Loaded, asked: empirical.Asked):
  """A cell for each draft and temperature, with sums of every request.

  Where it is sampled, those of the next seed too: 'again'.
  """
  cells = []
  for temperature in WARM:
    seeds = (asked.seed, asked.seed + 1) if temperature else (asked.seed,)
    each = [
      rows_lib.traces(loaded, temperature, asked.tokens, seed=x) for x in seeds
    ]
    for name in loaded.engines:
      sums = [
        [[len(x.tokens), math.fsum(x.overlap)] for x in found[name]]
        for found in each
      ]
      cell = {'draft': name, 'temperature': temperature, 'requests': sums[0]}
      cells.append(cell | ({'again': sums[1]} if temperature else {}))
  return cells


def markdown(cells: rows_lib.Cells, every: rows_lib.Rows, caption: str) -> str:
  """The paper's rows with ours beside those of the same place."""
  lines, used = [], set()
  for theirs in papers.TABLE3:
    mine = ['not run', '-', '-']
    for name, draft in _beside(every, cells, theirs):
      used.add((name, draft.name))
      mine = _ours(every[name], draft, cells[name])
    greedy, sampled = f'{theirs.greedy:.2f}', f'{theirs.sampled:.2f}'
    lines.append([theirs.target, theirs.draft, greedy, sampled, *mine])
  for name in cells:
    row = every[name]
    for draft in row.drafts:
      if (name, draft.name) not in used:
        mine = _ours(row, draft, cells[name])
        lines.append(['', '', '', '', *mine])
  head = ['target', 'draft', 'T = 0', 'T = 1', 'ours', 'T = 0', 'T = 1']
  return '\n'.join(
    [
      f'{caption} Ours with 95 % intervals over requests.',
      '',
      *page.table(head, lines),
      '',
      _counts(cells),
      '',
      seeds(cells),
      '',
      *empirical.not_run(every, cells, 'leviathan_table3'),
    ]
  )


def claims(
  cells: rows_lib.Cells, every: rows_lib.Rows
) -> list[claims_lib.Claim]:
  """Every alpha; its direction is against the draft above it in the paper."""
  out = []
  for theirs, above in zip(papers.TABLE3, (None, *papers.TABLE3), strict=False):
    if above and above.target != theirs.target:
      above = None
    for name, draft in _beside(every, cells, theirs):
      lower = _beside(every, cells, above) if above else []
      for warm in WARM:
        print_of = lambda x, warm=warm: x.sampled if warm else x.greedy
        sums = _sums(cells[name], draft, warm)
        means = empirical.means(sums, 1)
        extra = {}
        if above and lower:
          base = empirical.means(_sums(cells[name], lower[0][1], warm), 1)
          extra = {
            'against': above.draft,
            'sign': int(np.sign(print_of(theirs) - print_of(above))),
            'apart': intervals.interval(means - base, len(sums)),
          }
        out.append(
          claims_lib.Claim(
            f'{theirs.target}, {theirs.draft}, T = {warm:g}',
            f'{print_of(theirs):.2f}',
            f'{every[name].name}, {draft.name}',
            *papers.printed(print_of(theirs), 2),
            ours=intervals.interval(means, len(sums)),
            **extra,
          )
        )
  return out


def _sums(cells, draft: rows_lib.Draft, warm: float):
  """Of every request: its tokens, and alpha over them."""
  wanted = draft.name, warm
  (x,) = (x for x in cells if (x['draft'], x['temperature']) == wanted)
  return x['requests']


def _beside(every, cells, theirs: papers.Alpha):
  return empirical.beside(every, cells, theirs.target, theirs.draft)


def _ours(row: rows_lib.Row, draft: rows_lib.Draft, cells) -> list[str]:
  """The three cells of ours."""
  shown = [f'{row.name}, {draft.name}']
  for warm in WARM:
    sums = _sums(cells, draft, warm)
    shown.append(page.interval(empirical.interval(sums, 1)))
  return shown


def _counts(cells: rows_lib.Cells) -> str:
  """How many tokens the alphas are means of."""
  told = []
  for name, found in cells.items():
    tokens = {x['temperature']: sum(n for n, _ in x['requests']) for x in found}
    told.append(f'{name} ' + ' and '.join(f'{n:,}' for n in tokens.values()))
  return f'Tokens of the target at T = 0 and at T = 1: {"; ".join(told)}.'


def _differences(cells: rows_lib.Cells) -> Iterator[float]:
  """Of each alpha, how far two seeds are apart, in its standard errors."""
  for found in cells.values():
    for x in found:
      both = [x['requests'], x.get('again', [])]
      if min(map(len, both)) > 1:
        one, two = (empirical.means(sums, 1) for sums in both)
        error = math.hypot(np.std(one[1:]), np.std(two[1:]))
        yield abs(one[0] - two[0]) / error if error else 0.0


def seeds(cells: rows_lib.Cells) -> str:
  """Whether two seeds agree, by Bonferroni's limit for the whole table."""
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
