"""Plots loss, alpha and block efficiency over the steps of training runs.

python scripts/plot.py WORKDIR [WORKDIR...] [--out=curves.png]

Each run has a colour. Without --out: curves.png in the first workdir. Prints
the path. Needs matplotlib, the extra `plots`.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np
from absl import flags

from specdec_jax import program
from specdec_jax.io import files

_OUT = flags.DEFINE_string('out', '', 'file to write')
LOSSES = {'held_out_loss': 'of held-out text', 'loss': 'of each batch'}
# Panel title: the names in metrics.jsonl that it shows.
PANELS = {
  'loss': tuple(LOSSES),
  'alpha, teacher-forced on held-out prompts': ('alpha',),
  'share of drafts accepted, by position in a window': ('alpha_at',),
  'block efficiency: tokens per target call': ('block_efficiency',),
}
# Okabe and Ito's, which the colour-blind can tell apart too.
COLOURS = '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'

# Steps and values [steps, positions].
Curve = tuple[list[int], np.ndarray]


def read(workdir: str) -> dict[str, Curve]:
  """Returns the curve of each name in a run's metrics.jsonl.

  Of a step logged twice, by a resumed run, the last entry counts. What an
  evaluation did not have is NaN.
  """
  path = pathlib.Path(workdir, 'metrics.jsonl')
  found: dict[str, dict[int, np.ndarray]] = {}
  for where, row in files.read_jsonl(path, finished=True):
    if 'step' not in row:
      raise ValueError(f'{where}: has no step: not a line of a training run')
    step = row.pop('step')
    for name, value in row.items():
      found.setdefault(name, {})[step] = np.atleast_1d(np.array(value, float))
  if not {x for names in PANELS.values() for x in names} & found.keys():
    raise ValueError(f'{path}: has no loss, alpha or block efficiency to draw')
  return {name: _curve(at) for name, at in found.items()}


def _curve(at: dict[int, np.ndarray]) -> Curve:
  steps = sorted(at)
  values = np.full((len(steps), max(map(len, at.values()))), np.nan)
  for row, step in zip(values, steps, strict=True):
    row[: len(at[step])] = at[step]
  return steps, values


def draw(runs: dict[str, dict[str, Curve]]):
  """Returns a matplotlib Figure with a panel for all that any run has."""
  from matplotlib import figure, lines

  known = {name for curves in runs.values() for name in curves}
  panels = {title: x for title, x in PANELS.items() if known & set(x)}
  size = 6.4, 1 + 2 * len(panels)
  page = figure.Figure(figsize=size, dpi=160, layout='constrained')
  every = page.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
  for axes, (title, names) in zip(every, panels.items(), strict=True):
    axes.set_title(title, loc='left', fontsize=9)
    axes.grid(alpha=0.3)
    for colour, curves in zip(COLOURS, runs.values(), strict=False):
      for name in filter(curves.get, names):
        _add(axes, name, *curves[name], colour)
  kinds = [
    lines.Line2D([], [], color='0.4', label=label, **_look(name))
    for name, label in LOSSES.items()
    if name in known
  ]
  if kinds:
    every[0].legend(handles=kinds, fontsize=8, loc='upper right')
  every[-1].set_xlabel('step')
  named = zip(COLOURS, runs, strict=False)
  keys = [lines.Line2D([], [], color=x, label=name) for x, name in named]
  page.legend(handles=keys, loc='outside upper left', fontsize=9)
  return page


def _look(name: str) -> dict:
  """How a curve is drawn: evaluations have points, batches a thin line."""
  if name == 'loss':
    return dict(linewidth=0.8, alpha=0.6)
  return dict(linewidth=1.4, marker='o', markersize=3)


def _add(axes, name: str, steps, values, colour: str) -> None:
  """Draws a curve; positions of a window are paler and numbered at the end."""
  for position, column in enumerate(values.T, 1):
    look = dict(color=colour) | _look(name)
    last = np.flatnonzero(np.isfinite(column))
    if name == 'alpha_at' and len(last):
      look |= dict(linewidth=1.0, markersize=2, alpha=0.7 ** (position - 1))
      where = steps[last[-1]], column[last[-1]]
      label = dict(textcoords='offset points', fontsize=8, va='center')
      axes.annotate(str(position), where, (5, 0), color=colour, **label)
    axes.plot(steps, column, **look)


def run(workdirs: list[str]) -> bool:
  if not 1 <= len(workdirs) <= len(COLOURS):
    raise ValueError(f'{len(workdirs)} workdirs: name 1 to {len(COLOURS)}')
  runs = {name: read(name) for name in dict.fromkeys(workdirs)}
  path = _OUT.value or pathlib.Path(workdirs[0], 'curves.png')
  try:
    draw(runs).savefig(path)
  except ImportError as error:
    raise ValueError(f'{error.name}: install the extra `plots`') from error
  except OSError as error:
    raise ValueError(f'out {path}: cannot be written: {error}') from error
  print(path)
  return True


if __name__ == '__main__':
  program.launch(run, positional=True)
