"""Stop strings across bytes and windows: generate and stream agree."""

import itertools
import types as types_lib
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import api, types
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


class State(NamedTuple):
  tokens_BL: np.ndarray
  lengths_B: list[int]
  live_B: list[bool]


def windows(model, sizes, most: int):
  """An engine whose windows emit so many of IDS, up to a limit."""
  ids = IDS[:most]
  info = types_lib.SimpleNamespace(
    of_tokens=(np.zeros((1, SLOTS), np.int32), None, None, None),
    broken_B=[False],
    refused_BK=np.full((1, 1), -1),
  )
  tokens = np.zeros((1, SLOTS), np.int32)
  tokens[0, : 1 + len(ids)] = [*PROMPT, *ids]
  sizes = itertools.cycle(sizes)

  def step(weights, request, state, info):
    end = min(state.lengths_B[0] + next(sizes), 1 + len(ids))
    return State(tokens, [end], [end <= len(ids)]), info

  programs = types_lib.SimpleNamespace(
    start=lambda *_: (State(tokens, [1], [True]), info), step=step
  )
  return types_lib.SimpleNamespace(
    target=model, weights=None, programs=programs
  )


@pytest.mark.parametrize('sizes', [[1], [2], [3], [5], [9], [1, 4, 2]])
@pytest.mark.parametrize('case', CASES, ids=range(len(CASES)))
def test_windows_of_every_size_give_the_same_text(case, sizes):
  stop, most, text, count, _ = case
  model = scripted(stream_test.fallback(), IDS)
  request = types_lib.SimpleNamespace(lengths_B=[1], request_B=[0])
  pieces = list(api._pieces(windows(model, sizes, most), request, [stop]))
  assert ''.join(x.text for x in pieces) == text
  assert [t for x in pieces for t in x.tokens] == IDS[:count]
  assert [len(x.origins) for x in pieces] == [len(x.tokens) for x in pieces]
