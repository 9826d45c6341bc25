"""Compares every trained draft's tokens a window: what distillation gains.

A cell has 'emitted' and 'calls', a list each: tokens, target calls, by prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import claims as claims_lib
from experiments import empirical, papers, replay, resampled
from experiments import loaded as loaded_lib
from experiments.distillspec_t5 import train
from experiments.page import Part
from experiments.rows import Cells, Rows
from specdec_jax import build
from specdec_jax.bench import intervals

WARM = (0.0, 1.0)
GAMMA = 4
PERCENT = '{:+.1%}'
AT_ONCE = 5  # drafts whose probabilities fit in memory together


def measure(loaded: loaded_lib.Loaded, asked: empirical.Asked):
  """Makes cells by training and temperature: tokens and windows by prompt."""
  found = list(train.trained(loaded.row).items())
  cells = []
  for i in range(0, len(found), AT_ONCE):
    engines = {
      '/'.join(names): build.engine(
        loaded.experiment.target,
        build.load(str(path)),
        gamma=GAMMA,
        options=loaded.plain.options,
      )
      for names, path in found[i : i + AT_ONCE]
    }
    part = loaded._replace(engines=engines, traced={})
    for warm in WARM:
      traces = loaded_lib.traces(part, warm, asked.tokens)
      cells += [
        dict(zip(('source', 'divergence'), name.split('/'), strict=True))
        | {'temperature': warm}
        | _counts(texts)
        for name, texts in traces.items()
      ]
  return cells


def _counts(texts) -> dict[str, Any]:
  """Counts each text's tokens, expected windows, and alpha over its tokens."""
  ratios = [replay.ratios(x) for x in texts]
  windows_BGN = replay.count(ratios, replay.reject, GAMMA)
  return {
    'emitted': [len(x.tokens) for x in texts],
    'calls': windows_BGN[:, GAMMA].sum(-1).tolist(),
    'alpha': float(np.concatenate([x.overlap for x in texts]).mean()),
  }


def _parts(cells: Sequence[Mapping[str, Any]], warm: float):
  """Splits a temperature's cells: (cross-entropy's, distillation's)."""
  here = [dict(x) for x in cells if x['temperature'] == warm]
  (base,) = (x for x in here if not x['source'])
  return base, [x for x in here if x['source']]


def _efficiency(cell: Mapping[str, Any], half: slice = slice(None)):
  """Computes tokens a target call on these prompts, then on resampled ones."""
  emitted, calls = (
    np.asarray(cell[x][half], float) for x in ('emitted', 'calls')
  )
  times_RB = resampled.draws(len(emitted))
  return (times_RB @ emitted) / (times_RB @ calls)


def gain(cell, base, half: slice = slice(None)) -> intervals.Interval:
  """Computes a cell's gain over cross-entropy, as a share, paired by prompt."""
  more_R = _efficiency(cell, half) / _efficiency(base, half) - 1
  return resampled.interval(more_R, len(cell['calls'][half]))


def best(cells, warm: float) -> tuple[dict[str, Any], intervals.Interval]:
  """Finds (the best cell on every other prompt, its gain on those between)."""
  base, rest = _parts(cells, warm)
  chosen = max(rest, key=lambda x: _efficiency(x, slice(0, None, 2))[0])
  return chosen, gain(chosen, base, slice(1, None, 2))


def parts(cells: Cells, every: Rows) -> list[Part]:
  ours = []
  for name, found in cells.items():
    for warm in WARM:
      base, rest = _parts(found, warm)
      gains = [resampled.one_of(gain(x, base), len(rest)) for x in rest]
      for x, more in zip((base, *rest), (None, *gains), strict=True):
        shown = {
          'draft': every[name].name,
          'text': x['source'] or 'captions',
          'trained': x['divergence'] or train.BASELINE,
          'window': float(_efficiency(x)[0]),
          'gain': more,
        }
        ours.append(x | shown)
  return [
    Part(
      f'Ours, gamma {GAMMA}; every training from one draft after '
      'cross-entropy, as many steps. gain: of tokens a window over more '
      'cross-entropy, with 95 % intervals over captions, wide enough to look '
      'at all of a temperature at once.',
      'draft, T=temperature:g, text of=text, trained by=trained, alpha:.3f, '
      'tokens a window=window:.2f, gain:+.1%',
      ours,
    )
  ]


def claims(cells: Cells, every: Rows) -> list[claims_lib.Claim]:
  """Claims the best cell's gain, on captions that did not choose it.

  The paper's is of T5-small for T5-XL, the best of each task.
  """
  out = []
  low, high = papers.DISTILLSPEC
  for name, found in cells.items():
    for warm in WARM:
      chosen, more = best(found, warm)
      base, _ = _parts(found, warm)
      cell = f'speed over cross-entropy, T = {warm:g}'
      trained = f'{chosen["divergence"]} on {chosen["source"]}'
      place = f'{every[name].name}, {trained}'
      given = cell, f'{low:+.0%} to {high:+.0%}', place, low, high, more
      against = dict(against=train.BASELINE, sign=1, apart=more)
      against['why'] = f'alpha {chosen["alpha"]:.2f} for {base["alpha"]:.2f}'
      claim = claims_lib.Claim(*given, PERCENT, 'tokens a window', **against)
      out.append(claim)
  return out


TABLE = empirical.Table(
  'distillspec_t5',
  measure,
  parts,
  claims,
  why='a target of 77M on captions, 200 steps a training',
  theirs='',
  rows=train.rows,
)
