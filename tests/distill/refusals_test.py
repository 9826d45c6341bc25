"""What a distillation refuses, before the teacher answers anything."""

import dataclasses

import pytest

from specdec_jax import build
from specdec_jax.io import export
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import text
from tests.distill import runs

LM = 'student.kind=lm student.taps=() '  # and where from
SIZE = LM + 'student.size=tiny student.share=False student.vocabulary=0 '
T5 = LM + 'student.layers=() student.size=t5_tiny '
TEXT = 'data.completions=text '
MEDUSA = 'student.kind=medusa student.vocabulary=0 '
DFLASH = 'student.kind=dflash student.layers=(0,1) '
# Of configs/distill.py.
SETTINGS = [
  ('teacher.source=', 'teacher.source is empty: give a model'),
  (
    'student.kind=lm student.taps=()',
    'student.kind=lm: has nothing; give it one',
  ),
  (SIZE + 'student.taps=(1,)', r'taps=\(1,\): of no lm'),
  (LM + 'student.source=x', 'of a source has its own embedding .* share=False'),
  ('student.kind=medusa', r'vocabulary=256: of no medusa; give 0'),
  (MEDUSA + 'loss.unroll=1', 'loss.unroll=1: the heads .* judge.gamma=2 at le'),
  ('student.kind=mtp data.completions=mixed', 'mtp learns from features'),
  (TEXT, 'questions come without answers'),
  ('data.source_field=long', "source_field='long': a question is a source"),
  (TEXT + 'data.source=x', 'eagle learns from features'),
  ('data.completions=mixed data.keep=True', 'keep=True: hidden states'),
  ('data.prompt_tokens=192', 'data.prompt_tokens=192'),
  ('data.temperatures=()', 'data.temperatures='),
  ('optimiser.accumulate=3', 'batch.rows=4: optimiser.accumulate=3 has'),
]


@pytest.mark.parametrize('changes, why', SETTINGS)
def test_settings(changes, why):
  with pytest.raises(ValueError, match=why):
    runs.settings(words=changes)


# What a run finds only once it has opened its models.
OPENED = [
  ('mesh.data=2 data.held_out=9', 'data.held_out=9: mesh.data=2 has'),
  (
    'student.kind=eagle3 student.taps=(1,0)',
    r'student.taps=\(1, 0\): needs layers of the teacher, 0 to 1',
  ),
  (
    DFLASH + 'student.layers=(2,) student.taps=(1,)',
    r'student.layers=\(2,\): allowed are those of the teacher, 0 to 1',
  ),
  (
    SIZE + 'student.vocabulary=64 data.completions=student',
    'student.vocabulary=64: the completions .*mixed',
  ),
  ('data.length=9999', 'data.length=9999: the context of the teacher'),
  ('student.taps=(9,29)', r'taps=\(9, 29\): needs .* last layer 1'),
  ('student.source=nowhere', 'no such file'),
  (LM + 'student.layers=(2,)', r'student.layers=\(2,\): allowed .* 0 to 1'),
  (SIZE + 'student.size=gpt_6m', 'export: only models of the Llama'),
  (T5, 'student t5_tiny and teacher tiny .* has no encoder; both need'),
  (
    SIZE + 'data.source=stdlib:prose data.source_field=long',
    "data.source_field='long': tiny .* has no encoder; name",
  ),
]
# Of configs/distill_t5.py.
T5_OPENED = [
  (
    MEDUSA + 'student.layers=() data.completions=teacher',
    "student.kind='medusa': reads no source, but t5_tiny .* give lm",
  ),
  (
    T5 + 'student.size=tiny',
    'student tiny and teacher t5_tiny .* has no encoder; both need',
  ),
  (TEXT, "data.source_field='': t5_tiny .* has an encoder; name the field"),
  ('data.source_field=long', "'stdlib:prose': source_field='long' is of rows"),
  (
    'data.source_length=999',
    'data.source_length=999: the context of the teacher holds 512',
  ),
]
EVERY = [('eagle', *x) for x in OPENED] + [('t5', *x) for x in T5_OPENED]


@pytest.mark.parametrize('config, changes, why', EVERY)
def test_what_does_not_fit_together(config, changes, why, tmp_path):
  with pytest.raises(ValueError, match=why):
    runs.run(tmp_path, config, words=changes)
  assert not (tmp_path / 'cache/answers').exists()
  assert not (tmp_path / 'run/metrics.jsonl').exists()


def test_a_student_of_a_source_that_does_not_fit(tmp_path, monkeypatch):
  """No weights are read before it is refused, nor its teacher's."""
  corpus = text.Corpus('x', ('some words, then some more words',), '')
  other = text.train_tokenizer(corpus, 260, tmp_path / 'tokenizer')
  own, size = build.load('random:tiny').tokenizer, model_config.sized('tiny')
  short = dataclasses.replace(size, context=16)
  monkeypatch.setattr(build, 'load', None)
  for config, words, student, why in (
    ('eagle', other, size, 'have different tokenizers: id '),
    ('eagle', own, short, 'data.length=32: the context of the student holds 1'),
    ('t5', own, size, 'and teacher t5_tiny .* has no encoder; both need'),
  ):
    path = tmp_path / f'student{student.context}'
    export.save(path, student, lm.init(student, 0), words)
    own_path = runs.LM | dict(size='', layers=(), source=str(path))
    data = runs.PROSE | dict(completions='text') if config == 'eagle' else {}
    with pytest.raises(ValueError, match=why):
      runs.run(tmp_path, config, student=own_path, data=data)
