"""Trains every kind of draft on the same answers, for the same time.

Times a few steps of each kind, and trains it for as many as fill --minutes.
Time sums all cores, which other work changes least.
"""

import dataclasses
import os
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
from absl import logging

from experiments.heads import answers as answers_lib
from experiments.heads import kinds, render
from specdec_jax import build, printing, program
from specdec_jax.distill import distillation, sections, teacher
from specdec_jax.distill import training_prompts as prompts_lib
from specdec_jax.io import files

_STEPS = 8  # to time; the first two compile and warm up


def run() -> bool:
  """Returns True; leaves every kind's KIND.json in the workdir."""
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  few = {x: kinds.settings(x, _STEPS) for x in kinds.KINDS.value}
  counted, cores = _answered(), os.cpu_count() or 1
  seconds = {kind: _seconds(kind, s) for kind, s in few.items()}
  for kind in few:
    steps = max(1, round(60 * kinds.MINUTES.value * cores / seconds[kind]))
    s = kinds.settings(kind, steps)
    found = _trained(s, kinds.folder(kind))
    tokens = steps * s.batch.rows * counted / s.data.prompts
    doc = {
      'kind': kind,
      'minutes': kinds.MINUTES.value,
      'seconds': seconds[kind],
      'steps': steps,
      'tokens': tokens / 1e6,
      'answers': s.data.prompts,
      'answered': counted,
      'parameters': render.parameters(kind, pathlib.Path(found['draft'])),
      'found': found,
    }
    files.write(kinds.folder(f'{kind}.json'), printing.compact(doc))
  return True


def _answered() -> int:
  """Lets the target answer, for all kinds at once; returns the tokens."""
  every = {x: kinds.settings(x, _STEPS) for x in kinds.CHANGES}
  s, whole = next(iter(every.values())), kinds.folder('answers/all')
  target = build.load(s.teacher.source, dtype=s.teacher.dtype)
  last = target.config.depth - 1
  taps = {x: sorted({*y.student.taps, last}) for x, y in every.items()}
  answers = teacher.answer(
    dataclasses.replace(s.data, folder=str(whole)),
    target,
    prompts_lib.make(s.data, target).kept,
    tuple(sorted({i for own in taps.values() for i in own})),
  )
  for kind, own in taps.items():
    into = pathlib.Path(every[kind].data.folder)
    if not into.exists():
      answers_lib.fewer(whole, into, own)
  return int(answers['counted'].sum())


def _seconds(kind: str, s: sections.Settings) -> float:
  """Times a step, in seconds over all cores together; measured once."""
  folder = kinds.folder('timed') / kind
  _trained(s, folder)
  logged = files.read_jsonl(folder / 'clocks.jsonl')
  return statistics.median([x['core_seconds'] for _, x in logged][2:])


def _trained(s: sections.Settings, folder: pathlib.Path):
  """Returns a training's result; raises SystemExit if a signal ended it."""
  found = distillation.run(s, folder)
  if not found['finished']:
    raise SystemExit(f'{folder}: ended at step {found["step"]} by a signal')
  jax.clear_caches()  # no other kind uses these programs
  return found


if __name__ == '__main__':
  program.set_xla_flags(trains=True)
  program.launch(run)
