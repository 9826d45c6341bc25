"""Distillation for an encoder-decoder: its prompts are sources."""

import json
import pathlib
import types

import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import build, requests
from specdec_jax.distill import (
  completions,
  distillation,
  evaluate,
  teacher,
  training_prompts,
)
from specdec_jax.io.published import draft_file
from specdec_jax.models import lm
from specdec_jax.train import loop
from tests.distill import runs

TEACHER = 'random:t5_tiny'


@pytest.fixture
def pairs(tmp_path):
  """Settings of a text with twelve pairs, two of them of one source."""
  lines = [dict(long=f'all about {i % 11}', short=f'{i}') for i in range(12)]
  path = tmp_path / 'pairs.jsonl'
  path.write_text('\n'.join(map(json.dumps, lines)))
  return dict(source=str(path), source_field='long', field='short')


# --- prompts ------------------------------------------------------------------


def test_prompts_are_sources_that_keep_their_beginning(pairs):
  target = build.load(TEACHER)
  stop = target.tokenizer.eos_ids[0]
  for source in (dict(source='stdlib:prose'), dict(source='questions'), pairs):
    data = runs.settings('t5', data=source).data
    found = training_prompts.make(data, target)
    for half, size in ((found.kept, 8), (found.held_out, 2)):
      assert [x.number for x in half] == list(range(size))
      for x in half:
        assert tuple(x.tokens) == (target.start,)
        assert 1 < len(x.source) <= 32 and x.source[-1] == stop
    texts = {target.tokenizer.decode(x.source[:-1]) for x in found.kept}
    assert len(texts) == 8 and not any('\n\n' in x for x in texts)
    assert found.texts is None


def texts_of(pairs, target):
  """Prompts with their texts."""
  data = pairs | dict(completions='text', source_length=9)
  return training_prompts.make(runs.settings('t5', data=data).data, target)


def test_pairs_are_sources_with_their_texts(pairs):
  target = build.load(TEACHER)
  found = texts_of(pairs, target)
  rows = found.texts
  words = lambda ids: target.tokenizer.decode([i for i in ids if i != stop])
  stop = target.tokenizer.eos_ids[0]
  seen = set()
  for i, prompt in enumerate(found.kept):
    end = rows['source_length'][i]
    np.testing.assert_array_equal(rows['source'][i, :end], prompt.source)
    start, *said = rows['tokens'][i].tolist()
    said = said[: rows['counted'][i].sum()]
    assert start == target.start and said[-1] == stop
    seen.add(int(words(said)))
  # Of the two with one source the last: no source is held out and trained on.
  assert len(seen) == 8 and 0 not in seen


def test_rows_are_cut_behind_what_counts(pairs):
  rows = texts_of(pairs, build.load(TEACHER)).texts
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


def test_answers_of_students_stand_beside_their_own_sources(monkeypatch):
  """In whatever order the rows have ended."""
  s = runs.settings('t5', data=dict(completions='student', refresh=2))
  asked = [requests.Item((0,), i, source=[20 + i, 1]) for i in range(8)]

  def generate(target, model, weights, prompts, data, seed):
    # Each answers with its own source; the last ones end first.
    for at in np.split(np.arange(len(prompts))[::-1], 4):
      tokens = np.array([[0, *prompts[i].source] for i in at])
      yield at, {'tokens': tokens, 'spans': np.array([[1, 3]] * len(at))}

  monkeypatch.setattr(completions, 'generate', generate)
  target = types.SimpleNamespace(start=0)
  student = types.SimpleNamespace(weights=lambda x: x, model=object())
  sample = distillation._sampler(s, target, student, asked, None)
  rows = sample(3, {})
  assert len(rows['tokens']) == 8
  np.testing.assert_array_equal(rows['tokens'][:, 1:], rows['source'][:, :2])
  first = rows['tokens'][:, 1].tolist()
  assert sorted(first) == [*range(20, 28)]


# --- runs ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('completions', 'student'),
  [
    ('teacher', dict(layers=(1,), vocabulary=64)),
    ('text', runs.T5 | dict(share=False)),
    ('mixed', dict(layers=(1,), vocabulary=0)),
    ('student', runs.T5 | dict(share=True)),
  ],
)
def test_every_source_of_completions_trains_a_draft(
  completions, student, pairs, tmp_path
):
  keep = completions == 'teacher'
  data = pairs | dict(completions=completions, keep=keep)
  figures, _ = runs.run(tmp_path, 't5', student=student, data=data)
  assert figures['finished'] and 0 < figures['alpha'] <= 1
  target, draft = build.load(TEACHER), build.load(figures['draft'])
  assert len(draft.draft_ids) == student['vocabulary']
  runs.assert_decodes_as_plain(draft, TEACHER)
  assert_shared(draft, target, student.get('share', True))
  file = tmp_path / 'run/draft.safetensors'
  assert file.exists() == bool(student['layers'])
  if file.exists():  # the same draft but for rounding
    small = draft_file.layers_for(str(file), target)
    assert small.draft_ids == draft.draft_ids
    own, whole = (lm.flatten(x.params)['norm/scale'] for x in (small, draft))
    np.testing.assert_array_equal(own, whole)
    options = dict(source=str(file))
    runs.assert_decodes_as_plain('lm', TEACHER, draft_options=options)


def assert_shared(draft, target, share: bool):
  """The encoder is the teacher's bit for bit, but not the decoder."""
  read = lambda x: lm.flatten(build.load(x.source, kernels='xla').params)
  own, theirs = read(draft), read(target)
  same = {n for n, x in own.items() if np.array_equal(x, theirs.get(n))}
  encoder = {n for n in own if n.startswith('encoder/')}
  assert encoder and encoder <= same if share else not encoder & same
  assert not any('kernel' in n for n in same - encoder)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bytes(pairs, tmp_path):
  """Killed before its fourth step: the lines of its metrics and its draft's
  arrays."""
  data, train, left = pairs | dict(completions='mixed'), loop.run, []

  def stops(task, *args, **named):
    def refresh(step, params):
      if step == 3:
        raise KeyboardInterrupt
      task.refresh(step, params)

    return train(task._replace(refresh=refresh), *args, **named)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop, 'run', stops)
    with pytest.raises(KeyboardInterrupt):
      runs.run(tmp_path / 'cut', 't5', data=data)
  for name in ('whole', 'cut'):
    figures, lines = runs.run(tmp_path / name, 't5', data=data)
    (file,) = pathlib.Path(figures['draft']).glob('*.safetensors')
    arrays = safetensors.numpy.load_file(file)
    left.append((lines, {n: x.tobytes() for n, x in arrays.items()}))
  assert left[0] == left[1]


@pytest.mark.slow
@pytest.mark.parametrize('share', [True, False])
def test_a_student_of_all_layers_is_its_teacher(share):
  target = build.load(TEACHER, scan_layers=False, kernels='xla')
  own = dict(layers=(0, 1), vocabulary=0, share=share)
  s, student = runs.made(target, np.arange(512), 't5', student=own)
  assert ('encoder' in student.params) != share
  assert ('encoder' in student.frozen['shared']) == share
  sources = [[5, 6, 7, 256], [9, 256], list(range(20, 31))]
  asked = [requests.Item((0,), i, source=x) for i, x in enumerate(sources)]
  figures = evaluate.make(
    s.judge, target, student.drafter, student.model, asked, 0
  )
  np.testing.assert_allclose(
    figures(student.weights(student.params))['alpha'], 1, 1e-5
  )
