"""Benchmarks of arms whose true improvement is known: what would be said?

python tests/bench/simulation.py [runs]

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
  """

  prompts: int
  gammas: int = 1
  drafters: int = 1
  rho: float = 0.0
  lengths: float = 0.5
  improvement: float = 1.0
  spread: float = 0.2
  batch: int = 1


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

  The mean of 1 / gain is 1 / improvement, so that tokens over seconds of
  endlessly many prompts is the improvement.
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
  gain_AP = np.ones((1 + len(names), n))
  gain_AP[1:] = np.exp(case.spread * z_AP + case.spread**2 / 2)
  gain_AP[1:] *= case.improvement
  tokens_P = np.exp(draw(0, case.lengths, n))
  drift_RP = np.exp(draw(0, DRIFT, (REPEATS, n)))
  noise = lambda: np.exp(draw(0, NOISE, (len(gain_AP), REPEATS, n)))
  seconds_ARP = (tokens_P / gain_AP)[:, None] * drift_RP * noise()
  together = lambda x: np.asarray(x).reshape(*x.shape[:-1], n // B, B).sum(-1)
  arms = zip(['plain', *names], together(seconds_ARP), strict=True)
  emitted = [()] * (n // B), together(tokens_P), np.full(n // B, B)
  return {name: timing.Runs(*emitted, x, 0 * x) for name, x in arms}


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


EQUAL = [
  Case(prompts, *arms, lengths)
  for prompts in (6, 8, 14, 28)
  for arms in (
    (1, 1, 0.0),
    (3, 1, 0.0),
    (3, 1, 0.8),
    (5, 1, 0.9),
    (5, 4, 0.0),
    (5, 4, 0.9),
  )
  for lengths in (0.5, 1.0)
] + [
  Case(prompts, 3, 1, 0.8, spread=spread)
  for prompts in (6, 14, 28)
  for spread in (0.05, 0.4)
]  # fmt: skip
BATCHES = [Case(4 * x, 3, 1, 0.8, batch=4) for x in (2, 3, 4, 7)]
FASTER = [
  Case(prompts, 3, drafters, 0.8, improvement=gain, spread=0.3)
  for gain in (1.2, 1.35)
  for drafters in (1, 3)
  for prompts in (6, 14, 24)
]


def main() -> None:
  runs = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
  print(f'{runs} runs a row, {REPEATS} repeats; given, any: called faster')
  print(*Case._fields, '|', *Rates._fields, sep='\t')
  for case in (*EQUAL, *BATCHES, *FASTER):
    found = [f'{100 * x:.1f} %' for x in rates(case, runs)]
    print(*case, '|', *found, sep='\t', flush=True)


if __name__ == '__main__':
  main()
