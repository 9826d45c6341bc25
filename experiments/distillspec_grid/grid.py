"""Trains every model of the grid once and measures them by decoding."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments import distilled
from experiments.distillspec_grid import settings
from specdec_jax import build, decode, printing, requests, types
from specdec_jax.distill import evaluate
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import files
from specdec_jax.train import text
from specdec_jax.train import workdir as workdir_lib
from specdec_jax.verify import reject


def run(s: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
  """{'sizes', 'corpus', 'rows': every draft at every temperature}.

  Raises:
    ValueError: the workdir has models of other settings.
  """
  trained, held = _begun(s, workdir)
  cells = settings.cells(s.grid)
  for cell in printing.track(cells, f'{len(cells)} distillations'):
    trained.cell(cell)
    jax.clear_caches()  # no other temperature uses these programs
  target = build.load(str(trained.target()), scan_layers=False)
  first = build.load(str(trained.start(s.grid.seed)), scan_layers=False)
  prompts = _prompts(s, target, held)
  rows = []
  for warm in s.grid.temperatures:
    rows += _measured(s, trained, Bench(s, target, first, prompts, warm))
  size = lambda model: sum(x.size for x in jax.tree.leaves(model.params))
  return {
    'sizes': [size(target), size(first)],
    'corpus': held.sha256,
    'rows': rows,
  }


def pair(s: ConfigDict, workdir: pathlib.Path) -> list[pathlib.Path]:
  """Trains a target and, for as many steps, its draft by cross-entropy and a
  distilled one; raises ValueError as run does."""
  trained, _ = _begun(s, workdir)
  baseline = trained.baseline(settings.PAIR.seed)
  return [trained.target(), baseline, trained.cell(settings.PAIR)]


def _begun(s: ConfigDict, workdir: pathlib.Path):
  """(the models, the held-out text) of a folder."""
  config = s.to_dict()
  workdir_lib.open_run(workdir, config)
  workdir_lib.write_config(workdir, config)
  kept, held = text.held_out(text.read(s.pair.text), 20)
  return Trained(s, workdir, kept), held


class Trained:
  """The models of every seed, each trained on first use."""

  def __init__(self, s: ConfigDict, folder: pathlib.Path, kept: text.Corpus):
    self._s, self._folder = s, folder
    self._text = folder / 'text' / 'kept.jsonl'
    self._text.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({'text': x}) for x in kept.documents)
    files.write(self._text, '\n'.join(lines))

  def target(self) -> pathlib.Path:
    pair, seed = self._s.pair, self._s.grid.seed
    return self._language('target', pair.target, pair.target_steps, seed)

  def start(self, seed: int) -> pathlib.Path:
    """The draft that distillation begins with."""
    pair = self._s.pair
    return self._language(f'start-{seed}', pair.draft, pair.draft_steps, seed)

  def baseline(self, seed: int) -> pathlib.Path:
    """The same draft, with cross-entropy for as many steps as a cell in all."""
    pair = self._s.pair
    steps = pair.draft_steps + self._s.grid.steps
    return self._language(f'baseline-{seed}', pair.draft, steps, seed)

  def cell(self, cell: settings.Cell) -> pathlib.Path:
    warm = cell.temperature or 0  # of answers; a fixed text has none
    c = settings.distilled(
      self._s,
      cell,
      text=self._text,
      target=self.target(),
      draft=self.start(cell.seed),
      answers=self._folder / f'answers-{warm:g}-seed{cell.seed}',
    )
    return distilled.draft(c, self._folder / cell.name)

  def _language(self, name: str, size: str, steps: int, seed: int):
    c = settings.language(self._s, self._text, size, steps, seed)
    if name != 'target':
      c.text.tokenizer = str(self.target())
    return distilled.language(c, self._folder / name)


class Bench:
  """A target, held-out prompts at one temperature, and their plain text."""

  def __init__(self, s: ConfigDict, target, first, prompts, warm):
    self.warm, self._target = warm, target
    # One drafter for all drafts of a size, so that nothing compiles twice.
    self._q = first.draft_model(target)
    drafter = lm_drafter.make(self._q, gamma=s.judge.gamma)
    items = requests.items(prompts)
    wanted = requests.Wanted(
      [requests.check(x, target, s.judge.new_tokens) for x in items],
      warm,
      seed=s.grid.seed,
      stop_ids=target.tokenizer.eos_ids,
    )
    self._request = requests.make(items, wanted, gamma=s.judge.gamma)
    self._programs = decode.programs(
      target.model, drafter, reject.RULE, build.default_options()
    )
    self._plain = evaluate.plain(target, self._request)

  def measured(self, draft: build.LanguageModel) -> dict[str, Any]:
    """Returns 'emitted' and 'calls' by prompt, 'alpha' and 'differ'.

    alpha: teacher-forced on the plain text. differ: texts unlike plain
    decoding's; only greedy ones must be equal.
    """
    weights = types.Weights(self._target.params, draft.as_draft[1])
    out = jax.device_get(self._programs.generate(weights, self._request))
    differ = np.any(out.tokens_BL != self._plain.tokens_BL, 1)
    return {
      'emitted': (out.info.origin_BL != types.PROMPT).sum(1).tolist(),
      'calls': out.info.calls_B.tolist(),
      'alpha': evaluate.alpha_on(
        self._target, weights, self._q, self._request, self._plain
      ),
      'differ': int(differ.sum()),
    }


def _measured(s: ConfigDict, trained: Trained, bench: Bench):
  """Rows of one temperature.

  The start, cross-entropy and all cells; for further seeds cross-entropy and
  the best cell.
  """

  def row(path: pathlib.Path, seed: int, source: str, divergence: str = ''):
    draft = build.load(str(path), scan_layers=False)
    return bench.measured(draft) | {
      'source': source,
      'divergence': divergence,
      'temperature': bench.warm,
      'seed': seed,
    }

  def cell(source: str, divergence: str, seed: int):
    made = trained.cell(settings.cell(source, divergence, bench.warm, seed))
    return row(made, seed, source, divergence)

  grid, seed = s.grid, s.grid.seed
  rows = [
    row(trained.start(seed), seed, 'start'),
    row(trained.baseline(seed), seed, 'baseline'),
  ]
  cells = [
    cell(source, divergence, seed)
    for source in grid.sources
    for divergence in grid.divergences
  ]
  best = distilled.best(cells)
  for other in grid.more_seeds:
    rows.append(row(trained.baseline(other), other, 'baseline'))
    cells.append(cell(best['source'], best['divergence'], other))
  return rows + cells


def _prompts(s: ConfigDict, target, held: text.Corpus):
  """Pieces of the held-out documents, the same in every run."""
  rows = text.pack(held.documents, target.tokenizer, s.judge.prompt_tokens)
  if len(rows) < s.judge.prompts:
    raise ValueError(
      f'judge.prompts={s.judge.prompts}: the held-out text has {len(rows)} '
      f'rows of prompt_tokens={s.judge.prompt_tokens}'
    )
  order = np.random.default_rng(s.grid.seed).permutation(len(rows))
  return rows[order[: s.judge.prompts]].tolist()
