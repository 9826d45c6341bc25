"""Defines the experiment's flags, and how each kind of draft is distilled."""

import pathlib
from typing import Any

from absl import flags

from configs import distill
from specdec_jax.distill import distillation, sections

HERE = pathlib.Path(__file__).parent
MINUTES = flags.DEFINE_float('minutes', 60, 'of steps, for each kind')
PROMPTS = flags.DEFINE_integer('prompts', 1504, 'that the target answers')
WORKDIR = flags.DEFINE_string('workdir', 'results/heads', 'of the trainings')
QUESTIONS = flags.DEFINE_string('questions', '', 'a question.jsonl')
LIMIT = flags.DEFINE_integer('limit', 2, 'questions of a category; 0: all')
TOKENS = flags.DEFINE_integer('tokens', 128, 'new tokens of an answer')
RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')
SIZE = flags.DEFINE_enum('size', 'full', ['full', 'tiny'], 'tiny: a test')

# As configs/distill.py trains an EAGLE, but for what each kind's authors say.
_THREE: dict[str, Any] = {'student.taps': (1, 14, 26), 'loss.unroll': 4}
CHANGES: dict[str, dict[str, Any]] = {
  'eagle': {},
  'eagle3': _THREE,
  'mtp': {'student.taps': (), 'loss.unroll': 3, 'loss.decay': 0.6},
  'medusa': {
    'student.taps': (),
    'student.vocabulary': 0,  # a medusa drafts all ids
    'loss.unroll': 4,
  },
  'dflash': _THREE | {'student.layers': (14, 29)},
}
KINDS = flags.DEFINE_list('kinds', list(CHANGES), 'what to train')


def folder(name: str) -> pathlib.Path:
  return pathlib.Path(WORKDIR.value) / name


def settings(kind: str, steps: int) -> sections.Settings:
  """Returns a kind's distillation, judged at its end; ValueError if unknown."""
  if kind not in CHANGES:
    raise ValueError(f'kinds={kind}: allowed are {", ".join(CHANGES)}')
  changes = CHANGES[kind] | {
    'student.kind': kind,
    'data.folder': str(folder('answers') / kind),
    'data.prompts': PROMPTS.value,
    'optimiser.warmup': max(1, steps // 20),
    'run.steps': steps,
    'run.checkpoint_every': max(1, steps // 4),
    'run.evaluate_every': steps,
    'run.log_every': 1,
    'judge.new_tokens': 16,
  }
  if SIZE.value == 'tiny':  # a target of two layers
    small = {'student.taps': (0, 1), 'student.layers': (0,)}
    changes |= {x: y for x, y in small.items() if changes.get(x)}
  c = distill.get_config(SIZE.value).unlock()
  c.update_from_flattened_dict(changes)
  return distillation.settings(c)
