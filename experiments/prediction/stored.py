"""Judges predictions of costs, and their intervals, by stored results.

Every benchmark document that an experiment keeps is a run: its mean of measured
over explained is its costs' error. The library knows how large such errors are
from costs/runs.json, which is made from them here.
"""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from experiments import page
from experiments.prediction import cells as cells_lib
from specdec_jax import printing, program
from specdec_jax.bench import records
from specdec_jax.costs import calibration
from specdec_jax.io import files

ROOT = pathlib.Path(__file__).parents[2]
TREES = 'experiments/tree_rules/results/speed.json'
# By drafter; what is not here is a draft model, under its own name.
KINDS = {'lookup': 'lookup', 'eagle': 'EAGLE', 'adaptive': 'adaptive'}


class Run(NamedTuple):
  """A benchmark document, or one of several in a file.

  prompts: that predicted it, one in a batch. where: file. weights: the
  target's.
  """

  where: str
  doc: Mapping[str, Any]
  prompts: int
  weights: str


class Cell(NamedTuple):
  """A cells.Cell, its run, and its kind of method."""

  cell: cells_lib.Cell
  run: Run
  kind: str


def runs(root: pathlib.Path = ROOT) -> list[Run]:
  """Reads every run that experiments keep."""
  out = []
  for path in sorted(root.glob('experiments/*/results/*.json')):
    found = files.read_json(path)
    several = found.get('runs')
    for doc in several if isinstance(several, list) else [found]:
      if ratios(doc):
        s, name = doc['setting'], str(path.relative_to(root))
        weights = weights_of(s['target'], s['dtype'])
        out.append(Run(name, doc, s['other_prompts'], weights))
  return out


def weights_of(target: str, dtype: str) -> str:
  """Returns 'stored' for 'X (Q4_1, stored)'; for floats their dtype."""
  told = target.rpartition(', ')[2].rstrip(')').removeprefix('again ')
  return told if told in ('stored', 'int8', 'int4') else dtype


def ratios(doc: Mapping[str, Any]) -> list[float]:
  """Lists every method's measured over explained; [] for another document."""
  rows = doc.get('rows')
  return [
    x['improvement']['value'] / x['explained']['improvement']
    for x in (rows if isinstance(rows, list) else ())
    if x.get('explained')
  ]


def row(doc: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Makes a run's entry in runs.json."""
  about = {x: doc['machine'][x] for x in ('cpu', 'device')}
  return about | {'from': where, 'over_explained': ratios(doc)}


def text(found: Sequence[Run]) -> str:
  """Returns runs.json's text."""
  return printing.compact({'runs': [row(x.doc, x.where) for x in found]})


def add_own(paths: Sequence[str]) -> pathlib.Path:
  """Adds bench.py's results to the user's own runs; returns their file.

  Raises ValueError for a file that is no result of the benchmark.
  """
  path = program.cache_folder() / calibration.RUNS.name
  kept = files.read_json(path, {'runs': []})['runs']
  for name in paths:
    doc = files.read_json(pathlib.Path(name))
    if not ratios(doc):
      raise ValueError(
        f'{name}: no result of scripts/bench.py; give DIR/results/bench.json'
      )
    new = page.plain(row(doc, name))
    if all(x['over_explained'] != new['over_explained'] for x in kept):
      kept.append(new)
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write(path, printing.compact({'runs': kept}))
  return path


# --- predictions -------------------------------------------------------------


def cells(found: Sequence[Run], trees: Mapping[str, Any]) -> list[Cell]:
  """Lists everything that was predicted.

  trees: TREES, whose shapes on one target are a choice as gammas are.
  """
  out = [
    Cell(x, run, KINDS.get(x.drafter, 'a draft model'))
    for i, run in enumerate(found)
    for x in cells_lib.of(run.doc, f'{i} {run.doc["setting"]["target"]}')
  ]
  for i, x in enumerate(trees['rows']):
    if told := x['predicted']:
      # Half of the questions predict, half are judged.
      prompts = -(-trees['questions']['questions'] // 2)
      run = Run(TREES, {}, prompts, weights_of(x['target'], 'float32'))
      where = f'trees {x["target"]}', 0.0, '', 'eagle', 1 + i
      ends = told['value'], told['low'], told['high']
      cell = cells_lib.Cell(*where, *ends, x['improvement']['value'])
      out.append(Cell(cell, run, KINDS['eagle']))
  return out


def error(doc: Mapping[str, Any], found: Sequence[Run]) -> tuple[float, int]:
  """Computes calibration.between_runs without the run itself."""
  means = [
    statistics.fmean(np.log(ratios(x.doc))) for x in found if x.doc is not doc
  ]
  return float(np.sqrt(np.mean(np.square(means)))), len(means)


def widened(x: Cell, found: Sequence[Run]) -> cells_lib.Cell:
  """Widens the interval by other runs' error, as today; none if few prompts."""
  value, high = x.cell.predicted, x.cell.high
  if high is None or x.run.prompts < records.FEWEST:
    return x.cell._replace(low=None, high=None)
  explained = (y.get('explained') or {} for y in x.run.doc.get('rows', ()))
  if any(y.get('low') is not None for y in explained):  # of today's method
    return x.cell
  between, count = error(x.run.doc, found)
  known = np.array([x.run.prompts - 1, count])
  # The printed one is Student's t times the error of prompts and repeats.
  own = np.log(high / value) / stats.t.ppf(0.95, known[0])
  parts = np.array([own**2, between**2])
  freedom = parts.sum() ** 2 / (parts**2 / known).sum()
  factor = float(np.exp(stats.t.ppf(0.95, freedom) * parts.sum() ** 0.5))
  return x.cell._replace(low=value / factor, high=value * factor)


def wrong(found: Sequence[cells_lib.Cell]) -> tuple[int, int]:
  """Counts cells not near 1: 'do not' where it was faster, 'do' if slower."""
  told = [x for x in found if abs(x.measured - 1) > cells_lib.NEAR]
  return (
    sum(x.predicted <= 1 < x.measured for x in told),
    sum(x.measured <= 1 < x.predicted for x in told),
  )


def markdown(found: Sequence[Run], trees: Mapping[str, Any]) -> str:
  """Writes the costs' errors by run, and the predictions by kind."""
  every = cells(found, trees)
  logs = [statistics.fmean(np.log(ratios(x.doc))) for x in found]
  low, high = records.AGREE
  costs = [
    [x.where.split('/')[1], x.doc['setting']['target'], x.weights]
    + [f'{np.exp(mean):.2f}' + ' (!)' * (not low <= np.exp(mean) <= high)]
    for x, mean in zip(found, logs, strict=True)
  ]
  groups = {'all': every}
  for x in every:
    groups.setdefault(x.kind, []).append(x)
  for x in every:
    groups.setdefault(f'target: {x.run.weights}', []).append(x)
  table = [
    {
      'name': name,
      'was': cells_lib.summary([x.cell for x in some]),
      'now': cells_lib.summary([widened(x, found) for x in some]),
      'wrong': wrong([x.cell for x in some]),
    }
    for name, some in groups.items()
  ]
  spread = np.sqrt(np.mean(np.square(logs)))
  predicted = len({x.cell.pair for x in every})
  return page.text(
    page.Part(
      f'Of {len(found)} runs the mean logarithm of measured over explained is '
      f'{spread:.1%} off 0 (root mean square): the error of costs from one run '
      f'to the next. (!): outside {low} to {high}.',
      'results of=0, target=1, weights=2, measured over explained=3',
      costs,
    ),
    page.Part(
      f'{len(every)} methods were predicted in {predicted} runs, those of '
      f'{TREES} among them:',
      LINES,
      table,
    ),
  )


LINES = (
  'cells=name, printed intervals hold=was.covered:.0%, of=was.sure, '
  "with other runs' error=now.covered:.0%, of=now.sure, "
  'regret=was.regret:.1%, worst=was.worst:.1%, of=was.choices, '
  'speculate or not=was.right:.0%, of=was.told, '
  '"do not" but faster=wrong.0, "do" but slower=wrong.1'
)


def write(root: pathlib.Path = ROOT) -> None:
  """Writes runs.json, and the page's block."""
  found = runs(root)
  files.write(calibration.RUNS, text(found))
  trees = files.read_json(root / TREES)
  readme = root / 'experiments/prediction/README.md'
  page.fill(readme, markdown(found, trees), 'stored')
