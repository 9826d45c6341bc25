"""Prompt lookup against a search in Python."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import types
from specdec_jax.drafters import lookup
from tests import fakes


def found(tokens, source=(), *, gamma, min_match, max_match):
  """What lookup must propose, and whether the source has it.

  By trying every length and every place.
  """
  for n in range(min(max_match, len(tokens)), min_match - 1, -1):
    for text in (tokens, source):
      for start in range(len(text) - n - 1, -1, -1):
        if text[start : start + n] == tokens[-n:]:
          after = text[start + n :]
          if text is not source:  # what repeats goes on
            after = after * gamma
          return after[:gamma], text is source
  return [], False


def propose(drafter, texts, length, fill=1, source=None):
  B = len(texts)
  lengths_B = np.array([len(t) for t in texts], np.int32)
  context = types.Context(
    jnp.asarray(fakes.pad(texts, length, fill)),
    lengths_B,
    np.ones(B, bool),
    None,
    None,
    source,
  )
  draft, _, _ = drafter.propose(None, (), context, None, None)
  assert draft.q_BKV is None
  none_B = np.zeros(B, bool)
  sourced_B = none_B if source is None else draft.marks['sourced_B']
  rows = map(np.asarray, (draft.tokens_BK, draft.count_B, sourced_B))
  return [
    (row[:n].tolist(), n > 0 and x) for row, n, x in zip(*rows, strict=True)
  ]


CASES = pytest.mark.parametrize(
  'gamma, low, high', [(1, 1, 1), (3, 1, 3), (4, 2, 4)]
)


@CASES
def test_lookup_equals_a_search(gamma, low, high):
  rng = np.random.default_rng(0)
  texts = [rng.integers(0, 3, 1 + i % 14).tolist() for i in range(300)]
  texts += [[1], [1, 1], [1, 1, 1], [1] * 14, [2, 1, 1]]
  sizes = dict(gamma=gamma, min_match=low, max_match=high)
  wanted = [found(text, **sizes) for text in texts]
  # What lies behind the text must not be found: it is filled with a token.
  for length, fill in itertools.product((14, 20), (0, 1)):
    assert propose(lookup.make(**sizes), texts, length, fill) == wanted


@CASES
def test_a_source_is_searched_too(gamma, low, high):
  """Ragged texts and sources, with garbage behind both."""
  rng = np.random.default_rng(1)
  texts, sources = (
    [rng.integers(0, 4, 1 + i * step % 9).tolist() for i in range(300)]
    for step in (2, 5)
  )
  sizes = dict(gamma=gamma, min_match=low, max_match=high)
  lengths_B = np.array([len(x) for x in sources], np.int32)
  wanted = [found(*both, **sizes) for both in zip(texts, sources, strict=True)]
  for size, fill in itertools.product((9, 16), range(4)):
    source = types.Source(fakes.pad(sources, size, fill), lengths_B)
    assert propose(lookup.make(**sizes), texts, 12, fill, source) == wanted
