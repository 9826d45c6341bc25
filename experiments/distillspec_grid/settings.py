"""What the grid is made of, as checked dataclasses; and each run's config."""

import dataclasses
import pathlib

from configs import distill, train_lm
from specdec_jax.distill import distillation
from specdec_jax.distill import divergences as divergences_lib
from specdec_jax.train import train_lm as train_lm_lib


@dataclasses.dataclass(frozen=True)
class Pair:
  """text: as train.text.read takes it. target, draft: rows of
  models.config.SIZES. length, rows: of every batch here. draft_steps: of
  cross-entropy, before a distillation. learning_rate: of cross-entropy.
  """

  text: str
  target: str
  draft: str
  vocab: int
  length: int
  rows: int
  target_steps: int
  draft_steps: int
  learning_rate: float


@dataclasses.dataclass(frozen=True)
class Grid:
  """divergences x sources x temperatures, `steps` from the draft on.

  sources: names of distill_program.SAID. temperatures: served and distilled at.
  more_seeds: of which the best cell and its baseline are trained once more.
  """

  divergences: tuple[str, ...]
  sources: tuple[str, ...]
  temperatures: tuple[float, ...]
  steps: int
  learning_rate: float
  refresh: int
  seed: int
  more_seeds: tuple[int, ...]

  def __post_init__(self):
    for name in self.divergences:
      divergences_lib.divergence_of(name)
    for name in self.sources:
      if name not in distillation.SAID:
        raise ValueError(
          f'sources={self.sources}: allowed are {", ".join(distillation.SAID)}'
        )
    for name in ('divergences', 'sources', 'temperatures'):
      if not getattr(self, name):
        raise ValueError(f'{name}=(): name at least one')


@dataclasses.dataclass(frozen=True)
class Judge:
  """prompts: pieces of held-out documents, of prompt_tokens each."""

  prompts: int
  prompt_tokens: int
  new_tokens: int
  gamma: int

  def __post_init__(self):
    if self.prompts < 4:
      raise ValueError(f'prompts={self.prompts}: two halves want 4 or more')
    for name in ('prompt_tokens', 'new_tokens', 'gamma'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)}: must be 1 or more')


@dataclasses.dataclass(frozen=True)
class Settings:
  pair: Pair
  grid: Grid
  judge: Judge


@dataclasses.dataclass(frozen=True)
class Cell:
  """One distilled draft. temperature: None where it matters to nothing."""

  source: str
  divergence: str
  temperature: float | None
  seed: int

  @property
  def name(self) -> str:
    warm = 'any' if self.temperature is None else f'{self.temperature:g}'
    divergence = self.divergence.replace(':', '_')
    return f'{self.source}-{divergence}-{warm}-seed{self.seed}'


def cell(source: str, divergence: str, warm: float, seed: int) -> Cell:
  """The cell that is served at a temperature.

  Of fixed text the law at 1 is learnt for 0 too: a greedy law has no slope.
  """
  own = None if source == 'text' and warm in (0.0, 1.0) else warm
  return Cell(source, divergence, own, seed)


def cells(grid: Grid) -> list[Cell]:
  """All of the grid's seed, each once."""
  every = [
    cell(source, divergence, warm, grid.seed)
    for source in grid.sources
    for divergence in grid.divergences
    for warm in grid.temperatures
  ]
  return list(dict.fromkeys(every))


def language(
  s: Settings,
  text: pathlib.Path,
  *,
  size: str,
  steps: int,
  seed: int,
  tokenizer: str = '',
) -> train_lm_lib.Settings:
  """Cross-entropy on the text, with a tokenizer of its own if none is named."""
  c = train_lm.get_config().unlock()
  c.model.update(size=size, dtype='float32', remat=False)
  c.text.update(
    source=str(text),
    tokenizer=tokenizer,
    vocab=s.pair.vocab,
    length=s.pair.length,
    rows=s.pair.rows,
  )
  c.optimiser.update(
    learning_rate=s.pair.learning_rate, warmup=max(1, steps // 20)
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
) -> distillation.Settings:
  """One cell's distillation, from a draft that cross-entropy has made."""
  grid, warm = s.grid, cell.temperature
  c = distill.get_config().unlock()
  c.teacher.source = str(target)
  c.student.update(
    kind='lm', path=str(draft), taps=(), share=False, vocabulary=0
  )
  c.data.update(
    source=str(text),
    said=cell.source,
    prompts=s.pair.rows * grid.steps,
    held_out=8,
    prompt_tokens=s.judge.prompt_tokens,
    length=s.pair.length,
    temperatures=(1.0 if warm is None else warm,),
    keep=(),
    batch=s.pair.rows * grid.refresh,
    refresh=grid.refresh,
    seed=cell.seed,
    folder=str(answers),
  )
  # A greedy law has no slope: its draft learns the law at 1.
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
