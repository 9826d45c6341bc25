"""Trains every model of the grid, each once, and measures all of them."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from experiments.distillspec_grid import measure, render, settings
from specdec_jax import build
from specdec_jax.distill import distillation
from specdec_jax.io import files
from specdec_jax.train import text, train_lm
from specdec_jax.train import workdir as workdir_lib


def run(
  s: settings.Settings,
  workdir: pathlib.Path,
  track: Callable[[Iterable, str], Iterable],
) -> dict[str, Any]:
  """{'sizes', 'corpus', 'rows'}: see measured.

  Raises:
    ValueError: a workdir that was begun with other settings.
  """
  config = dataclasses.asdict(s)
  workdir_lib.open_run(workdir, config)
  workdir_lib.write_config(workdir, config)
  trained = Trained(s, workdir)
  held = trained.held_out()
  grid = settings.cells(s.grid)
  for cell in track(grid, f'{len(grid)} distillations'):
    trained.cell(cell)
    jax.clear_caches()  # of programs that no other cell has
  return measured(s, trained, held)


class Trained:
  """The models of every seed, each made the first time that it is asked for."""

  def __init__(self, s: settings.Settings, folder: pathlib.Path):
    self._s, self._folder = s, folder
    self._text = folder / 'text' / 'kept.jsonl'

  def held_out(self) -> text.Corpus:
    """The documents that nothing here is trained on; writes the others."""
    corpus = text.read(self._s.pair.text)
    kept, held = text.held_out(corpus, 20)
    self._text.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({'text': x}) for x in kept.documents)
    files.write(self._text, '\n'.join(lines))
    return held

  def target(self) -> pathlib.Path:
    pair, seed = self._s.pair, self._s.grid.seed
    return self._language('target', pair.target, pair.target_steps, seed)

  def start(self, seed: int) -> pathlib.Path:
    """The draft that distillation begins with."""
    pair = self._s.pair
    return self._language(f'start-{seed}', pair.draft, pair.draft_steps, seed)

  def baseline(self, seed: int) -> pathlib.Path:
    """The same draft under cross-entropy for all the steps that a cell has."""
    pair = self._s.pair
    steps = pair.draft_steps + self._s.grid.steps
    return self._language(f'baseline-{seed}', pair.draft, steps, seed)

  def cell(self, cell: settings.Cell) -> pathlib.Path:
    # Of fixed text no answer is read.
    warm = cell.temperature or 0
    answers = self._folder / f'answers-{warm:g}-seed{cell.seed}'
    found = distillation.run(
      settings.distilled(
        self._s,
        cell,
        text=self._text,
        target=self.target(),
        draft=self.start(cell.seed),
        answers=answers,
      ),
      self._folder / cell.name,
    )
    return pathlib.Path(_finished(found, cell.name)['draft'])

  def _language(self, name: str, size: str, steps: int, seed: int):
    tokenizer = '' if name == 'target' else str(self.target())
    folder = self._folder / name
    found = train_lm.run(
      settings.language(
        self._s,
        self._text,
        size=size,
        steps=steps,
        seed=seed,
        tokenizer=tokenizer,
      ),
      folder,
    )
    _finished(found, name)
    return folder / 'model'


def measured(
  s: settings.Settings, trained: Trained, held: text.Corpus
) -> dict[str, Any]:
  """{'sizes', 'corpus', 'rows': every draft at every temperature}."""
  target = build.load(str(trained.target()), scan_layers=False)
  first = build.load(str(trained.start(s.grid.seed)), scan_layers=False)
  drafting = measure.drafting(target, first, s.judge.gamma)
  prompts = _prompts(s, target, held)
  rows = []
  for warm in s.grid.temperatures:
    bench = measure.bench(
      target,
      prompts,
      temperature=warm,
      new_tokens=s.judge.new_tokens,
      gamma=s.judge.gamma,
      seed=s.grid.seed,
    )
    rows += _served(s.grid, trained, warm, bench, drafting)
  return {
    'sizes': [_size(x.params) for x in (target, first)],
    'corpus': held.sha256,
    'rows': rows,
  }


def _served(grid: settings.Grid, trained: Trained, warm, bench, drafting):
  """The rows of one temperature: where drafts begin, cross-entropy, all cells;
  then cross-entropy and the best cell of the other seeds."""

  def row(path: pathlib.Path, seed: int, source: str, divergence: str = ''):
    draft = build.load(str(path), scan_layers=False)
    return measure.measured(bench, draft, *drafting) | {
      'source': source,
      'divergence': divergence,
      'temperature': warm,
      'seed': seed,
    }

  def cell(source: str, divergence: str, seed: int):
    made = trained.cell(settings.cell(source, divergence, warm, seed))
    return row(made, seed, source, divergence)

  seed = grid.seed
  rows = [
    row(trained.start(seed), seed, 'start'),
    row(trained.baseline(seed), seed, 'baseline'),
  ]
  cells = [
    cell(source, divergence, seed)
    for source in grid.sources
    for divergence in grid.divergences
  ]
  best = render.best(cells)
  for other in grid.more_seeds:
    rows.append(row(trained.baseline(other), other, 'baseline'))
    cells.append(cell(best['source'], best['divergence'], other))
  return rows + cells


def _prompts(s: settings.Settings, target, held: text.Corpus):
  """Pieces of the held-out documents, the same in every run."""
  j = s.judge
  rows = text.pack(held.documents, target.tokenizer, j.prompt_tokens)
  if len(rows) < j.prompts:
    raise ValueError(
      f'judge.prompts={j.prompts}: the held-out text has {len(rows)} rows of '
      f'prompt_tokens={j.prompt_tokens}'
    )
  order = np.random.default_rng(s.grid.seed).permutation(len(rows))
  return rows[order[: j.prompts]].tolist()


def _size(params) -> int:
  return sum(x.size for x in jax.tree.leaves(params))


def _finished(found: dict[str, Any], name: str) -> dict[str, Any]:
  """Raises SystemExit: a signal ended the run."""
  if not found['finished']:
    raise SystemExit(f'{name}: ended at step {found["step"]} by a signal')
  return found
