"""Alpha under every lenience from one trace, with the distance from p."""

from experiments import claims as claims_lib
from experiments import empirical, page, papers
from experiments import rows as rows_lib
from specdec_jax.bench import intervals

TARGET = 'T5-XXL (EnDe)'


def measure(loaded: rows_lib.Loaded, asked: empirical.Asked):
  """A cell for each draft, with sums of every request at temperature 1.

  Of a request: its tokens, the sum of alpha at lenience 1, then of alpha and of
  the total variation at every other.
  """
  found = rows_lib.traces(loaded, 1.0, asked.tokens, seed=asked.seed)
  return [
    {'draft': name, 'requests': [_sums(x) for x in texts]}
    for name, texts in found.items()
  ]


def _sums(text) -> list[float]:
  tokens = len(text.tokens)
  lossy = (tokens * x for pair in text.rules for x in pair)
  return [tokens, sum(text.overlap), *lossy]


def markdown(cells: rows_lib.Cells, every: rows_lib.Rows, caption: str) -> str:
  """Theirs, then ours, a line for each draft."""
  lines = [
    [TARGET, draft, *map(str, alphas), 'the paper']
    for draft, alphas in papers.TABLE5.items()
  ]
  for name, found in cells.items():
    for x in found:
      values = [page.interval(empirical.interval(x['requests'], 1))]
      for i in range(len(rows_lib.LOSSY)):
        alpha, away = (
          empirical.interval(x['requests'], 2 + 2 * i + j) for j in (0, 1)
        )
        values.append(f'{page.interval(alpha)}, TV {away.value:.2g}')
      lines.append([every[name].name, x['draft'], *values, 'ours'])
  head = ['target', 'draft', *(f'l = {x:g}' for x in papers.LENIENCE), '']
  return '\n'.join(
    [
      f'{caption} Temperature 1. Ours with 95 % intervals over requests. TV: '
      "total variation between what is emitted and the target's distribution, "
      'which the paper does not give. Every lenience below 1 is LOSSY.',
      '',
      *page.table(head, lines),
      '',
      *empirical.not_run(every, cells, 'leviathan_table5'),
    ]
  )


def claims(
  cells: rows_lib.Cells, every: rows_lib.Rows
) -> list[claims_lib.Claim]:
  """Every alpha of the paper's task; its direction is against lenience 1."""
  out = []
  for draft, alphas in papers.TABLE5.items():
    found = empirical.beside(every, cells, TARGET, draft)
    for name, mine in found:
      (x,) = (x for x in cells[name] if x['draft'] == mine.name)
      exact, count = empirical.means(x['requests'], 1), len(x['requests'])
      for i, (lenience, theirs) in enumerate(
        zip(papers.LENIENCE, alphas, strict=True)
      ):
        column = 2 * i if i else 1
        means = empirical.means(x['requests'], column)
        out.append(
          claims_lib.Claim(
            f'{draft}, l = {lenience:g}',
            f'{theirs:.2f}',
            f'{every[name].name}, {mine.name}',
            # 0.8 stands for 0.80, as its neighbours have two decimals.
            *papers.printed(theirs, 2),
            ours=intervals.interval(means, count),
            against='l = 1',
            sign=int(i > 0),
            apart=intervals.interval(means - exact, count),
          )
        )
  return out
