"""Distillations of a few steps, from configs/distill.py or distill_t5.py."""

import json
import pathlib

import numpy as np
import pytest

from configs import distill, distill_t5
from specdec_jax import api, build
from specdec_jax.distill import distillation, sections
from tests import changes as changes_lib

CONFIGS = {'eagle': distill, 't5': distill_t5}
FEW = dict(
  batch=dict(rows=4),
  run=dict(steps=4, checkpoint_every=2, evaluate_every=2, log_every=1),
  judge=dict(gamma=2, new_tokens=6),
)
DATA = dict(prompts=8, held_out=2, batch=10)
ROWS = {
  'eagle': DATA | dict(length=192),
  't5': DATA | dict(refresh=2, keep=False),
}
# Students of a size, and a text with few different words, quickly learnt.
LM = dict(kind='lm', vocabulary=0, share=False, size='tiny')
T5 = dict(layers=(), size='t5_tiny', vocabulary=0)
PROSE = dict(source='stdlib:prose', length=32, prompt_tokens=8)


def settings(
  config: str = 'eagle', words: str = '', **changes
) -> sections.Settings:
  """changes: of keys, by section; words: further ones, see tests/changes."""
  c = CONFIGS[config].get_config('tiny').unlock()
  every = [*FEW.items(), ('data', ROWS[config]), *changes.items()]
  for section, values in every:
    c[section].update(values)
  changes_lib.apply(c, words)
  return distillation.settings(c)


def run(folder: pathlib.Path, config: str = 'eagle', **changes):
  """(figures, the lines of its metrics) of a run in folder/run."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('SPECDEC_JAX_CACHE', str(folder / 'cache'))
    made = distillation.run(settings(config, **changes), folder / 'run')
  lines = (folder / 'run/metrics.jsonl').read_text().splitlines()
  return made, [json.loads(line) for line in lines]


def made(target, ids=None, config: str = 'eagle', **changes):
  """(settings, Student) of these ids, or of all."""
  s = settings(config, **changes)
  kind = distillation.KINDS[s.student.kind]
  kind.check(s, target)
  ids = np.arange(target.ids) if ids is None else ids
  return s, kind.make(s, target, ids)


def losses(lines) -> list[float]:
  return [x['loss'] for x in lines if 'loss' in x]


def assert_decodes_as_plain(draft, target='random:tiny', **options) -> None:
  if isinstance(target, str):
    target = build.load(target)
  of = lambda **more: (
    api.generate(target, ['some words'], max_new_tokens=8, **more)[0].tokens
  )
  assert of(draft=draft, gamma=2, **options) == of()
