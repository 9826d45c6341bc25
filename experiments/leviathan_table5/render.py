"""Measures alpha at every lenience on one set of texts, and distance from p."""

from experiments import claims as claims_lib
from experiments import empirical, papers
from experiments import loaded as loaded_lib
from experiments.page import Part
from experiments.rows import Cells, Rows
from specdec_jax.bench.tables import interval

TARGET = 'T5-XXL (EnDe)'


def measure(loaded: loaded_lib.Loaded, asked: empirical.Asked):
  """Makes a cell for each draft, with every request's sums at temperature 1.

  For a request: its tokens, the sum of alpha at lenience 1, then of alpha and
  of the total variation at every other.
  """
  cells = []
  for name, texts in loaded_lib.traces(loaded, 1.0, asked.tokens).items():
    sums = []
    for text in texts:
      tokens = len(text.tokens)
      lossy = (tokens * x for pair in text.rules for x in pair)
      sums.append([tokens, sum(text.overlap), *lossy])
    cells.append({'draft': name, 'requests': sums})
  return cells


def _shown(requests, i: int) -> str:
  """Shows a cell's alpha at the i-th lenience, and its distance from p."""
  if not i:
    return interval(empirical.interval(requests, 1))
  alpha, away = (empirical.interval(requests, 2 * i + j) for j in (0, 1))
  return f'{interval(alpha)}, TV {away.value:.2g}'


NAMES = [f'l = {x:g}' for x in papers.LENIENCE]


def parts(cells: Cells, every: Rows) -> list[Part]:
  ours = [
    x | {'shown': [_shown(x['requests'], i) for i in range(len(NAMES))]}
    for x in empirical.lines(cells, every)
  ]
  at = lambda path, form: [f'{x}={path}.{i}{form}' for i, x in enumerate(NAMES)]
  return [
    Part(
      'Alpha of ours at temperature 1 with its 95 % interval over requests. '
      "TV: total variation between what is emitted and the target's "
      'distribution, which the paper does not give. Every lenience below 1 is '
      'LOSSY.',
      ', '.join(['target', 'draft', *at('shown', '')]),
      ours,
    ),
    Part(
      f'Theirs, {TARGET}.',
      ', '.join(['draft=0', *at('1', ':.2f')]),
      [*papers.TABLE5.items()],
    ),
  ]


def claims(cells: Cells, every: Rows) -> list[claims_lib.Claim]:
  """Claims alphas of the paper's task; growth with lenience is a theorem."""
  out = []
  for draft, alphas in papers.TABLE5.items():
    for name, mine in empirical.beside(every, cells, TARGET, draft):
      (x,) = (x for x in cells[name] if x['draft'] == mine.name)
      for i, theirs in enumerate(alphas):
        cell, place = f'{draft}, {NAMES[i]}', f'{every[name].name}, {mine.name}'
        # 0.8 stands for 0.80, as its neighbours have two decimals.
        theirs = f'{theirs:.2f}', place, *papers.printed(theirs, 2)
        ours = empirical.interval(x['requests'], 2 * i if i else 1)
        out.append(claims_lib.Claim(cell, *theirs, ours, of='acceptance'))
  return out


WHY = 'alpha starts elsewhere; that lenience raises it is a theorem'
TABLE = empirical.Table('leviathan_table5', measure, parts, claims, WHY)
