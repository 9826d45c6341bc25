"""Stop strings across bytes and windows: generate and stream agree."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import completion, types
from specdec_jax.io import load
from tests.io import stream_test

SLOTS, PROMPT = 64, [1]


def scripted(tokenizer, ids):
  """A model that says these ids after a prompt of one token."""
  said = np.zeros(SLOTS, np.int32)
  said[1 : 1 + len(ids)] = ids
  vocab = tokenizer.size

  def head(params, hidden):
    at = jnp.clip(hidden[..., 0].astype(jnp.int32) + 1, 0, SLOTS - 1)
    return 10.0 * (
      jnp.arange(vocab)[None, None] == params['said'][at][..., None]
    )

  model = types.Model(
    lambda params, tokens, slots, positions, mask, cache, *, taps=(): (
      positions[..., None].astype(jnp.float32),
      (),
      cache,
    ),
    head,
    lambda rows, slots: jnp.zeros((rows, 1)),
    vocab,
    SLOTS,
  )
  return load.wrap(model, {'said': jnp.asarray(said)}, tokenizer)


IDS = [3 + b for b in '你好😀'.encode()] + [260, 261, 2]  # 3, 3, 4 bytes: a run
# Stop string, limit: text, tokens, reason; by hand.
CASES = [
  ('你', 13, '', 3, 'stop'),
  ('你', 4, '', 3, 'stop'),
  ('你', 3, '', 3, 'stop'),
  ('好', 13, '你', 6, 'stop'),
  ('好', 7, '你', 6, 'stop'),
  ('😀a', 13, '你好', 11, 'stop'),
  ('ab', 13, '你好😀', 12, 'stop'),
  # What a limit cuts in a run is as the tokenizer decodes it.
  ('好', 5, '\ufffd' * 5, 5, 'length'),
  ('b?', 13, '你好😀ab', 13, 'stop'),
]


@pytest.mark.more
def test_generate_and_stream_agree():
  model = scripted(stream_test.fallback(), IDS)
  for stop, most, text, count, reason in CASES:
    asked = dict(draft='lookup', gamma=2, max_new_tokens=most, stop=[stop])
    (whole,) = specdec_jax.generate(model, [PROMPT], **asked)
    found = whole.text, len(whole.tokens), whole.finish_reason
    assert found == (text, count, reason), (stop, most)
    pieces = list(specdec_jax.stream(model, PROMPT, **asked))
    assert ''.join(x.text for x in pieces) == text
    assert [t for x in pieces for t in x.tokens] == whole.tokens
    assert [o for x in pieces for o in x.origins] == whole.origins


@pytest.mark.parametrize('sizes', [[1], [2], [3], [5], [9], [1, 4, 2]])
@pytest.mark.parametrize('case', CASES, ids=range(len(CASES)))
def test_windows_of_every_size_give_the_same_text(case, sizes):
  stop, most, text, count, _ = case
  reader = completion.Reader(stream_test.fallback(), [stop])
  pieces, at = [], 0
  for size in itertools.cycle(sizes):
    new = IDS[at : min(at + size, most)]
    at += len(new)
    last = at == min(most, len(IDS))
    pieces.append(reader.piece(new, [types.DRAFTED] * len(new), last=last))
    if last or reader.stopped:
      break
  assert ''.join(x.text for x in pieces) == text
  assert [t for x in pieces for t in x.tokens] == IDS[:count]
  assert [len(x.origins) for x in pieces] == [len(x.tokens) for x in pieces]


def test_an_empty_list_of_stop_ids_ends_nothing():
  """None is the model's own."""
  t = stream_test.fallback()
  end, vocab = t.eos_ids[0], t.size
  said = [vocab - 1, end, vocab - 2, end, vocab - 3]
  model = scripted(t, said)
  found = lambda **how: specdec_jax.generate(
    model, [PROMPT], max_new_tokens=4, **how
  )[0]
  for given, tokens, why in (
    ({}, said[:2], 'stop'),
    (dict(stop_ids=None), said[:2], 'stop'),
    (dict(stop_ids=[]), said[:4], 'length'),
    (dict(stop_ids=[vocab - 2]), said[:3], 'stop'),
  ):
    x = found(**given)
    assert (x.tokens, x.finish_reason) == (tokens, why), given


def test_texts_of_refused_drafts_go_on():
  """The space before a word is left out at the beginning of a text alone."""
  reader = completion.Reader(stream_test.metaspace(), ())
  one, two = types.RECOVERED, types.RECOVERED
  first = reader.piece([3], [one], refused_K=[3, 1], last=False)
  assert first.refused == [(3, 'a'), (1, 'a')]
  second = reader.piece([1], [two], refused_K=[3, 2], last=False)
  assert second.refused == [(3, ' a'), (2, 'b')]
