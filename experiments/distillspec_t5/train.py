"""Trains every draft of a row once; a killed training goes on."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
from absl import flags, logging

from configs import distill_t5, train_t5
from experiments import rows as rows_lib
from experiments import texts as texts_lib
from specdec_jax import printing
from specdec_jax.distill import distillation
from specdec_jax.train import train_lm

ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = flags.DEFINE_string(
  'trainings',
  '',
  'of distillspec_t5: folder of its trainings; results/distillspec_t5 if empty',
)
DIVERGENCES = (
  *('forward_kl', 'reverse_kl', 'jensen_shannon:0.5', 'total_variation'),
)
SOURCES = 'teacher', 'student', 'mixed'
BASELINE = 'cross-entropy'


class Sizes(NamedTuple):
  """start, steps: of cross-entropy before, and of each training after it."""

  start: int
  steps: int
  rows: int
  length: int
  source_length: int
  new: int  # tokens of an answer that a training is judged by


FULL = Sizes(800, 200, 32, 40, 28, 24)
QUICK = Sizes(8, 4, 8, 24, 8, 4)


def rows(models: pathlib.Path, target: str, draft: str):
  """Makes a row by draft for the translation target; ValueError for others."""
  if target or draft:
    raise ValueError('--target, --draft: not of distillspec_t5; leave them out')
  row = rows_lib.all_rows(models)['translation']
  return {
    x: dataclasses.replace(row, name=x, drafts=()) for x in ('w128', 'w256')
  }


def trained(row: rows_lib.Row) -> dict[tuple[str, str], pathlib.Path]:
  """Trains; folders by (source, divergence), the baseline's by ('', '')."""
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  quick = row.target.startswith('random:')
  s = QUICK if quick else FULL
  folder = pathlib.Path(
    _FOLDER.value or ROOT / 'results' / ('quick/' * quick + 'distillspec_t5')
  )
  # The results of a row are row.json, in the same folder where quick.
  folder = folder / f'{row.name}-trainings'
  folder.mkdir(parents=True, exist_ok=True)
  size = 't5_tiny' if quick else f't5_{row.name}'
  start = _language(row, size, s, s.start, folder / 'start')
  out = {('', ''): _language(row, size, s, s.start + s.steps, folder / 'more')}
  divergences = DIVERGENCES[: 2 if quick else None]
  cells = [(x, y) for x in SOURCES for y in divergences]
  for source, divergence in printing.track(
    cells, f'distillations of {row.name}'
  ):
    name = f'{source}-{divergence.replace(":", "_")}'
    config = _distilled(row, s, source, divergence, start, folder)
    settings = distillation.settings(config)
    found = _finished(distillation.run(settings, folder / name), name)
    out[source, divergence] = pathlib.Path(found['draft'])
    jax.clear_caches()  # no other cell uses these programs
  return out


def _language(
  row: rows_lib.Row, size: str, s: Sizes, steps: int, folder: pathlib.Path
) -> pathlib.Path:
  """Trains a draft by cross-entropy, with the target's tokenizer."""
  c = train_t5.get_config('tiny').unlock()
  field = row.counted_field
  c.model.size = size
  c.text.update(
    source=row.counted,
    field=field,
    source_field=texts_lib.SOURCES[field],
    tokenizer=row.target,
    length=s.length,
    source_length=s.source_length,
    held_out=100,
    rows=s.rows,
  )
  c.optimiser.update(learning_rate=2e-3, warmup=max(1, steps // 20))
  c.run.update(steps=steps, evaluate_every=steps, checkpoint_every=200, keep=1)
  c.judge.metric = ''
  _finished(train_lm.run(train_lm.settings(c), folder), folder.name)
  return folder / 'model'


def _distilled(row, s: Sizes, source: str, divergence: str, start, folder):
  c = distill_t5.get_config('tiny').unlock()
  c.teacher.source = row.target
  c.student.update(source=str(start), layers=(), share=False, vocabulary=0)
  c.data.update(
    source=row.counted,
    field=texts_lib.SOURCES[row.counted_field],
    chat=True,
    completions=source,
    prompts=s.rows * s.steps,
    held_out=8,
    length=s.length,
    source_length=s.source_length,
    temperatures=(1.0,),
    keep=False,
    batch=128,
    folder=str(folder / 'answers'),
  )
  c.loss.divergence = divergence
  c.batch.rows = s.rows
  c.optimiser.update(learning_rate=1e-3, warmup=max(1, s.steps // 20))
  c.run.update(
    steps=s.steps, evaluate_every=s.steps, checkpoint_every=100, keep=1
  )
  c.judge.update(gamma=4, new_tokens=s.new, temperature=1.0)
  return c


def _finished(found: dict[str, Any], name: str) -> dict[str, Any]:
  """Returns a training's result; raises SystemExit if a signal ended it."""
  if not found['finished']:
    raise SystemExit(f'{name}: ended at step {found["step"]} by a signal')
  return found
