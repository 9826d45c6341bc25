"""The settings of the grid, its cells, and the config of each training."""

import dataclasses
import pathlib
from typing import NamedTuple

from configs import distill, train_lm
from specdec_jax import fields
from specdec_jax.distill import distillation, divergences, sections
from specdec_jax.train import train_lm as train_lm_lib

SOURCES = ('text', 'teacher', 'student', 'mixed')


@dataclasses.dataclass(frozen=True)
class Pair(fields.Checked):
  text: str = fields.setting(help='as train.text.read takes it')
  target: str = fields.setting(help='a row of models.config.SIZES')
  draft: str = fields.setting(help='a row of models.config.SIZES')
  vocab: int = fields.setting(low=257)
  length: int = fields.setting(low=2, help='tokens of a row')
  rows: int = fields.setting(low=1, help='of a batch')
  target_steps: int = fields.setting(low=1)
  draft_steps: int = fields.setting(low=1, help='before a distillation')
  learning_rate: float = fields.setting(above=0, help='of cross-entropy')


@dataclasses.dataclass(frozen=True)
class Grid(fields.Checked):
  divergences: tuple[str, ...] = fields.setting(help='see divergence_of')
  sources: tuple[str, ...] = fields.setting(
    allowed=SOURCES, help='of completions'
  )
  temperatures: tuple[float, ...] = fields.setting(low=0)
  steps: int = fields.setting(low=1, help='of a distillation')
  learning_rate: float = fields.setting(above=0)
  refresh: int = fields.setting(low=1)
  seed: int = fields.setting(low=0)
  more_seeds: tuple[int, ...] = fields.setting(
    low=0, help='for which best cell and baseline are trained again'
  )

  def __post_init__(self):
    super().__post_init__()
    for name in self.divergences:
      divergences.divergence_of(name)
    for name in ('divergences', 'sources', 'temperatures'):
      if not getattr(self, name):
        raise ValueError(f'{name}=(): name at least one')


@dataclasses.dataclass(frozen=True)
class Judge(fields.Checked):
  prompts: int = fields.setting(low=4, help='two halves choose and judge')
  prompt_tokens: int = fields.setting(low=1)
  new_tokens: int = fields.setting(low=1)
  gamma: int = fields.setting(low=1)


@dataclasses.dataclass(frozen=True)
class Settings:
  pair: Pair
  grid: Grid
  judge: Judge


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


def cells(grid: Grid) -> list[Cell]:
  """All cells of the grid's seed, each once."""
  every = [
    cell(source, divergence, warm, grid.seed)
    for source in grid.sources
    for divergence in grid.divergences
    for warm in grid.temperatures
  ]
  return list(dict.fromkeys(every))


def language(
  s: Settings, text: pathlib.Path, size: str, steps: int, seed: int
) -> train_lm_lib.Settings:
  """Training by cross-entropy on a text, with a tokenizer trained on it.

  Args:
    s: settings.
    text: the file.
    size: row of models.config.SIZES.
    steps: training steps.
    seed: of weights and batches.
  """
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
  return train_lm_lib.settings(c)


def distilled(
  s: Settings,
  cell: Cell,
  *,
  text: pathlib.Path,
  target: pathlib.Path,
  draft: pathlib.Path,
  answers: pathlib.Path,
) -> sections.Settings:
  """The distillation of one cell, from a draft trained by cross-entropy.

  Args:
    s: settings.
    cell: source, divergence, temperature and seed.
    text: the file of training documents.
    target, draft: folders of the two models.
    answers: folder of the target's answers.
  """
  c, grid, warm = distill.get_config().unlock(), s.grid, cell.temperature
  c.teacher.source = str(target)
  c.student.update(
    kind='lm', path=str(draft), taps=(), share=False, vocabulary=0
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
  return distillation.settings(c)
