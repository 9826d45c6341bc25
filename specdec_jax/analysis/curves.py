"""Plots loss, alpha and block efficiency over the steps of training runs."""

import importlib.util
import json
import pathlib
from collections.abc import Sequence

import numpy as np

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
_NAMES = {name for names in _PANELS.values() for name in names}
_STYLES = ('-', '--', '-.', ':', (0, (6, 1, 1, 1, 1, 1)))

# Name -> (steps, values); alpha_at gives one curve for each position.
Curves = dict[str, list[tuple[list[int], list[float]]]]


def read(workdir: pathlib.Path) -> Curves:
  """The curves in the metrics.jsonl of a run.

  Of a step logged twice, by a resumed run, the last entry is used. An
  unfinished last line is left out.

  Raises:
    ValueError: no metrics.jsonl, a damaged line, or nothing to draw.
  """
  path = workdir / 'metrics.jsonl'
  try:
    *lines, _ = path.read_text('utf-8').split('\n')
  except OSError as error:
    raise ValueError(
      f'{path}: cannot be read ({error.strerror}): name the workdir of a '
      'training run'
    ) from error
  found: dict[str, dict[int, list[float]]] = {}
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
      for name in _NAMES & set(row):
        values = np.atleast_1d(np.array(row[name], float)).tolist()
        found.setdefault(name, {})[int(row['step'])] = values
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f'{path}:{number}: not a line of metrics ({error!r})'
      ) from error
  if not found:
    raise ValueError(f'{path}: has no loss, alpha or block efficiency to draw')
  return {
    name: [
      (sorted(at), list(values))
      for values in zip(*(at[step] for step in sorted(at)), strict=False)
    ]
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
  page = figure(runs)
  path = pathlib.Path(out or pathlib.Path(workdirs[0]) / 'curves.png')
  try:
    page.savefig(path)
  except OSError as error:
    raise ValueError(
      f'out {path}: cannot be written ({error.strerror}): name another'
    ) from error
  return path


def figure(runs: dict[str, Curves]):
  """A matplotlib Figure with an axes for each panel that has a curve."""
  from matplotlib import figure as figure_lib

  panels = {
    title: names
    for title, names in _PANELS.items()
    if any(name in curves for curves in runs.values() for name in names)
  }
  page = figure_lib.Figure(
    figsize=(6.4, 0.8 + 2 * len(panels)), dpi=160, layout='constrained'
  )
  every = page.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
  for axes, (title, (main, *pale)) in zip(every, panels.items(), strict=True):
    axes.set_title(title, loc='left', fontsize=9)
    for style, (label, curves) in zip(_STYLES, runs.items(), strict=False):
      look = dict(linestyle=style, linewidth=0.8, color='0.65')
      for name in pale:
        for steps, values in curves.get(name, ()):
          axes.plot(steps, values, **look)
      for steps, values in curves.get(main, ()):
        axes.plot(steps, values, linestyle=style, color='0', label=label)
  every[-1].set_xlabel('step')
  if len(runs) > 1:
    page.legend(
      *every[-1].get_legend_handles_labels(), loc='outside lower center'
    )
  return page
