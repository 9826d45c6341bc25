"""Benchmarks of arms whose true improvement is known: what would be said?

python tests/bench/simulation.py [runs] [words of a group's name ...]

Clocks are drawn, and go through what the benchmark makes of them: the
intervals, the choice of a gamma and of a drafter, the verdict.
"""

import pathlib
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import numpy as np

from specdec_jax.bench import records, timing, verdict


class Case(NamedTuple):
  """A benchmark: arms of one true improvement at `gammas` of every drafter.

  rho: correlation of a drafter's gains at its gammas, over prompts.
  lengths: standard deviation of the logarithm of tokens; spread: of gains.
  batch: prompts decoded together; prompts: in all.
  categories: that prompts come from in turn, drawn anew for every run; 0 is
    none. share: of the variance of gains, what a category has in common.
  longer: correlation of the logarithms of gain and tokens.
  first: tokens of the first prompt over those of all others; 0: as drawn.
  """

  prompts: int
  gammas: int = 1
  drafters: int = 1
  rho: float = 0.0
  lengths: float = 0.5
  improvement: float = 1.0
  spread: float = 0.2
  batch: int = 1
  categories: int = 0
  share: float = 0.0
  longer: float = 0.0
  first: float = 0.0


class Rates(NamedTuple):
  """Of all runs, the share that says so.

  given: that the first drafter is faster; any: that one of them is.
  slower: that the first is slower at every gamma.
  holds: whose interval of the best method of all holds the truth.
  width: median of half that interval, as a share.
  """

  given: float
  any: float
  slower: float
  holds: float
  width: float


# A repeat is slower or faster by DRIFT in all arms, and by NOISE in each.
REPEATS, DRIFT, NOISE = 2, 0.2, 0.03


def measured(case: Case, rng: np.random.Generator) -> dict[str, timing.Runs]:
  """Clocks of plain decoding and of every arm.

  Tokens over seconds of endlessly many prompts is the improvement: the mean of
  1 / gain, where each token counts, is 1 / improvement.
  """
  n, B, draw = case.prompts, case.batch, rng.normal
  names = [
    f'{drafter} {gamma}'
    for drafter in range(case.drafters)
    for gamma in range(1, case.gammas + 1)
  ]
  shared_AP = np.repeat(draw(size=(case.drafters, n)), case.gammas, 0)
  own_AP = draw(size=(len(names), n))
  z_AP = case.rho**0.5 * shared_AP + (1 - case.rho) ** 0.5 * own_AP
  kind_P = np.arange(n) % (case.categories or n)
  if case.categories:
    alike_AC = draw(size=(case.drafters, case.categories))
    alike_AP = np.repeat(alike_AC, case.gammas, 0)[:, kind_P]
    z_AP = case.share**0.5 * alike_AP + (1 - case.share) ** 0.5 * z_AP
  long_P = draw(size=n)
  z_AP = case.longer * long_P + (1 - case.longer**2) ** 0.5 * z_AP
  # Where long answers gain more, their tokens count for more.
  mean = case.spread**2 / 2 - case.spread * case.lengths * case.longer
  gain_AP = np.ones((1 + len(names), n))
  gain_AP[1:] = case.improvement * np.exp(case.spread * z_AP + mean)
  tokens_P = np.exp(case.lengths * long_P)
  if case.first:
    tokens_P[0] = case.first * tokens_P[1:].sum()
  drift_RP = np.exp(draw(0, DRIFT, (REPEATS, n)))
  noise = lambda: np.exp(draw(0, NOISE, (len(gain_AP), REPEATS, n)))
  seconds_ARP = (tokens_P / gain_AP)[:, None] * drift_RP * noise()
  together = lambda x: np.asarray(x).reshape(*x.shape[:-1], n // B, B).sum(-1)
  arms = zip(['plain', *names], together(seconds_ARP), strict=True)
  # A batch is of several.
  of = kind_P.astype(str) if case.categories and B == 1 else [''] * (n // B)
  emitted = {}, [()] * (n // B), together(tokens_P), np.full(n // B, B), of
  repeats_G = np.full(n // B, REPEATS)
  return {
    name: timing.Runs(*emitted, repeats_G, x.mean(0), 0 * x[0])
    for name, x in arms
  }


def rates(case: Case, runs: int, seed: int = 0) -> Rates:
  """Benchmarks the case that often."""
  rng, said = np.random.default_rng(seed), []
  for _ in range(runs):
    found = timing.improvements(measured(case, rng))
    rows = [
      records.Row(name, name[0], int(name[-1]), None, improvement=x)
      for name, x in list(found.items())[1:]
    ]
    chosen = verdict.by_drafter(rows)
    first, best = chosen['0'][0].improvement, next(iter(chosen.values()))[0]
    x = best.improvement
    said.append(
      (
        first.outcome == 'win',
        x.outcome == 'win',
        first.outcome == 'loss',
        x.low <= case.improvement <= x.high,
        x.width,
      )
    )
  *shares, width_S = zip(*said, strict=True)
  return Rates(*map(float, np.mean(shares, 1)), float(np.median(width_S)))


GROUPS = {
  'equal arms': [
    Case(prompts, *arms, lengths)
    for prompts in (6, 8, 14, 28)
    for arms in (
      *((1, 1, 0.0), (3, 1, 0.0), (3, 1, 0.8)),
      *((5, 1, 0.9), (5, 4, 0.0), (5, 4, 0.9)),
    )
    for lengths in (0.5, 1.0)
  ]
  + [
    Case(prompts, 3, 1, 0.8, spread=spread)
    for prompts in (6, 14, 28)
    for spread in (0.05, 0.4)
  ],
  'in batches': [Case(4 * x, 3, 1, 0.8, batch=4) for x in (2, 3, 4, 7)],
  '6 or 7 categories': [
    Case(prompts, 2, 3, 0.8, categories=count, share=share)
    for prompts, count in ((14, 7), (28, 7), (24, 6))
    for share in (0.5, 0.8)
  ],
  '4 categories': [
    Case(24, 2, 3, 0.8, categories=4, share=x) for x in (0.5, 0.8)
  ],
  'one prompt dominates': [
    Case(x, 2, 3, 0.8, first=y) for x in (14, 28) for y in (1, 10)
  ],
  'short answers gain more': [
    Case(x, 2, 3, 0.8, longer=-0.5) for x in (14, 28)
  ],
  'faster arms': [
    Case(prompts, 3, drafters, 0.8, improvement=gain, spread=0.3)
    for gain in (1.2, 1.35)
    for drafters in (1, 3)
    for prompts in (6, 14, 24)
  ],
}


def span(values: list[float]) -> str:
  low, high = (f'{100 * end(values):.1f}' for end in (min, max))
  return f'{low} to {high} %'


def main() -> None:
  runs = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
  print(f'{runs} runs a row, {REPEATS} repeats; given, any: called faster')
  print(*Case._fields, '|', *Rates._fields, sep='\t')
  told, wanted = [], ' '.join(sys.argv[2:])
  for name in (x for x in GROUPS if wanted in x):
    every = []
    for case in GROUPS[name]:
      every.append(rates(case, runs))
      found = [f'{100 * x:.1f} %' for x in every[-1]]
      print(*case, '|', *found, sep='\t', flush=True)
    faster, holds = ([getattr(x, y) for x in every] for y in ('any', 'holds'))
    told.append(f'{name}: any faster {span(faster)}, holds {span(holds)}')
  print(*told, sep='\n')


if __name__ == '__main__':
  main()
