"""n-grams against counting by hand; the file; the script as a user runs it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, sharding
from specdec_jax.drafters import ngram
from specdec_jax.io.published import draft_file
from tests import programs

V = 7
TEXTS = [
  np.random.default_rng(0).integers(0, V - 1, 200),  # V - 1: nothing follows it
  [*(np.arange(300) ** 2 // 7 % (V - 1)), V - 1],
]


def by_hand(last: int, order: int) -> np.ndarray:
  """The distribution after a token (Witten and Bell), from the definition."""
  unigram_V = np.bincount(np.concatenate(TEXTS), minlength=V) + 1.0
  unigram_V /= unigram_V.sum()
  seen_V = np.zeros(V)
  for text in TEXTS:
    for first, then in itertools.pairwise(text):
      seen_V[then] += first == last
  total = seen_V.sum() + (seen_V > 0).sum()
  if order == 1 or not total:
    return unigram_V
  return seen_V / total + (1 - seen_V.sum() / total) * unigram_V


def distributions(counts: ngram.Counts, vocab: int, ids: int) -> np.ndarray:
  """What the model predicts after each id, with hidden states from apply."""
  model, params = ngram.model(vocab, ids=ids), jax.tree.map(jnp.array, counts)
  tokens_BT = jnp.arange(ids)[:, None]
  hidden, _, _ = model.apply(params, tokens_BT, None, None, None, ())
  return np.exp(model.head(params, hidden))[:, 0]


@pytest.mark.parametrize('order', [1, 2])
def test_the_law_is_that_of_the_counts(order):
  q_VV = distributions(ngram.count(TEXTS, order=order, vocab=V), V, V)
  np.testing.assert_allclose(q_VV.sum(-1), 1, atol=1e-5)
  for token, q_V in enumerate(q_VV):
    np.testing.assert_allclose(q_V, by_hand(token, order), atol=1e-6)


def test_the_commonest_continuations_are_kept():
  follow = np.repeat(np.arange(1, 60), np.arange(1, 60))
  text = np.stack([np.zeros_like(follow), follow], 1).ravel()
  counts = ngram.count([text], order=2, vocab=60)
  assert counts.next_VM.shape == (60, ngram.MOST)
  assert counts.next_VM[0].tolist() == list(range(59, 59 - ngram.MOST, -1))
  q_VV = distributions(counts, 60, 60)
  assert (q_VV > 0).all()
  np.testing.assert_allclose(q_VV.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize('dtype', [np.int32, np.uint16, np.uint32])
def test_a_large_vocabulary_is_counted_alike_in_every_type_of_id(dtype):
  """From 46,341 tokens on, the number of a pair needs more than 32 bits."""
  vocab, text = 2**16, [60000, 60001] * 5 + [7, 8, 9]
  counts = ngram.count([np.array(text, dtype)], order=2, vocab=vocab)
  rows = [60000, 60001, 7, 8, 9]
  # c / (c + t): 60000 is followed 5 times by one token, 60001 by two.
  np.testing.assert_array_equal(
    counts.next_VM[rows], [[60001, 0], [60000, 7], [8, 0], [9, 0], [0, 0]]
  )
  np.testing.assert_allclose(
    counts.weight_VM[rows],
    [[5 / 6, 0], [4 / 7, 1 / 7], [1 / 2, 0], [1 / 2, 0], [0, 0]],
    rtol=1e-6,
  )


def test_ids_that_are_padding_have_no_chance():
  counts = ngram.count(TEXTS, order=2, vocab=V)
  q_VV = distributions(counts, V + 3, V)
  assert not q_VV[:, V:].any()
  plain_VV = distributions(counts, V, V)
  np.testing.assert_allclose(q_VV[:, :V], plain_VV, rtol=1e-6)


@pytest.mark.parametrize(
  'texts, order, message',
  [
    ([[1]], 2, 'want a text of 2 tokens or more'),
    ([], 1, 'want a text of 1 tokens or more'),
    ([[1, V]], 2, f'id {V} is outside the vocabulary of {V} tokens'),
  ],
)
def test_what_cannot_be_counted(texts, order, message):
  with pytest.raises(ValueError, match=message):
    ngram.count(texts, order=order, vocab=V)


script = functools.partial(programs.run, 'scripts/ngram.py')


@pytest.mark.more
def test_drafts_from_a_file_that_the_script_wrote(tmp_path):
  """One copy of the counts, on every device of a mesh."""
  (tmp_path / 'a.txt').write_text('to be or not to be')
  path = tmp_path / 'a.ngram'
  given = f'--output={path}', f'--corpus={tmp_path}/a.txt'
  shown = script('--target=random:tiny', *given).check().document
  assert (shown['order'], shown['tokens']) == (2, 18)
  assert shown['bytes'] == path.stat().st_size
  arrays, about = draft_file.read(draft_file.NGRAM, path)
  wanted = ngram.count([list(b'to be or not to be')], order=2, vocab=258)
  for name, x in wanted._asdict().items():
    np.testing.assert_array_equal(arrays[name], x)
  mesh = sharding.make_mesh(2, 2)
  target = build.load('random:tiny', mesh=mesh)
  assert about['tokenizer'] == target.tokenizer.fingerprint()
  one, two, other = (
    build.engine(target, ngram.Settings(path, min_confidence=c), gamma=g)
    for g, c in ((1, 0.2), (2, 0.2), (2, 0.0))
  )
  assert one.drafter.name == 'ngram' and one.q is two.q is not None
  assert two.programs is not other.programs
  for a, b in zip(one.weights.draft, two.weights.draft, strict=True):
    assert isinstance(a, jax.Array) and a is b
    assert a.sharding.is_fully_replicated
    assert a.sharding.device_set == set(mesh.devices.flat)


@pytest.mark.more
@pytest.mark.parametrize(
  'arguments, message',
  [
    ([], '--target=SOURCE and --output=FILE'),
    (
      ['--target=random:tiny', '--output={}/a', '--corpus={}/short'],
      'of 2 tok',
    ),
    (
      ['--target=random:tiny', '--output={}/no/a', '--corpus={}/long'],
      'ngram.py: output {0}/no/a: cannot be written: No such file',
    ),
  ],
)
def test_bad_input_is_one_sentence(arguments, message, tmp_path):
  (tmp_path / 'short').write_text('a')
  (tmp_path / 'long').write_text('abc')
  before = sorted(tmp_path.iterdir())
  done = script(*(x.format(tmp_path) for x in arguments))
  done.check_refused(message.format(tmp_path))
  assert sorted(tmp_path.iterdir()) == before
