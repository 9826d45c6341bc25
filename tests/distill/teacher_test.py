"""Answers are plain decoding's; features are those of a forward pass."""

import dataclasses
import errno
import logging
import os
import shutil

import jax
import numpy as np
import pytest

from specdec_jax import api, build, completion, printing, requests
from specdec_jax.distill import completions, teacher
from specdec_jax.models import eagle, lm
from specdec_jax.train import text_loss
from tests.distill import runs
from tests.drafters import windows

PROMPTS = [[5, 6, 7], [9], list(range(20, 31)), [3, 3], [8, 1, 2]]
ITEMS = requests.items(PROMPTS)
TAPS = (0, 1)
# Of an encoder-decoder, whose prompts are the sources.
SOURCED = [requests.Item((0,), i, source=x) for i, x in enumerate(PROMPTS)]


@pytest.fixture(scope='module')
def target():
  return build.load('random:tiny')


def answer(target, folder, prompts=ITEMS, taps=TAPS, **changes):
  own = dict(length=24, source_length=16, temperatures=(0.0, 1.0), seed=7)
  own |= dict(batch=2, folder=str(folder), **changes)
  data = runs.settings(data=own).data
  return teacher.answer(data, target, prompts, taps)


def span(rows, i: int) -> tuple[int, int]:
  """Where the answer in a row begins and ends."""
  at = np.flatnonzero(rows['counted'][i])
  return at[0], at[-1] + 1


def test_tokens_of_completions_count():
  tokens = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 0, 0, 0]])
  spans = np.array([[2, 4], [1, 5], [2, 2]])  # the last is left out
  rows = teacher.rows({'tokens': tokens, 'spans': spans})
  assert rows['tokens'].tolist()[:2] == [[1, 2, 3, 4, 0], [6, 7, 8, 9, 10]]
  assert rows['counted'].astype(int).tolist() == [
    [0, 0, 1, 1, 0],
    [0, 1, 1, 1, 1],
    [0, 0, 0, 0, 0],
  ]


def test_other_sources_are_other_prompts():
  """Whose decoders begin alike: their answers are kept apart."""
  one, two = ([x._replace(source=y)] for x in SOURCED[:1] for y in ([1], [2]))
  assert teacher.digest(one) != teacher.digest(two)
  assert teacher.digest(one) == teacher.digest([*one])


@pytest.fixture(scope='module')
def recorded(target, tmp_path_factory):
  folder = tmp_path_factory.mktemp('answers')
  return folder, answer(target, folder)


@pytest.fixture(scope='module')
def sourced(tmp_path_factory):
  """(a teacher that scales its head's input as T5 1.0 does, its answers)."""
  target = build.load('random:t5_tiny', scan_layers=False, kernels='xla')
  own = dataclasses.replace(target.config, head_scale=0.7)
  target = dataclasses.replace(target, lm_config=own)
  folder = tmp_path_factory.mktemp('sourced')
  return target, answer(target, folder, SOURCED)


@pytest.fixture(
  params=[pytest.param('decoder', marks=pytest.mark.more), 'encoder']
)
def answered(request):
  """(teacher, prompts, answers); two rows at a time, so that most prompts take
  the row of another."""
  get = request.getfixturevalue
  if request.param == 'decoder':
    return get('target'), ITEMS, get('recorded')[1]
  target, answers = get('sourced')
  return target, SOURCED, answers


@pytest.mark.more
def test_answers_are_those_of_plain_decoding_each_alone(answered):
  target, items, answers = answered
  engine = build.engine(target)
  for i, item in enumerate(items):
    start, end = span(answers, i)
    assert answers['tokens'][i, :start].tolist() == list(item.tokens)
    wanted = completion.Settings(
      (0.0, 1.0)[i % 2], seed=7, max_new_tokens=24 - len(item.tokens)
    )
    asked = api.ask(target, item, wanted)
    ((_, plain),) = api.answers(engine, [asked], rows=1)
    assert answers['tokens'][i, start:end].tolist() == plain.tokens
  assert len({tuple(x) for x in answers['tokens'].tolist()}) == len(items)


@pytest.mark.more
def test_features_and_mass_are_those_of_a_forward_pass(answered):
  target, _, answers = answered
  given, source = (target.model, target.params), text_loss.source_of(answers)
  hidden, taps = windows.tapped(*given, answers['tokens'], TAPS, source)
  want = np.asarray(eagle.normed(taps, len(TAPS)))
  logits = target.model.head(target.params, hidden)
  mass = np.asarray(jax.nn.logsumexp(logits, -1))
  for i in range(len(want)):
    start, end = span(answers, i)
    read, drawn = slice(end - 1), slice(start - 1, end - 1)
    np.testing.assert_allclose(
      answers['features'][i, read], want[i, read], atol=2e-3
    )
    # The logit of the token that was drawn comes from float16 features.
    np.testing.assert_allclose(
      answers['mass'][i, drawn], mass[i, drawn], atol=2e-3
    )
    assert not answers['features'][i, end - 1 :].any()


@pytest.mark.more
def test_rows_with_broken_logits_are_left_out(target, tmp_path, caplog):
  """Token 9 makes the teacher's logits NaN: one prompt has it."""
  own = dataclasses.replace(target.config, tied=False).running(packed=False)
  params = dict(lm.init(own, 0))
  params['embed'] = np.array(params['embed'])
  params['embed'][9] = np.nan
  broken = dataclasses.replace(target, lm_config=own, params=params)
  with jax.debug_nans(False), caplog.at_level(logging.WARNING):
    found = answer(broken, tmp_path, temperatures=(0.0,))
  assert any('1 of 5 answers are left out' in x.message for x in caplog.records)
  lengths = found['counted'].sum(1).tolist()
  assert lengths[1] == 0 and min(lengths[:1] + lengths[2:]) > 0
  # A masked NaN would still have a NaN gradient.
  assert all(np.isfinite(found[x]).all() for x in ('features', 'mass'))
  assert not found['features'][1].any() and found['features'][0].any()


def test_a_teacher_without_a_sound_answer_is_refused(target, tmp_path):
  bad = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), target.params)
  with jax.debug_nans(False), pytest.raises(ValueError, match='5 of 5 answers'):
    answer(dataclasses.replace(target, params=bad), tmp_path)


def test_resumes_where_it_stopped(target, recorded, tmp_path, monkeypatch):
  left = []

  def track(items, what, total):
    left.append(total)
    for i, item in enumerate(items):
      if i == 2 and len(left) == 1:
        raise KeyboardInterrupt
      yield item

  monkeypatch.setattr(printing, 'track', track)
  with pytest.raises(KeyboardInterrupt):
    answer(target, tmp_path)
  assert (np.load(tmp_path / 'spans.npy')[:, 1] > 0).sum() == 2
  answer(target, tmp_path)
  assert left == [5, 3]
  for name in ('tokens', 'spans', 'features', 'mass'):
    one, other = (f / f'{name}.npy' for f in (tmp_path, recorded[0]))
    assert one.read_bytes() == other.read_bytes(), name
  # Nothing is answered twice.
  again = answer(target, tmp_path)
  assert left == [5, 3, 0]
  np.testing.assert_array_equal(again['tokens'], recorded[1]['tokens'])


def test_a_folder_grows_with_its_prompts(target, recorded, tmp_path):
  whole = recorded[1]
  for count in (2, 5, 3):
    found = answer(target, tmp_path, ITEMS[:count])
    want = jax.tree.map(lambda x, n=count: x[:n], whole)
    jax.tree.map(np.testing.assert_array_equal, found, want)
  assert len(np.load(tmp_path / 'tokens.npy')) == 5


def test_answers_are_of_their_sources(sourced, tmp_path, monkeypatch):
  target, _ = sourced
  of = lambda items, **more: answer(target, tmp_path, items, **more)
  few = of(SOURCED[:3])
  assert few['source_length'].tolist() == [len(x) for x in PROMPTS[:3]]
  monkeypatch.setattr(completions, 'generate', lambda *a, **b: iter(()))
  two = of(SOURCED[:2])['tokens']
  np.testing.assert_array_equal(two, few['tokens'][:2])
  with pytest.raises(ValueError, match='holds answers with other sources'):
    of(SOURCED, source_length=32)


def test_a_folder_of_other_answers_is_refused(target, recorded):
  rounded = build.load('random:tiny', dtype='int8')  # of the same file
  part = requests.items([[5, 6]])
  for asked, why in (
    (dict(target=rounded), 'dtype'),
    (dict(target=target, seed=8, taps=(1,)), 'seed, taps'),
    (dict(target=target, prompts=part), 'prompts'),
  ):
    with pytest.raises(ValueError, match=f'holds answers with other {why}; na'):
      answer(folder=recorded[0], **asked)


def test_a_damaged_folder_is_refused(target, recorded, tmp_path):
  shutil.copytree(recorded[0], tmp_path / 'copy')
  path = tmp_path / 'copy/mass.npy'
  path.write_bytes(path.read_bytes()[:-40])
  for _ in ('truncated', 'gone'):
    with pytest.raises(ValueError, match='mass.npy: cannot be read .*again'):
      answer(target, tmp_path / 'copy')
    path.unlink(missing_ok=True)


@pytest.mark.parametrize('what', ['posix_fallocate', 'mkdir', 'replace'])
def test_a_full_disk_is_one_sentence(what, target, tmp_path, monkeypatch):
  def full(*args, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    patch.setattr(os, what, full)
    with pytest.raises(ValueError, match='No space left .*mend that'):
      answer(target, tmp_path / 'new')
  # With room it resumes, from whatever was left.
  assert answer(target, tmp_path / 'new')['counted'].any(1).all()
