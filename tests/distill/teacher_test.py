"""Answers are plain decoding's; features are those of a fresh pass."""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import api, build, forward, requests
from specdec_jax.distill import teacher
from specdec_jax.io import files
from specdec_jax.models import eagle
from specdec_jax.verify import reject

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

PROMPTS = [[5, 6, 7], [9], list(range(20, 31)), [3, 3], [8, 1, 2]]
TAPS = (0, 1)


@pytest.fixture(scope='module')
def target():
  return build.load('random:tiny')


def asked(**changes) -> teacher.Asked:
  facts = dict(
    teacher='t',
    dtype='float32',
    questions='q',
    stop_ids=build.load('random:tiny').tokenizer.eos_ids,
    rows=len(PROMPTS),
    length=24,
    temperatures=(0.0, 1.0),
    seed=7,
    taps=TAPS,
  )
  return teacher.Asked(**facts | changes)


def answer(
  target, folder, wanted=None, track=lambda items, what: items, texts=None
):
  return teacher.answer(
    folder,
    PROMPTS,
    wanted or asked(),
    build.target_model(target),
    target.params,
    rule=reject.RULE,
    batch=2,
    track=track,
    texts=texts,
  )


@pytest.fixture(scope='module')
def whole(target, tmp_path_factory):
  folder = tmp_path_factory.mktemp('answers')
  return folder, answer(target, folder)


def test_says_what_plain_decoding_says(target, whole):
  _, answers = whole
  for i, prompt in enumerate(PROMPTS):
    start, end = answers.spans[i]
    assert answers.tokens[i, :start].tolist() == prompt
    engine = build.engine(target)
    wanted = api.Settings(24 - len(prompt), (0.0, 1.0)[i % 2], seed=7)
    request = api.request_of(engine, [requests.Item(prompt, i)], wanted)
    (plain,) = api.run(engine, request, wanted)
    assert answers.tokens[i, start:end].tolist() == plain.tokens


def test_features_and_mass_are_those_of_a_fresh_pass(target, whole):
  _, answers = whole
  model = build.target_model(target)
  rows, L = answers.tokens.shape
  hidden, taps, _ = forward.read(
    model,
    target.params,
    jnp.asarray(answers.tokens),
    jnp.zeros((rows,), jnp.int32),
    model.init_cache(rows, L),
    slots=L,
    taps=TAPS,
  )
  want = np.asarray(eagle.normed(forward.concat(taps), len(TAPS)))
  mass = np.asarray(jax.nn.logsumexp(model.head(target.params, hidden), -1))
  for i, (_, end) in enumerate(answers.spans):
    # The last token was never read.
    np.testing.assert_allclose(
      answers.features[i, : end - 1], want[i, : end - 1], atol=2e-3
    )
    np.testing.assert_allclose(
      answers.mass[i, : end - 1], mass[i, : end - 1], rtol=1e-5
    )
    assert not answers.features[i, end:].any()


def test_of_a_text_the_same_is_kept(target, whole, tmp_path):
  """Its own answers, given as a text, are features of the same pass."""
  _, answers = whole
  texts = np.asarray(answers.tokens)
  heard = answer(target, tmp_path, asked(temperatures=()), texts=texts)
  np.testing.assert_array_equal(heard.tokens, texts)
  for i, (start, end) in enumerate(answers.spans):
    assert heard.spans[i].tolist() == [start, texts.shape[1]]
    for one, two in (
      (heard.features, answers.features),
      (heard.mass, answers.mass),
    ):
      np.testing.assert_allclose(
        one[i, : end - 1], two[i, : end - 1], atol=2e-3, rtol=1e-4
      )


def test_goes_on_where_it_stopped(target, whole, tmp_path):
  def stops(items, what):
    yield from list(items)[:2]
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    answer(target, tmp_path, track=stops)
  assert files.read_json(tmp_path / 'facts.json')['done'] == 4
  left = []
  answer(target, tmp_path, track=lambda x, _: left.extend(x) or left)
  assert left == [4]
  for name in ('tokens', 'spans', 'features', 'mass'):
    one, other = (f / f'{name}.npy' for f in (tmp_path, whole[0]))
    assert one.read_bytes() == other.read_bytes(), name


def test_is_not_asked_twice(target, whole):
  def nothing(items, what):
    assert not len(items)
    return items

  folder, answers = whole
  again = answer(target, folder, track=nothing)
  np.testing.assert_array_equal(again.tokens, answers.tokens)


def test_refuses_a_folder_of_other_answers(target, whole):
  with pytest.raises(ValueError, match='answers with other seed, taps;'):
    answer(target, whole[0], asked(seed=8, taps=(1,)))


@pytest.mark.parametrize('name', ['tokens', 'features'])
def test_refuses_a_folder_with_half_a_file(name, target, tmp_path):
  answer(target, tmp_path)
  path = tmp_path / f'{name}.npy'
  path.write_bytes(path.read_bytes()[:-40])
  with pytest.raises(ValueError, match=f'{name}.npy: cannot be read .*again'):
    answer(target, tmp_path)


@pytest.mark.parametrize('what', ['posix_fallocate', 'mkdir', 'replace'])
def test_a_full_disk_is_one_sentence(what, target, tmp_path, monkeypatch):
  def full(*args, **named):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch:
    patch.setattr(os, what, full)
    with pytest.raises(ValueError, match='No space left .*mend that'):
      answer(target, tmp_path / 'new')
  # With room it goes on, from whatever was left.
  assert answer(target, tmp_path / 'new').spans.all()


def test_refuses_a_folder_that_lost_a_file(target, tmp_path):
  answer(target, tmp_path)
  (tmp_path / 'mass.npy').unlink()
  with pytest.raises(
    ValueError, match='mass.npy: cannot be read .*to ask again'
  ):
    answer(target, tmp_path)
