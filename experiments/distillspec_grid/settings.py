"""The cells of the grid, and the settings of each training."""

import pathlib
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import distill, train_lm


class Cell(NamedTuple):
  """One distilled draft. temperature: None if training does not use it."""

  source: str
  divergence: str
  temperature: float | None
  seed: int

  @property
  def name(self) -> str:
    warm = 'any' if self.temperature is None else f'{self.temperature:g}'
    divergence = self.divergence.replace(':', '_')
    return f'{self.source}-{divergence}-{warm}-seed{self.seed}'


# The draft of the papers' tables; its distillation needs no answers.
PAIR = Cell('text', 'jensen_shannon:0.5', None, 0)


def cell(source: str, divergence: str, warm: float, seed: int) -> Cell:
  """The cell to decode with at a temperature."""
  # Greedy distributions have no gradient: a draft for temperature 0 is trained
  # at 1. On a fixed text the drafts for 0 and 1 are then the same.
  same = source == 'text' and warm in (0.0, 1.0)
  return Cell(source, divergence, None if same else warm, seed)


def cells(grid: ConfigDict) -> list[Cell]:
  """All cells of the grid's seed, each once."""
  every = [
    cell(source, divergence, warm, grid.seed)
    for source in grid.sources
    for divergence in grid.divergences
    for warm in grid.temperatures
  ]
  return list(dict.fromkeys(every))


def language(
  s: ConfigDict,
  text: pathlib.Path,
  size: str,
  steps: int,
  seed: int,
) -> ConfigDict:
  """Training by cross-entropy on a text, with a tokenizer trained on it."""
  c, pair = train_lm.get_config().unlock(), s.pair
  c.model.update(size=size, dtype='float32', remat=False)
  c.text.update(
    source=str(text),
    tokenizer='',
    vocab=pair.vocab,
    length=pair.length,
    rows=pair.rows,
  )
  c.optimiser.update(
    learning_rate=pair.learning_rate, warmup=max(1, steps // 20)
  )
  c.run.update(
    steps=steps,
    evaluate_every=steps,
    checkpoint_every=max(1, steps // 5),
    seed=seed,
  )
  return c


def distilled(
  s: ConfigDict,
  cell: Cell,
  *,
  text: pathlib.Path,
  target: pathlib.Path,
  draft: pathlib.Path,
  answers: pathlib.Path,
) -> ConfigDict:
  """The distillation of one cell, from a draft trained by cross-entropy.

  text is the file of training documents; target, draft and answers are folders:
  of the two models, and of the target's answers.
  """
  c, grid, warm = distill.get_config().unlock(), s.grid, cell.temperature
  c.teacher.source = str(target)
  c.student.update(
    kind='lm', source=str(draft), taps=(), share=False, vocabulary=0
  )
  c.data.update(
    source=str(text),
    completions=cell.source,
    prompts=s.pair.rows * grid.steps,
    held_out=8,
    prompt_tokens=s.judge.prompt_tokens,
    length=s.pair.length,
    temperatures=(1.0 if warm is None else warm,),
    keep=False,
    batch=s.pair.rows * grid.refresh,
    refresh=grid.refresh,
    seed=cell.seed,
    folder=str(answers),
  )
  c.loss.update(divergence=cell.divergence, temperature=warm or 1.0)
  c.batch.rows = s.pair.rows
  c.optimiser.update(
    learning_rate=grid.learning_rate, warmup=max(1, grid.steps // 20), muon=0.0
  )
  c.run.update(
    steps=grid.steps,
    evaluate_every=grid.steps,
    checkpoint_every=grid.steps,
    seed=cell.seed,
  )
  c.judge.update(gamma=s.judge.gamma, new_tokens=8, temperature=warm or 0.0)
  return c
