"""Plots loss, alpha and block efficiency over the steps of training runs.

python scripts/plot.py WORKDIR [WORKDIR...] [--out=curves.png]

Each run has its own line style. Without --out: curves.png in the first workdir.
Prints the path. Needs matplotlib, the extra `plots`.
"""

import importlib.util
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from specdec_jax import program  # noqa: E402
from specdec_jax.io import files  # noqa: E402

_OUT = flags.DEFINE_string('out', '', 'file to write')
# Panel title: names in metrics.jsonl that it shows, pale ones last. alpha_at is
# a list: the share of drafts accepted at each position.
PANELS = {
  'loss; pale: training': ('held_out_loss', 'loss'),
  'alpha, teacher-forced; pale: drafts kept at each position': (
    'alpha',
    'alpha_at',
  ),
  'block efficiency: tokens per target call': ('block_efficiency',),
}
STYLES = ('-', '--', '-.', ':', (0, (6, 1, 1, 1, 1, 1)))


def read(workdir: str) -> dict[str, tuple[list[int], np.ndarray]]:
  """Steps and values [steps, positions] of each name in a run's metrics.jsonl.

  Of a step logged twice, by a resumed run, the last entry counts. Positions
  that an evaluation did not have are NaN.
  """
  path = pathlib.Path(workdir, 'metrics.jsonl')
  found: dict[str, dict[int, np.ndarray]] = {}
  for where, row in files.read_jsonl(path, finished=True):
    if 'step' not in row:
      raise ValueError(f'{where}: has no step: not a line of a training run')
    for name in {x for names in PANELS.values() for x in names} & row.keys():
      values = np.atleast_1d(np.array(row[name], float))
      found.setdefault(name, {})[row['step']] = values
  if not found:
    raise ValueError(f'{path}: has no loss, alpha or block efficiency to draw')
  return {name: _table(at) for name, at in found.items()}


def _table(at: dict[int, np.ndarray]) -> tuple[list[int], np.ndarray]:
  steps = sorted(at)
  values = np.full((len(steps), max(map(len, at.values()))), np.nan)
  for row, step in zip(values, steps, strict=True):
    row[: len(at[step])] = at[step]
  return steps, values


def draw(runs):
  """A matplotlib Figure with a panel for all that any run has."""
  from matplotlib import figure

  known = {name for curves in runs.values() for name in curves}
  panels = {title: x for title, x in PANELS.items() if known & set(x)}
  size = 6.4, 0.8 + 2 * len(panels)
  page = figure.Figure(figsize=size, dpi=160, layout='constrained')
  every = page.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
  for axes, (title, (main, *pale)) in zip(every, panels.items(), strict=True):
    axes.set_title(title, loc='left', fontsize=9)
    for style, (label, curves) in zip(STYLES, runs.items(), strict=False):
      for name in filter(curves.get, pale):
        look = dict(linestyle=style, linewidth=0.8, color='0.65')
        axes.plot(*curves[name], **look)
      if main in curves:
        axes.plot(*curves[main], linestyle=style, color='0', label=label)
  every[-1].set_xlabel('step')
  if len(runs) > 1:
    lines = every[-1].get_legend_handles_labels()
    page.legend(*lines, loc='outside lower center')
  return page


def run(workdirs: list[str]) -> bool:
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError('curves need matplotlib: install the extra `plots`')
  if not 1 <= len(workdirs) <= len(STYLES):
    raise ValueError(f'{len(workdirs)} workdirs: name 1 to {len(STYLES)}')
  path = _OUT.value or pathlib.Path(workdirs[0], 'curves.png')
  page = draw({name: read(name) for name in dict.fromkeys(workdirs)})
  try:
    page.savefig(path)
  except OSError as error:
    raise ValueError(f'out {path}: cannot be written: {error}') from error
  print(path)
  return True


if __name__ == '__main__':
  program.launch(run, positional=True)
