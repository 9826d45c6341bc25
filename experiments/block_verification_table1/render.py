"""Tokens a window of two rules from one trace, beside those of the paper."""

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from experiments import claims as claims_lib
from experiments import empirical, page, papers, replay
from experiments import rows as rows_lib
from specdec_jax.bench import intervals

# Below 1: draft models alone, on a quarter of the tokens, at the last gamma.
WARM = (0.2, 0.6, 1.0)


def measure(loaded: rows_lib.Loaded, asked: empirical.Asked):
  """A cell for each draft, gamma and temperature.

  reject, block: tokens a window. gain: block minus reject, paired by request.
  An eagle is left out: after a window's first draft its q depends on its own
  drafts.
  """
  models = {x.name for x in loaded.row.drafts if x.method == 'lm'}
  cells = []
  for warm in WARM if models else WARM[-1:]:
    tokens = asked.tokens if warm == 1 else asked.tokens // 4
    found = rows_lib.traces(loaded, warm, tokens, seed=asked.seed)
    for name, texts in found.items():
      if warm == 1 or name in models:
        cells += _cells(loaded, name, texts, warm)
  return cells


def _cells(loaded: rows_lib.Loaded, name: str, texts, warm: float):
  if loaded.engines[name].drafter.taps:
    return []
  limit = max(papers.BLOCK_GAMMAS)
  tokens = sum(len(x.tokens) for x in texts)
  return [
    {
      'draft': name,
      'temperature': warm,
      'gamma': x.gamma,
      'tokens': tokens,
      **{k: getattr(x, k)._asdict() for k in ('reject', 'block', 'gain')},
    }
    for x in replay.efficiencies(texts, limit)
    if x.gamma == limit or (warm == 1 and x.gamma in papers.BLOCK_GAMMAS)
  ]


def markdown(cells: rows_lib.Cells, every: rows_lib.Rows, caption: str) -> str:
  theirs = [
    ['PaLM-2-S', x.text, 8, f'{x.reject:.2f}', f'{x.block:.2f}']
    + [f'{x.block / x.reject - 1:+.1%}', 'the paper']
    for x in papers.BLOCK
  ]
  ours = [
    [every[name].name, x['draft'], x['gamma'], *_shown(x), 'ours']
    for name, found in cells.items()
    for x in found
    if x['temperature'] == 1
  ]
  head = ['target', 'text, or draft', 'gamma', 'reject', 'block', 'gain', '']
  return '\n'.join(
    [
      f'{caption} Temperature 1; tokens a window, expected over both rules\' '
      'draws along one text of the target (experiments/replay.py), with the '
      '95 % interval of the gain over requests.',
      '',
      *page.table(head, theirs + ours),
      '',
      *_cooler(cells, every),
      *toy(),
      '',
      *empirical.not_run(every, cells, 'block_verification_table1'),
    ]
  )  # fmt: skip


def claims(
  cells: rows_lib.Cells, every: rows_lib.Rows
) -> list[claims_lib.Claim]:
  """Block's gain at every gamma, beside the paper's over all of its texts: of
  each target that of the draft with the most tokens a window under reject, its
  interval wide enough for that choice.
  """
  out = []
  for name, found in cells.items():
    warm = [x for x in found if x['temperature'] == 1]
    best = max(warm, key=lambda x: x['reject']['value'])['draft']
    drafts = len({x['draft'] for x in warm})
    for x in warm:
      if x['draft'] != best:
        continue
      reject, block = papers.BLOCK_GAMMAS[x['gamma']]
      ends = papers.printed(reject, 2), papers.printed(block, 2)
      base = x['reject']['value']
      gain = intervals.one_of(_gain(x), drafts)
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


def _cooler(cells: rows_lib.Cells, every: rows_lib.Rows) -> list[str]:
  """Block's gain of draft models at every temperature, at the last gamma."""
  last, lines = max(papers.BLOCK_GAMMAS), []
  for name, found in cells.items():
    shown = {
      (x['draft'], x['temperature']): page.interval(_gain(x), '{:+.1%}')
      for x in found
      if x['gamma'] == last
    }
    for draft in dict.fromkeys(x['draft'] for x in found):
      if (draft, WARM[0]) in shown:
        gains = [shown[draft, warm] for warm in WARM]
        lines.append([every[name].name, draft, *gains])
  head = ['gain by temperature', 'draft', *(f'T = {x:g}' for x in WARM)]
  return [*page.table(head, lines), ''] if lines else []


def _shown(x: Mapping[str, Any]) -> list[str]:
  shown = [f'{x[rule]["value"]:.2f}' for rule in ('reject', 'block')]
  return [*shown, page.interval(_gain(x), '{:+.1%}')]


def _gain(x: Mapping[str, Any]) -> intervals.Interval:
  """Of block, as a share of what reject emits."""
  base, gain = x['reject']['value'], x['gain'].values()
  return intervals.Interval(*(None if y is None else y / base for y in gain))


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
  experiments/replay.py; the most possible is the sum of min(p, q) over all
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
