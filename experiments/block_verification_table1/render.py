"""Tokens a window of two rules from one trace, beside those of the paper."""

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from experiments import claims as claims_lib
from experiments import empirical, page, papers
from experiments import rows as rows_lib
from specdec_jax.analysis import counterfactual, trace
from specdec_jax.bench import metrics


def measure(loaded: rows_lib.Loaded, asked: empirical.Asked):
  """A cell for each draft and gamma, at temperature 1.

  reject, block: tokens a window. gain: block minus reject, paired by request.
  An eagle is left out: after a window's first draft its q depends on its own
  drafts.
  """
  found = rows_lib.traces(loaded, 1.0, asked.tokens, seed=asked.seed)
  cells = []
  for name, texts in found.items():
    if loaded.engines[name].drafter.taps:
      continue
    limit = max(papers.BLOCK_GAMMAS)
    analysed = counterfactual.analyse(trace.Trace({}, texts), limit=limit)
    cells += [
      {
        'draft': name,
        'gamma': x.gamma,
        'tokens': analysed.tokens,
        **{k: getattr(x, k)._asdict() for k in ('reject', 'block', 'gain')},
      }
      for x in analysed.rows
      if x.gamma in papers.BLOCK_GAMMAS
    ]
  return cells


def markdown(cells: rows_lib.Cells, every: rows_lib.Rows, caption: str) -> str:
  theirs = [
    ['PaLM-2-S', x.text, 8, f'{x.reject:.2f}', f'{x.block:.2f}']
    + [f'{x.block / x.reject - 1:+.1%}', 'the paper']
    for x in papers.BLOCK
  ]
  ours = [
    [every[name].name, x['draft'], x['gamma'], *_cells(x), 'ours']
    for name, found in cells.items()
    for x in found
  ]
  head = ['target', 'text, or draft', 'gamma', 'reject', 'block', 'gain', '']
  return '\n'.join(
    [
      f'{caption} Temperature 1; tokens a window, expected over both rules\' '
      'draws along one text of the target (docs/counterfactuals.md), with the '
      '95 % interval of the gain over requests.',
      '',
      *page.table(head, theirs + ours),
      '',
      *toy(),
      '',
      *empirical.not_run(every, cells, 'block_verification_table1'),
    ]
  )  # fmt: skip


def claims(
  cells: rows_lib.Cells, every: rows_lib.Rows
) -> list[claims_lib.Claim]:
  """Block's gain at every gamma, beside the paper's over all of its texts."""
  out = []
  for name, found in cells.items():
    for x in found:
      reject, block = papers.BLOCK_GAMMAS[x['gamma']]
      ends = papers.printed(reject, 2), papers.printed(block, 2)
      base = x['reject']['value']
      gain = _gain(x)
      out.append(
        claims_lib.Claim(
          f'average, gamma = {x["gamma"]}',
          f'{block / reject - 1:+.1%}',
          f'{every[name].name}, {x["draft"]}',
          ends[1][0] / ends[0][1] - 1,
          ends[1][1] / ends[0][0] - 1,
          gain,
          form='{:+.1%}',
          against='reject',
          sign=1,
          apart=gain,
          why=f'{base:.2f} tokens a window under reject for {reject:.2f}',
        )
      )
  return out


def _cells(x: Mapping[str, Any]) -> list[str]:
  shown = [f'{x[rule]["value"]:.2f}' for rule in ('reject', 'block')]
  return [*shown, page.interval(_gain(x), '{:+.1%}')]


def _gain(x: Mapping[str, Any]) -> metrics.Interval:
  """Of block, as a share of what reject emits."""
  base, gain = x['reject']['value'], x['gain'].values()
  return metrics.Interval(*(None if y is None else y / base for y in gain))


def toy() -> list[str]:
  """The paper's example, as a table: theirs, and ours where it differs."""
  lines, equal, count = [], 0, 0
  for gamma, theirs in papers.TOY.items():
    pairs = list(zip(theirs, accepted(gamma), strict=True))
    same = [Fraction(printed) == ours for printed, ours in pairs]
    equal, count = equal + sum(same), count + len(same)
    lines.append(
      [gamma]
      + [
        printed if good else f'{printed}, NOT {ours}'
        for good, (printed, ours) in zip(same, pairs, strict=True)
      ]
    )
  head = ['accepted drafts, gamma', 'reject', 'block', 'the most possible']
  summary = f'{equal} of {count} are equal to the print, as fractions.'
  return [*page.table(head, lines), '', summary]


def accepted(gamma: int) -> tuple[Fraction, Fraction, Fraction]:
  """Expected accepted drafts of the example, exactly, as papers.TOY.

  P(k drafts equal the text and are kept | text) is that of
  analysis.counterfactual; the most possible is the sum of min(p, q) over all
  texts of k tokens.
  """
  p, q = papers.TOY_TARGET, papers.TOY_DRAFT
  reject, block, most = Fraction(0), Fraction(0), Fraction(0)
  for k in range(1, gamma + 1):
    for text in itertools.product(p, repeat=k):
      p_text, ratios = (
        math.prod(p[x] for x in text),
        [q[x] / p[x] for x in text],
      )
      totals = list(itertools.accumulate(ratios, lambda a, b: a * b))
      reject += p_text * math.prod(min(Fraction(1), r) for r in ratios)
      block += p_text * min(Fraction(1), *totals)
      most += p_text * min(Fraction(1), totals[-1])
  return reject, block, most
