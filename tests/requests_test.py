"""Prompts to fixed shapes: the bucket table and every refusal."""

import types

import numpy as np
import pytest

from specdec_jax import requests
from specdec_jax.certify import base

MODEL = types.SimpleNamespace(ids=10, context=64)


def make(prompts, new=4, numbers=None, **changes):
  return base.request_of(requests.items(prompts, numbers), new, **changes)


@pytest.mark.parametrize(
  'length, wanted',
  [
    (1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (65, 96), (97, 128),
    (129, 192), (193, 256), (257, 384), (385, 512), (513, 768), (768, 768),
    (769, 1024), (1024, 1024), (1025, 1536), (8191, 8192),
  ],
)  # fmt: skip
def test_buckets(length, wanted):
  assert requests.bucket(length) == wanted


def test_a_batch_is_what_was_asked():
  r = make(
    [[1, 2, 3], [9]],
    new=[5, 2],
    gamma=3,
    temperature=[0.0, 0.7],
    top_k=4,
    top_p=[1.0, 0.5],
    seed=[7, 8],
    numbers=[30, 40],
    stop_ids=(5, 2, 5),
    rows=4,
  )
  assert r.tokens_BL.shape == (4, 16) and r.tokens_BL.dtype == np.int32
  assert r.tokens_BL[0].tolist() == [1, 2, 3] + [0] * 13
  assert r.tokens_BL[1].tolist() == [9] + [0] * 15
  assert r.lengths_B.tolist() == [3, 1, 1, 1]
  # Rows that only fill the batch never start.
  assert r.limit_B.tolist() == [8, 3, 1, 1]
  assert r.request_B[:2].tolist() == [30, 40]
  assert r.seed_B[:2].tolist() == [7, 8]
  assert r.request_B.dtype == r.seed_B.dtype == np.uint32
  np.testing.assert_allclose(r.sampling.temperature_B[:2], [0, 0.7], rtol=1e-6)
  assert r.sampling.top_k_B.tolist() == [4] * 4
  np.testing.assert_allclose(r.sampling.top_p_B[:2], [1, 0.5])
  assert r.stop_BX.tolist() == [[2, 5]] * 2 + [[-1, -1]] * 2


def test_stop_ids_of_each_prompt():
  stops = [7, 3], [], (4,)
  some = [requests.Item([1], 0, new=4, stop_ids=x) for x in stops]
  stops = requests.make(some).stop_BX.tolist()
  assert stops == [[3, 7], [-1, -1], [4, -1]]
  wide = requests.make(some, rows=4, stops=3).stop_BX.tolist()
  assert wide == [[3, 7, -1], [-1] * 3, [4, -1, -1], [-1] * 3]
  with pytest.raises(AssertionError, match='2 stop ids, room for 1'):
    requests.make(some, stops=1)


def test_rows_with_a_prediction_and_without():
  guessed = requests.items([[1], [2]])
  guessed[1] = guessed[1]._replace(prediction=[7, 8])
  source = requests.source_of(guessed, 3)
  assert source.tokens_BI.shape == (3, 16)
  assert source.tokens_BI[:, :2].tolist() == [[0, 0], [7, 8], [0, 0]]
  assert source.lengths_B[:2].tolist() == [0, 2]
  assert requests.source_of(guessed[:1], 1) is None
  # With a source all have one.
  guessed[0] = guessed[0]._replace(source=[3])
  with pytest.raises(AssertionError, match='a prompt without a source'):
    requests.source_of(guessed, 3)
  # A pool has room for those that come later.
  assert requests.source_of(guessed[:1], 1, 32).tokens_BI.shape == (1, 32)


def test_defaults():
  r = make([[1], [2], [3]])
  assert r.request_B.tolist() == [0, 1, 2] and r.seed_B.tolist() == [0] * 3
  assert r.stop_BX.tolist() == [[-1]] * 3
  # Nothing that samples is compiled, unless others may come beside them.
  assert r.sampling.temperature_B is None
  assert make([[1]], mixed=True).sampling.temperature_B.tolist() == [0]


def test_the_buffer_has_room_for_the_last_window():
  longest = [[1] * 9]
  assert make(longest, new=7).tokens_BL.shape[1] == 16
  assert make(longest, new=7, gamma=1).tokens_BL.shape[1] == 32
  assert make(longest, new=7, length=16).tokens_BL.shape[1] == 16


def check(tokens, new=4, source=()):
  return requests.check(requests.Item(tokens, 0, source=source), MODEL, new)


def test_a_prompt_may_fill_the_context_but_for_its_new_tokens():
  assert check([1] * 60) == 4 and check([1] * 63, 1) == 1
  assert check([1] * 60, None) == 4  # as many as fit


@pytest.mark.parametrize(
  'tokens, changes, message',
  [
    ([], {}, 'empty prompt'),
    ([1, 10], {}, 'token id 10 is outside .* 0 to 9'),
    ([-1], {}, 'token id -1 is outside'),
    ([1] * 64, {}, '64 tokens, the context holds 64'),
    ([1] * 64, dict(new=None), '64 tokens, the context holds 64'),
    ([1] * 61, {}, 'lower it to 3'),
    ([1], dict(source=[1] * 65), 'source has 65 tokens'),
    ([1], dict(source=[10]), 'token id 10 is outside'),
  ],
)
def test_what_cannot_be_decoded_is_refused(tokens, changes, message):
  with pytest.raises(ValueError, match=message):
    check(tokens, **changes)
