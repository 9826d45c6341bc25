"""Plots loss, alpha and block efficiency over the steps of training runs."""

import importlib.util
import pathlib
from collections.abc import Sequence

import numpy as np

from specdec_jax.io import files

# Panel title: names in metrics.jsonl that it shows, pale ones last. alpha_at is
# a list: the share of drafts accepted at each position.
_PANELS = {
  'loss; pale: training': ('held_out_loss', 'loss'),
  'alpha, teacher-forced; pale: drafts kept at each position': (
    'alpha',
    'alpha_at',
  ),
  'block efficiency: tokens per target call': ('block_efficiency',),
}
_STYLES = ('-', '--', '-.', ':', (0, (6, 1, 1, 1, 1, 1)))

# Name -> (steps, [values of each step]); alpha_at has several, others one.
Curves = dict[str, tuple[list[int], np.ndarray]]


def read(workdir: pathlib.Path) -> Curves:
  """The curves in the metrics.jsonl of a run.

  Of a step logged twice, by a resumed run, the last entry is used. An
  unfinished last line is left out.

  Raises:
    ValueError: no metrics.jsonl, a damaged line, or nothing to draw.
  """
  path = workdir / 'metrics.jsonl'
  found: dict[str, dict[int, np.ndarray]] = {}
  for _, row in files.read_jsonl(path, finished=True):
    for name in {x for names in _PANELS.values() for x in names} & set(row):
      values = np.atleast_1d(np.array(row[name], float))
      found.setdefault(name, {})[row['step']] = values
  if not found:
    raise ValueError(f'{path}: has no loss, alpha or block efficiency to draw')
  return {
    name: (sorted(at), np.stack([at[step] for step in sorted(at)]))
    for name, at in found.items()
  }


def draw(workdirs: Sequence[str], out: str = '') -> pathlib.Path:
  """Plots up to five runs, each in its own line style, and writes a PNG.

  Args:
    workdirs: of training runs; they name the curves.
    out: the file; empty for curves.png in the first workdir.

  Returns:
    The path of the file.

  Raises:
    ValueError: no matplotlib, the wrong number of workdirs, or see read.
  """
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError('curves need matplotlib: install the extra `plots`')
  if not 1 <= len(workdirs) <= len(_STYLES):
    raise ValueError(f'{len(workdirs)} workdirs: name 1 to {len(_STYLES)}')
  runs = {name: read(pathlib.Path(name)) for name in dict.fromkeys(workdirs)}
  path = pathlib.Path(out or pathlib.Path(workdirs[0]) / 'curves.png')
  try:
    figure(runs).savefig(path)
  except OSError as error:
    raise ValueError(
      f'out {path}: cannot be written ({error.strerror}): name another'
    ) from error
  return path


def figure(runs: dict[str, Curves]):
  """A matplotlib Figure with an axes for each panel that has a curve."""
  from matplotlib import figure as figure_lib

  known = {name for curves in runs.values() for name in curves}
  panels = {title: x for title, x in _PANELS.items() if known & set(x)}
  page = figure_lib.Figure(
    figsize=(6.4, 0.8 + 2 * len(panels)), dpi=160, layout='constrained'
  )
  every = page.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
  for axes, (title, (main, *pale)) in zip(every, panels.items(), strict=True):
    axes.set_title(title, loc='left', fontsize=9)
    for style, (label, curves) in zip(_STYLES, runs.items(), strict=False):
      for name in filter(curves.get, pale):
        look = dict(linestyle=style, linewidth=0.8, color='0.65')
        axes.plot(*curves[name], **look)
      if main in curves:
        axes.plot(*curves[main], linestyle=style, color='0', label=label)
  every[-1].set_xlabel('step')
  if len(runs) > 1:
    page.legend(
      *every[-1].get_legend_handles_labels(), loc='outside lower center'
    )
  return page
