"""n-grams against counting by hand; the stop of drafting; the file."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import build, forward, sharding
from specdec_jax.drafters import ngram
from specdec_jax.io import ngrams, tokenizer

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

V = 7
TEXTS = [
  np.random.default_rng(0).integers(0, V, 200),
  np.arange(300) ** 2 // 7 % V,
]


def by_hand(context, order: int, least: int = 2) -> np.ndarray:
  """Witten and Bell's law after a context, from the definition."""
  q_V = np.bincount(np.concatenate(TEXTS), minlength=V) + 1.0
  q_V /= q_V.sum()

  def seen(words):
    n = len(words)
    return sum(
      tuple(text[i : i + n]) == tuple(words)
      for text in TEXTS
      for i in range(len(text) - n + 1)
    )

  for n in range(2, order + 1):
    h = tuple(context[len(context) - (n - 1) :])
    if any(seen(h[:m]) < least for m in range(3, n)):
      break
    counts = {x: seen((*h, x)) for x in range(V)}
    total = sum(counts.values()) + sum(c > 0 for c in counts.values())
    if not total:
      continue
    kept = [
      c / total if c >= (least if n > 2 else 1) else 0 for c in counts.values()
    ]
    q_V = (1 - sum(kept)) * q_V + np.array(kept)
  return q_V


@pytest.mark.parametrize('order', [1, 2, 4])
def test_the_law_is_that_of_the_counts(order):
  counts = ngram.count(TEXTS, order=order, vocab=V)
  model = ngram.model(V, order=order)
  contexts = list(itertools.product(range(V), repeat=3))[
    :: 1 if order > 2 else 9
  ]
  tokens = np.array(contexts, np.int32)
  hidden, _, _ = forward.read(
    model,
    counts,
    jnp.asarray(tokens),
    jnp.zeros(len(tokens), jnp.int32),
    model.init_cache(len(tokens), 4),
    slots=4,
  )
  q_BV = np.exp(model.head(jax.tree.map(jnp.asarray, counts), hidden[:, -1]))
  np.testing.assert_allclose(q_BV.sum(-1), 1, atol=1e-5)
  for context, q_V in zip(contexts, q_BV, strict=True):
    np.testing.assert_allclose(q_V, by_hand(context, order), atol=1e-3)


# Both shares of these are above their values in the nearest float16.
SEEN = (8659, 1123)


def laws(counts, vocab: int) -> np.ndarray:
  """The law after each token, from bigrams."""
  head = ngram.model(vocab, order=2).head
  after = jnp.arange(vocab)[:, None]
  return np.exp(head(jax.tree.map(jnp.asarray, counts), after))


def test_shares_are_rounded_so_that_they_leave_some_mass():
  follow = np.repeat([1, 2], SEEN)
  text = np.stack([np.zeros_like(follow), follow], 1).ravel()
  counts = ngram.count([text], order=2, vocab=6)
  exact = np.array(SEEN) / (sum(SEEN) + 2)
  shares = counts.weight_J[:2].astype(float)
  assert (shares <= exact).all() and (shares > exact * (1 - 2**-10)).all()
  q_RV = laws(counts, 6)
  assert (q_RV > 0).all()
  np.testing.assert_allclose(q_RV.sum(-1), 1, atol=1e-6)


def test_a_file_whose_shares_were_rounded_up_has_no_nan():
  near = (np.array(SEEN) / (sum(SEEN) + 2)).astype(np.float16)
  assert near.astype(float).sum() > 1
  start = np.array([0, 2, 2, 2], np.int32)
  unigram = np.full(3, 1 / 3, np.float32)
  tokens = np.array([1, 2], np.int32)
  q_RV = laws(ngram.Counts(unigram, start, tokens, near), 3)
  assert np.isfinite(q_RV).all()
  np.testing.assert_allclose(q_RV[0], [0, *near], rtol=1e-6)


def test_the_commonest_continuations_are_kept():
  follow = np.repeat(np.arange(1, 60), np.arange(1, 60))
  text = np.stack([np.zeros_like(follow), follow], 1).ravel()
  counts = ngram.count([text], order=2, vocab=60)
  mine = counts.token_J[counts.start_X[0] : counts.start_X[1]]
  assert mine.tolist() == list(range(60 - ngram.MOST, 60))


def test_the_start_of_a_text_has_shorter_contexts():
  counts = ngram.count(TEXTS, order=4, vocab=V)
  model = ngram.model(V, order=4)
  hidden, _, _ = forward.read(
    model,
    counts,
    jnp.array([[3, 1]]),
    jnp.zeros(1, jnp.int32),
    model.init_cache(1, 4) + 5,  # what an earlier text left
    slots=4,
  )
  assert hidden.tolist() == [[[-1, -1, 3], [-1, 3, 1]]]
  q_V = np.exp(model.head(jax.tree.map(jnp.asarray, counts), hidden[:, 0]))[0]
  np.testing.assert_allclose(q_V, by_hand((3,), 2), atol=1e-3)


def test_ids_that_are_padding_have_no_chance():
  counts = ngram.count(TEXTS, order=2, vocab=V)
  model = ngram.model(V + 3, order=2, ids=V)
  logits = model.head(jax.tree.map(jnp.asarray, counts), jnp.array([[2]]))
  assert np.isneginf(logits[0, V:]).all() and np.isfinite(logits[0, :V]).all()


@pytest.mark.parametrize(
  'texts, order, message',
  [
    (TEXTS, 5, 'order=5: allowed are 1 to 4'),
    ([[1, 2]], 3, 'longest text of the corpus has 2 tokens'),
    ([], 1, 'longest text of the corpus has 0 tokens'),
    ([[1, V]], 2, f'id {V} is outside the vocabulary of {V} tokens'),
    ([[1, -3, 5]], 2, f'id -3 is outside the vocabulary of {V} tokens'),
  ],
)
def test_what_cannot_be_counted(texts, order, message):
  with pytest.raises(ValueError, match=message):
    ngram.count([np.array(x) for x in texts], order=order, vocab=V)


def test_a_file_is_for_its_tokenizer(tmp_path):
  own, other = (tokenizer.from_bytes(n, f'bytes {n}') for n in (300, 257))
  counts, about = ngrams.count(['to be or not to be'], own, order=3)
  path = str(tmp_path / 'counts.safetensors')
  ngrams.write(path, counts, about)
  order, again = ngrams.read(path, own)
  assert order == 3
  for a, b in zip(counts, again, strict=True):
    np.testing.assert_array_equal(a, b)
  with pytest.raises(ValueError, match='another tokenizer than that of bytes'):
    ngrams.read(path, other)
  with pytest.raises(ValueError, match='cannot be written: No such file or d'):
    ngrams.write(str(tmp_path / 'no' / 'where'), counts, about)
  assert [x.name for x in tmp_path.iterdir()] == ['counts.safetensors']


def test_what_is_no_file_of_counts(tmp_path):
  own = tokenizer.from_bytes(300, 'bytes')
  counts, about = ngrams.count(['to be or not to be'], own, order=3)
  path = tmp_path / 'counts'
  ngrams.write(str(path), counts, about)
  (tmp_path / 'cut').write_bytes(path.read_bytes()[:-9])
  (tmp_path / 'text').write_text('to be or not to be')
  safetensors.numpy.save_file(counts._asdict(), tmp_path / 'other')
  for name, message in (
    ('cut', 'damaged'),
    ('text', 'not a file of scripts/ngram.py'),
    ('other', 'not a file of scripts/ngram.py'),
    ('.', 'not a file of scripts/ngram.py'),
    ('absent', 'No such file or directory; scripts/ngram.py makes such a file'),
  ):
    with pytest.raises(ValueError, match=f'^n-grams {tmp_path}.*: {message}'):
      ngrams.read(str(tmp_path / name), own)


@pytest.fixture
def path(tmp_path):
  """A file of counts for random:tiny."""
  own = build.load('random:tiny').tokenizer
  counts, about = ngrams.count(ngrams.texts_of([])[:40], own, order=4)
  ngrams.write(str(tmp_path / 'counts'), counts, about)
  return str(tmp_path / 'counts')


def test_drafts_for_a_target(path):
  """By its name, from a file, as configs do."""
  target = build.load('random:tiny')
  engine = build.engine(target, 'ngram', gamma=2, path=path, min_confidence=0.2)
  assert engine.drafter.name == 'ngram' and engine.q is not None
  other = build.engine(target, 'ngram', gamma=2, path=path)
  assert engine.programs is not other.programs
  again = build.engine(target, 'ngram', gamma=2, path=path, min_confidence=0.2)
  assert again.programs is engine.programs


def test_the_counts_are_put_on_the_device_once(path):
  target = build.load('random:tiny')
  one, two = (
    build.engine(target, 'ngram', gamma=gamma, path=path).weights.draft
    for gamma in (1, 2)
  )
  for a, b in zip(one, two, strict=True):
    assert isinstance(a, jax.Array) and a is b


def test_on_a_mesh_every_device_has_the_counts(path):
  mesh = sharding.make_mesh(2, 2)
  target = build.load('random:tiny', mesh=mesh)
  counts = build.engine(target, 'ngram', gamma=2, path=path).weights.draft
  for x in counts:
    assert x.sharding.is_fully_replicated
    assert x.sharding.device_set == set(mesh.devices.flat)
