"""Compares two rules' tokens a window on the same texts, and the paper's."""

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from experiments import claims as claims_lib
from experiments import empirical, papers, replay, resampled
from experiments import loaded as loaded_lib
from experiments.page import Part
from experiments.rows import Cells, Rows
from specdec_jax.bench import intervals

# Below 1: draft models alone, on a quarter of the tokens, at the last gamma.
WARM = (0.2, 0.6, 1.0)
LAST = max(papers.BLOCK_GAMMAS)


def measure(loaded: loaded_lib.Loaded, asked: empirical.Asked):
  """Makes a cell for each draft, gamma and temperature.

  reject, block: tokens a window. gain: block minus reject, paired by request.
  No eagle: after a window's first draft its q depends on its own drafts.
  """
  models = {x.name for x in loaded.row.drafts if x.method == 'lm'}
  cells = []
  for warm in WARM if models else WARM[-1:]:
    tokens = asked.tokens if warm == 1 else asked.tokens // 4
    found = loaded_lib.traces(loaded, warm, tokens)
    for name, texts in found.items():
      if loaded.engines[name].drafter.taps:
        continue
      if warm == 1 or name in models:
        cells += _cells(name, texts, warm)
  return cells


def _cells(name: str, texts, warm: float) -> list[dict[str, Any]]:
  tokens = sum(len(x.tokens) for x in texts)
  return [
    {
      'draft': name,
      'temperature': warm,
      'gamma': x.gamma,
      'tokens': tokens,
      **{k: getattr(x, k)._asdict() for k in ('reject', 'block', 'gain')},
    }
    for x in replay.efficiencies(texts, LAST)
    if x.gamma == LAST or (warm == 1 and x.gamma in papers.BLOCK_GAMMAS)
  ]


def _gain(x: Mapping[str, Any]) -> intervals.Interval:
  """Returns block's gain, as a share of what reject emits."""
  base, gain = x['reject']['value'], x['gain'].values()
  return intervals.Interval(*(None if y is None else y / base for y in gain))


PERCENT = '{:+.1%}'


def parts(cells: Cells, every: Rows) -> list[Part]:
  ours = [x | {'share': _gain(x)} for x in empirical.lines(cells, every)]
  theirs = [
    x._asdict() | {'share': x.block / x.reject - 1} for x in papers.BLOCK
  ]
  return [
    Part(
      "Ours: tokens a window, expected over both rules' draws along one text "
      'of the target (experiments/replay.py), with the 95 % interval of the '
      'gain over requests.',
      'target, draft, T=temperature:g, gamma, reject=reject.value:.2f, '
      'block=block.value:.2f, gain=share:+.1%',
      ours,
    ),
    Part(
      'Theirs, PaLM-2-S with PaLM-2-XXS, gamma 8.',
      'text, reject:.2f, block:.2f, gain=share:+.1%',
      theirs,
    ),
    toy(),
  ]


def claims(cells: Cells, every: Rows) -> list[claims_lib.Claim]:
  """Puts block's gain at every gamma beside the paper's over all its texts.

  Each target's draft with the most tokens a window under reject counts, its
  interval wide enough for that choice. That there is a gain is a theorem.
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
      least, most = papers.printed(reject, 2)
      low, high = papers.printed(block, 2)
      theirs = block / reject, low / most, high / least
      prints, *ends = (y - 1 for y in theirs)
      cell, place = f'average, gamma = {x["gamma"]}', every[name].name
      given = cell, PERCENT.format(prints), f'{place}, {x["draft"]}', *ends
      gain, mine = resampled.one_of(_gain(x), drafts), x['reject']['value']
      why = f'{mine:.2f} tokens a window under reject, for {reject:.2f}'
      made = claims_lib.Claim(*given, gain, PERCENT, 'tokens a window', why=why)
      out.append(made)
  return out


def toy() -> Part:
  """Compares the paper's example: accepted drafts, and ours if they differ."""
  shown, equal, count = [], 0, 0
  for gamma, theirs in papers.TOY.items():
    pairs = list(zip(theirs, accepted(gamma), strict=True))
    good = [Fraction(printed) == ours for printed, ours in pairs]
    equal, count = equal + sum(good), count + len(good)
    told = [
      printed if same else f'{printed}, NOT {ours}'
      for same, (printed, ours) in zip(good, pairs, strict=True)
    ]
    shown.append((gamma, told))
  return Part(
    f'Accepted drafts of their example: {equal} of {count} of ours are equal '
    'to the print, as fractions.',
    'gamma=0, reject=1.0, block=1.1, the most possible=1.2',
    shown,
  )


def accepted(gamma: int) -> tuple[Fraction, Fraction, Fraction]:
  """Computes papers.TOY's expected accepted drafts, exactly.

  P(k drafts equal the text and are kept | text) is that of
  experiments/replay.py; the most possible is the sum of min(p, q) over all
  texts with k tokens.
  """
  p, q = papers.TOY_TARGET, papers.TOY_DRAFT
  reject, block, most = Fraction(0), Fraction(0), Fraction(0)
  for k in range(1, gamma + 1):
    for text in itertools.product(p, repeat=k):
      p_text = math.prod(p[x] for x in text)
      ratios = [q[x] / p[x] for x in text]
      totals = list(itertools.accumulate(ratios, lambda a, b: a * b))
      reject += p_text * math.prod(min(Fraction(1), r) for r in ratios)
      block += p_text * min(Fraction(1), *totals)
      most += p_text * min(Fraction(1), totals[-1])
  return reject, block, most


WHY = 'the gain depends on the pair; ours are on both sides'
NAME = 'block_verification_table1'
TABLE = empirical.Table(NAME, measure, parts, claims, WHY)
