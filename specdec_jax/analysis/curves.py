"""Loss, alpha and block efficiency over the steps of runs, as one figure."""

import importlib.util
import json
import math
import os
import pathlib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specdec_jax.analysis import output_file
from specdec_jax.bench import machine
from specdec_jax.io import files

# Steps and values of a curve, equally many.
Curve = tuple[list[int], list[float]]

# What is drawn of metrics.jsonl. alpha_at is a list; the others are numbers.
_FIGURES = ('loss', 'held_out_loss', 'alpha', 'alpha_at', 'block_efficiency')
# No more dashes, greys and marks can be told apart: see eval.plots.
_MOST = 5
_THIN: dict[str, Any] = dict(linewidth=0.8, marker='', linestyle='-')


class Run(NamedTuple):
  """One workdir. curves: by name, 'alpha_at' as 'alpha_at/0' and so on."""

  name: str
  seed: int | None
  curves: dict[str, Curve]


def draw(workdirs: Sequence[str], out: str = '') -> pathlib.Path:
  """Writes the figure of some runs; returns where.

  out: the first workdir's curves.png if empty.

  Raises:
    ValueError: no workdir or too many, one without metrics.jsonl, a line that
      is damaged, nothing to draw, or a path that cannot be written.
  """
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError('curves need matplotlib: install the extra `plots`')
  folders = list(dict.fromkeys(pathlib.Path(w).resolve() for w in workdirs))
  if not 1 <= len(folders) <= _MOST:
    raise ValueError(f'{len(folders)} workdirs: name 1 to {_MOST}')
  runs = [
    read(folder, name)
    for folder, name in zip(folders, _names(folders), strict=True)
  ]
  default = folders[0] / 'curves.png'
  path = output_file.check_writable('out', out or default)
  files.write(path, figure(runs))
  return path


def _names(folders: Sequence[pathlib.Path]) -> list[str]:
  """The folders' own names; longer ones where two are the same."""
  if len({x.name for x in folders}) == len(folders):
    return [x.name for x in folders]
  shared = os.path.commonpath(folders)
  return [os.path.relpath(x, shared) for x in folders]


def read(workdir: pathlib.Path, name: str) -> Run:
  """The curves of a run. What its last line says of a step counts.

  Half a line at the end, of a run that goes on or was killed, is left out.

  Raises:
    ValueError: no such folder or file, a damaged line, or nothing to draw.
  """
  path = workdir / 'metrics.jsonl'
  if not workdir.is_dir():
    raise ValueError(f'workdir {workdir}: no such folder')
  try:
    *lines, _ = path.read_bytes().split(b'\n')
  except OSError as error:
    raise ValueError(
      f'workdir {workdir}: its metrics.jsonl cannot be read '
      f'({error.strerror}); name the workdir of a training run'
    ) from error
  points: dict[str, dict[int, float]] = {}
  for number, line in enumerate(lines, 1):
    where = f'{path}:{number}'
    row = _row(where, line)
    for key in _FIGURES:
      if key in row:
        for label, value in _values(where, key, row[key]):
          points.setdefault(label, {})[row['step']] = value
  curves = {
    key: (sorted(found), [found[step] for step in sorted(found)])
    for key, found in points.items()
    if any(map(math.isfinite, found.values()))
  }
  if not curves:
    raise ValueError(
      f'{path}: nothing to draw; it says nothing of {", ".join(_FIGURES)}'
    )
  return Run(name, _seed(workdir), curves)


def _row(where: str, line: bytes) -> dict[str, Any]:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{where}: no JSON: {error}') from error
  if not isinstance(row, dict) or type(row.get('step')) is not int:
    raise ValueError(f"{where}: needs an object with a whole number 'step'")
  return row


def _values(where: str, key: str, value) -> list[tuple[str, float]]:
  """(label, number) of a figure; null, what was not measured, is nan."""
  many = isinstance(value, list)
  out = []
  for i, x in enumerate(value if many else [value]):
    x = math.nan if x is None else x
    if many != (key == 'alpha_at') or type(x) not in (int, float):
      raise ValueError(f'{where}: {key}={json.dumps(value)} is no figure of it')
    out.append((f'{key}/{i}' if many else key, float(x)))
  return out


def _seed(workdir: pathlib.Path) -> int | None:
  path = workdir / 'config.json'
  section = files.read_json(path).get('run') if path.exists() else None
  return section.get('seed') if isinstance(section, dict) else None


# --- the figure --------------------------------------------------------------


def figure(runs: Sequence[Run]) -> bytes:
  """A PNG with an axes for each of loss, alpha and block efficiency there is.

  One run: training and held-out loss, alpha and its value at each position of a
  draft. Several: one curve each, with the training loss pale behind it.
  """
  from specdec_jax.analysis import plots

  paints = [
    paint
    for names, paint in (
      (('loss', 'held_out_loss'), _loss),
      (('alpha',) if runs[1:] else ('alpha', 'alpha_at/0'), _alpha),
      (('block_efficiency',), _efficiency),
    )
    if any(name in run.curves for name in names for run in runs)
  ]

  def bound(paint: Callable, last: bool):
    def painted(axes):
      ends, y, title = paint(plots, axes, runs)
      axes.margins(x=0.02)
      plots.label(axes, 'step' if last else '', y, title)
      plots.margin(axes, ends)

    return painted

  made_by = machine.made_by(*machine.commit())
  return plots.stacked(
    [bound(paint, paint is paints[-1]) for paint in paints],
    size=(6.4, 0.8 + 2.0 * len(paints)),
    caption=textwrap.fill(f'{_seeds(runs)}Drawn by {made_by.lower()}.', 110),
  )


def _seeds(runs: Sequence[Run]) -> str:
  known = [run for run in runs if run.seed is not None]
  if len({run.seed for run in known}) == 1 and len(known) == len(runs):
    return f'Seed {known[0].seed}. '
  each = ', '.join(f'{run.name} {run.seed}' for run in known)
  return f'Seeds: {each}. ' if known else ''


# Each paints its axes; returns the curves' ends, the y axis's name, the title.


def _loss(plots, axes, runs):
  ends, alone = [], []
  for i, run in enumerate(runs):
    held = run.curves.get('held_out_loss')
    steps, values = run.curves.get('loss', ([], []))
    if held:
      axes.plot(steps, values, color='0.7', zorder=1, **_THIN)
      plots.curve(axes, *held, '', i)
      ends.append((_last(held[1]), run.name if runs[1:] else 'held out', i))
    elif steps:
      # Dashes cannot be seen in what is as noisy as this.
      plots.curve(axes, steps, values, '', i, linestyle='-', linewidth=0.8)
      ends.append((_last(values), run.name if runs[1:] else 'training', i))
      alone.append(run.name)
  title = 'held-out loss; pale: training'
  if len(alone) == len(ends):
    title = 'training loss'
  elif alone:
    title += f'; of {", ".join(alone)}: training only'
  return ends, 'loss', title


def _alpha(plots, axes, runs):
  ends, title = [], 'teacher-forced'
  for i, run in enumerate(runs):
    if 'alpha' in run.curves:
      steps, values = run.curves['alpha']
      plots.curve(axes, steps, values, '', i)
      ends.append((_last(values), run.name if runs[1:] else 'alpha', i))
  if not runs[1:]:
    at = [name for name in runs[0].curves if name.startswith('alpha_at/')]
    for k, name in enumerate(at):
      steps, values = runs[0].curves[name]
      axes.plot(steps, values, color='0.6', zorder=1, **_THIN)
      ends.append((_last(values), f'draft {k + 1}', None))
    if at:
      title += '; pale: share of the drafts that decoding kept'
  return ends, 'alpha', title


def _efficiency(plots, axes, runs):
  ends = []
  for i, run in enumerate(runs):
    if 'block_efficiency' in run.curves:
      steps, values = run.curves['block_efficiency']
      plots.curve(axes, steps, values, '', i)
      if runs[1:]:
        ends.append((_last(values), run.name, i))
  plots.level(axes, 1)
  return ends, 'block efficiency', 'tokens a target call; 1 is plain decoding'


def _last(values: Sequence[float]) -> float:
  return next(x for x in reversed(values) if math.isfinite(x))
