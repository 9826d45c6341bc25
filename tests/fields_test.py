"""Settings: what a field refuses, and in which words."""

import dataclasses
import os

import pytest

from specdec_jax import fields


@dataclasses.dataclass(frozen=True)
class Run(fields.Checked):
  steps: int = fields.setting(low=1, high=9, help='in all')
  decay: float = fields.setting(0.5, above=0, below=1)
  scale: float = fields.setting(1.0)
  dtype: str = fields.setting('float32', allowed=('float32', ''))
  layers: tuple[int, ...] = fields.setting((1,), low=0)
  resume: bool = fields.setting(False)
  path: str | os.PathLike = fields.setting('', needed='a file of counts')


@dataclasses.dataclass(frozen=True)
class Settings:
  run: Run


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(steps=0), '=0: must be a whole number, at least 1 and at most 9 (in'),
    (dict(steps=10), 'run.steps=10: must be a whole number, at least 1 and at'),
    (dict(steps=2.0), 'run.steps=2.0: must be a whole number'),
    (dict(steps=True), 'run.steps=True: must be a whole number'),
    (dict(steps='2'), "run.steps='2': must be a whole number"),
    (dict(decay=0), 'decay=0: must be a number, more than 0 and less than 1'),
    (dict(decay=1.0), 'run.decay=1.0: must be a number, more than 0 and less'),
    (dict(scale=float('nan')), 'run.scale=nan: must be a number'),
    (dict(scale=10**400), 'run.scale=<int>: must be a number'),
    (dict(dtype='int4'), "run.dtype='int4': allowed are float32, ''"),
    (dict(dtype='Float3'), "'Float3': did you mean float32? allowed are f"),
    (dict(layers=(0, -1)), 'run.layers=-1: must be a whole number, at least 0'),
    (dict(layers=3), 'run.layers=3: must be a tuple of single values, as in'),
    (dict(layers=('1,2',)), 'as in "(2, 4)"'),
    (dict(resume=1), 'run.resume=1: must be True or False'),
    (dict(path=3), 'run.path=3: must be a text or a path'),
    (dict(step=1), 'no such setting; did you mean steps? allowed are steps, d'),
  ],
)
def test_a_bad_value_is_named(changes, message):
  with pytest.raises(ValueError) as error:
    fields.parse(Settings, {'run': {'steps': 1} | changes})
  assert message in str(error.value)


def test_what_is_good_is_taken():
  run = fields.make(Run, 'run', dict(steps=9, decay=0.9, layers=[0, 5]))
  assert (run.steps, run.decay, run.layers) == (9, 0.9, [0, 5])
  assert fields.parse(Settings, {'run': dict(steps=1)}).run.dtype == 'float32'


def test_sections_and_fields_that_are_missing_are_named():
  with pytest.raises(ValueError, match=r"\['ran'\]: want \['run'\]"):
    fields.parse(Settings, {'ran': {}})
  with pytest.raises(ValueError, match=r'run.steps: is missing \(in all\)'):
    fields.parse(Settings, {'run': {}})
  with pytest.raises(ValueError, match='path is empty: give a file of counts'):
    fields.check_needed(Run(1))
  fields.check_needed(Run(1, path='counts'))
