"""Stop strings and ids: pieces of any size are cut where a text is."""

import itertools
import types as types_lib

import pytest

from specdec_jax import completion, types
from tests.io import stream_test

IDS = [3 + b for b in '你好😀'.encode()] + [260, 261, 2]  # 3, 3, 4 bytes: a run
# Stop string, limit: text, tokens; by hand.
CASES = [
  ('你', 13, '', 3),
  ('你', 4, '', 3),
  ('你', 3, '', 3),
  ('好', 13, '你', 6),
  ('好', 7, '你', 6),
  ('😀a', 13, '你好', 11),
  ('ab', 13, '你好😀', 12),
  # What a limit cuts in a run is as the tokenizer decodes it.
  ('好', 5, '\ufffd' * 5, 5),
  ('b?', 13, '你好😀ab', 13),
]


@pytest.mark.parametrize('sizes', [[1], [2], [3], [5], [9], [1, 4, 2]])
@pytest.mark.parametrize('case', CASES, ids=range(len(CASES)))
def test_windows_of_every_size_give_the_same_text(case, sizes):
  stop, most, text, count = case
  reader = completion.Reader(stream_test.fallback(), [stop])
  at = 0
  for size in itertools.cycle(sizes):
    new = IDS[at : min(at + size, most)]
    at += len(new)
    last = at == min(most, len(IDS))
    reader.piece(new, [types.DRAFTED] * len(new), last=last)
    if last or reader.stopped:
      break
  whole = reader.whole()
  assert (whole['text'], whole['tokens']) == (text, IDS[:count])
  assert len(whole['origins']) == len(whole['texts']) == count


def test_an_empty_list_of_stop_ids_ends_nothing():
  """None is the model's own; a special token's text is its id."""
  words = stream_test.fallback()
  target = types_lib.SimpleNamespace(tokenizer=words, ids=words.size)
  ids = lambda **how: completion.Settings(**how).all_stop_ids(target)
  assert ids() == ids(stop_ids=None) == [2] and ids(stop_ids=[]) == []
  assert ids(stop_ids=[5], stop=['<s>', 'a']) == [5, 1]


def test_texts_of_refused_drafts_go_on():
  """The space before a word is left out at the beginning of a text alone."""
  reader = completion.Reader(stream_test.metaspace(), ())
  one, two = types.RECOVERED, types.RECOVERED
  first = reader.piece([3], [one], refused_K=[3, 1], last=False)
  assert first.refused == [(3, 'a'), (1, 'a')]
  second = reader.piece([1], [two], refused_K=[3, 2], last=False)
  assert second.refused == [(3, ' a'), (2, 'b')]
