"""Distillation for an encoder-decoder: its prompts are sources."""

import json
import pathlib

import numpy as np
import pytest

from configs import distill_t5
from specdec_jax import api, build, requests
from specdec_jax.distill import (
  distillation,
  evaluate,
  students,
  teacher,
)
from specdec_jax.distill import prompts as prompts_lib
from specdec_jax.drafters import layers_file
from specdec_jax.io import export
from specdec_jax.models import lm
from specdec_jax.train import loop as loop_lib

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')
SIZE = dict(layers=(), size='t5_tiny', vocabulary=0)


def config(**changes):
  c = distill_t5.get_config('tiny').unlock()
  few = dict(
    data=dict(prompts=8, held_out=2, batch=10, refresh=2, keep=False),
    batch=dict(rows=4),
    run=dict(steps=4, checkpoint_every=2, evaluate_every=4, log_every=1),
    judge=dict(gamma=2, new_tokens=6),
  )
  for section, values in [*few.items(), *changes.items()]:
    c[section].update(values)
  return distillation.settings(c)


def a_run(tmp_path, monkeypatch, **changes):
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path / 'cache'))
  return distillation.run(config(**changes), tmp_path / 'run')


@pytest.fixture
def pairs(tmp_path):
  """Settings of a text with twelve pairs, two of them of one source."""
  lines = [dict(long=f'all about {i % 11}', short=f'{i}') for i in range(12)]
  path = tmp_path / 'pairs.jsonl'
  path.write_text('\n'.join(map(json.dumps, lines)))
  return dict(source=str(path), source_field='long', field='short')


def teacher_of(**options):
  return build.load('random:t5_tiny', scan_layers=False, **options)


# --- prompts ------------------------------------------------------------------


def test_prompts_are_sources_that_keep_their_beginning(pairs):
  target = build.load('random:t5_tiny')
  stop = target.tokenizer.eos_ids[0]
  for source in (dict(source='stdlib:prose'), dict(source='questions'), pairs):
    found = prompts_lib.make(config(data=source).data, target)
    for half, size in ((found.kept, 8), (found.held_out, 2)):
      assert [x.number for x in half] == list(range(size))
      for x in half:
        assert tuple(x.tokens) == (target.start,)
        assert 1 < len(x.source) <= 32 and x.source[-1] == stop
    texts = {target.tokenizer.decode(x.source[:-1]) for x in found.kept}
    assert len(texts) == 8 and not any('\n\n' in x for x in texts)
    assert found.texts is None


def test_pairs_are_sources_with_their_texts(pairs):
  target = build.load('random:t5_tiny')
  s = config(data=pairs | dict(completions='text', source_length=9)).data
  found = prompts_lib.make(s, target)
  answers = prompts_lib.answers(s, target, found, ())
  rows = teacher.rows(answers)
  words = lambda ids: target.tokenizer.decode([i for i in ids if i != stop])
  stop = target.tokenizer.eos_ids[0]
  seen = set()
  for i, prompt in enumerate(found.kept):
    end = rows['source_length'][i]
    np.testing.assert_array_equal(rows['source'][i, :end], prompt.source)
    start, *said = rows['tokens'][i][: answers.spans[i, 1]].tolist()
    assert start == target.start and said[-1] == stop
    assert rows['counted'][i].sum() == len(said)
    seen.add(int(words(said)))
  # Of the two with one source the last: no source is held out and trained on.
  assert len(seen) == 8 and 0 not in seen


def test_rows_are_cut_behind_what_counts(pairs):
  target = build.load('random:t5_tiny')
  s = config(data=pairs | dict(completions='text', source_length=9)).data
  found = prompts_lib.make(s, target)
  rows = teacher.rows(prompts_lib.answers(s, target, found, ()))
  rows |= {'features': rows['tokens'][..., None], 'mass': rows['tokens']}
  ends = teacher.ends(rows)
  assert set(ends) == set(rows) - {'source_length'}
  for name in set(rows) - {'source_length'}:
    longest = max(ends[name])
    assert 1 < longest < rows[name].shape[1] or name == 'source'
    cut = [x[:n] for x, n in zip(rows[name], ends[name], strict=True)]
    assert all(x[-1].any() for x in cut)  # the last column counts, none after
    assert sum(x.sum() for x in cut) == rows[name].sum()
  assert teacher.ends({'tokens': rows['tokens']}) == {}


# --- runs ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('completions', 'student'),
  [
    ('teacher', dict(layers=(1,), vocabulary=64)),
    ('text', SIZE | dict(share=False)),
    ('mixed', dict(layers=(1,), vocabulary=0)),
    ('student', SIZE | dict(share=True, remat=True)),
  ],
)
def test_every_source_of_completions_trains_a_draft(
  completions, student, pairs, tmp_path, monkeypatch
):
  keep = completions == 'teacher'
  data = pairs | dict(completions=completions, keep=keep)
  figures = a_run(tmp_path, monkeypatch, student=student, data=data)
  assert figures['finished'] and 0 < figures['alpha'] <= 1
  target, draft = build.load('random:t5_tiny'), build.load(figures['draft'])
  assert len(draft.draft_ids) == student['vocabulary']
  of = lambda **more: (
    api.generate(target, ['some words'], max_new_tokens=8, **more)[0].tokens
  )
  assert of(draft=draft, gamma=2) == of()
  assert_shared(draft, target, student.get('share', True))
  file = tmp_path / 'run/draft.safetensors'
  assert file.exists() == ('layers' in student)
  if file.exists():  # the same draft but for rounding
    small = layers_file.read(str(file), target)
    assert small.draft_ids == draft.draft_ids
    own, whole = (lm.flatten(x.params)['norm/scale'] for x in (small, draft))
    np.testing.assert_array_equal(own, whole)
    options = dict(source=str(file))
    assert of(draft='lm', gamma=2, draft_options=options) == of()


@pytest.mark.slow
def test_a_mesh_changes_nothing(pairs, tmp_path, monkeypatch):
  found = []
  for mesh in (dict(data=1, model=1), dict(data=2, model=4)):
    folder = tmp_path / f'{mesh["model"]}'
    assert a_run(folder, monkeypatch, data=pairs, mesh=mesh)['finished']
    rows = map(json.loads, (folder / 'run/metrics.jsonl').open())
    found.append([x['loss'] for x in rows if 'loss' in x])
  assert len(found[0]) == 4
  np.testing.assert_allclose(*found, rtol=1e-3)


def assert_shared(draft, target, share: bool):
  """The encoder is the teacher's bit for bit, but not the decoder."""
  read = lambda x: lm.flatten(build.load(x.source, kernels='xla').params)
  own, theirs = read(draft), read(target)
  same = {n for n, x in own.items() if np.array_equal(x, theirs.get(n))}
  encoder = {n for n in own if n.startswith('encoder/')}
  assert encoder and encoder <= same if share else not encoder & same
  assert not any('kernel' in n for n in same - encoder)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bytes(pairs, tmp_path, monkeypatch):
  data = pairs | dict(completions='mixed')
  run = loop_lib.run

  def stops(task, *args, **named):
    def refresh(step, params):
      if step == 3:
        raise KeyboardInterrupt
      task.refresh(step, params)

    return run(task._replace(refresh=refresh), *args, **named)

  ends = []
  for name in ('whole', 'cut'):
    folder = tmp_path / name
    if name == 'cut':
      with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop_lib, 'run', stops)
        a_run(folder, monkeypatch, data=data)
    draft = pathlib.Path(a_run(folder, monkeypatch, data=data)['draft'])
    metrics = folder / 'run/metrics.jsonl'
    ends.append([x.read_bytes() for x in (metrics, *draft.glob('*.safe*'))])
  assert ends[0] == ends[1] and len(ends[0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize('share', [True, False])
def test_a_student_of_all_layers_is_its_teacher(share):
  target = teacher_of(kernels='xla')
  s = config(student=dict(layers=(0, 1), vocabulary=0, share=share))
  student = students.make(s, target, students.Start(), np.arange(512))
  assert ('encoder' in student.params) != share
  assert ('encoder' in student.frozen['shared']) == share
  sources = [[5, 6, 7, 256], [9, 256], list(range(20, 31))]
  asked = [requests.Item((0,), i, source=x) for i, x in enumerate(sources)]
  judge = evaluate.judge(
    s.judge, target, student.drafter, student.model, asked, 0
  )
  np.testing.assert_allclose(
    judge(student.weights(student.params))['alpha'], 1, 1e-5
  )


# --- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
  ('changes', 'why'),
  [
    (
      dict(student=dict(kind='eagle', layers=(), vocabulary=64)),
      "student.kind='eagle': reads no source, but t5_tiny .* give lm",
    ),
    (
      dict(student=SIZE | dict(size='tiny')),
      "size='tiny' has no encoder, teacher t5_tiny .* has one; .* both need",
    ),
    (
      dict(teacher=dict(source='random:tiny'), student=SIZE),
      "size='t5_tiny' has one, teacher tiny .* has no encoder; .* both need",
    ),
    (dict(student=SIZE | dict(size='', path='PATH')), 'PATH has no encoder'),
    (
      dict(data=dict(completions='text')),
      "data.source_field='': t5_tiny .* has an encoder; name the field",
    ),
    (
      dict(teacher=dict(source='random:tiny'), data=dict(source_field='long')),
      "data.source_field='long': tiny .* has no encoder to read it",
    ),
    (
      dict(data=dict(source_field='long')),
      "'stdlib:prose': source_field='long' is of rows",
    ),
    (
      dict(data=dict(source='questions', source_field='long')),
      "source_field='long': a question is a source",
    ),
    (dict(data=dict(source='magpie')), 't5_tiny .* has no chat template'),
    (
      dict(data=dict(source_length=999)),
      'data.source_length=999: the context of the teacher holds 512',
    ),
  ],
)
def test_refuses(changes, why, tmp_path, monkeypatch):
  if changes.get('student', {}).get('path'):
    path = tmp_path / 'PATH'
    own = build.load('random:tiny', kernels='xla')
    export.save(path, own.config, own.params, own.tokenizer)
    changes['student'] |= dict(path=str(path), share=False)
  with pytest.raises(ValueError, match=why):
    a_run(tmp_path, monkeypatch, **changes)
  assert not (tmp_path / 'cache/answers').exists()
