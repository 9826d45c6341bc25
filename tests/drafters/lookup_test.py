"""Prompt lookup against a search in Python."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import types
from specdec_jax.drafters import lookup, scripted
from tests import fakes

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')


def found(tokens, *, gamma, min_match, max_match):
  """What lookup must propose, by trying every place and every length."""
  for n in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
    for start in range(len(tokens) - n - 1, -1, -1):
      if tokens[start : start + n] == tokens[-n:]:
        return tokens[start + n : start + n + gamma]
  return []


def propose(drafter, texts, length, fill=1):
  B = len(texts)
  lengths_B = np.array([len(t) for t in texts], np.int32)
  context = types.Context(
    jnp.asarray(fakes.pad(texts, length, fill)),
    lengths_B,
    np.ones(B, bool),
    None,
    None,
  )
  draft, _, _ = drafter.propose(None, (), context, None, None)
  assert draft.q_BKV is None
  return [
    row[:n].tolist()
    for row, n in zip(
      np.asarray(draft.tokens_BK), np.asarray(draft.count_B), strict=True
    )
  ]


@pytest.mark.parametrize('gamma, low, high', [(1, 1, 1), (3, 1, 3), (4, 2, 4)])
def test_lookup_equals_a_search(gamma, low, high):
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, 3, 1 + i % 14).tolist() for i in range(300)] + [
    [1],
    [1, 1],
    [1, 1, 1],
    [1] * 14,
    [2, 1, 1],
  ]
  drafter = lookup.make(gamma=gamma, min_match=low, max_match=high)
  # What lies behind the text must not be found: it is filled with a token.
  for length, fill in itertools.product((14, 20), (0, 1)):
    got = propose(drafter, texts, length, fill)
    for text, proposal in zip(texts, got, strict=True):
      wanted = found(text, gamma=gamma, min_match=low, max_match=high)
      assert proposal == wanted, text


def test_scripts_play_their_text():
  script = np.arange(20, dtype=np.int32).reshape(2, 10)
  count = np.array([[9] * 10, [0, 1, 2] + [-1] * 7], np.int32)
  drafter = scripted.make(gamma=3)
  context = types.Context(*[None] * 5)._replace(
    lengths_B=np.array([4, 2], np.int32)
  )
  draft, _, _ = drafter.propose(
    types.Weights((), (script, count)), (), context, None, None
  )
  assert draft.tokens_BK.tolist() == [[4, 5, 6], [12, 13, 14]]
  assert draft.count_B.tolist() == [3, 2]
