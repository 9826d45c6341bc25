"""Features of every token: those of a pass over the text, and a chat's."""

import collections

import jax
import numpy as np
import pytest

from specdec_jax import decode, pool, requests, sampling
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.drafters import method
from specdec_jax.verify import reject
from tests import fakes
from tests.drafters import eagle_test, windows

GAMMA, L = 3, eagle_test.L


@pytest.fixture(scope='module')
def world():
  """(decode.Loop, weights) of an EAGLE with two taps, in float64."""
  with jax.enable_x64(True):
    c, target, weights = eagle_test.make_world()
    drafter = eagle_drafter.make(c, target, gamma=GAMMA, chunk=4)
    options = decode.Options(chunk=4)
    yield decode.Loop(target, drafter, reject.RULE, options), weights


def test_they_are_those_of_a_pass_over_the_text(world):
  loop, weights = world
  drafter = method.keeping_features(loop.drafter)
  programs = decode.programs(*loop._replace(drafter=drafter)[:4])
  request = eagle_test.asked()
  state, info = programs.start(weights, request)
  while np.asarray(state.live_B).any():
    state, info = programs.step(weights, request, state, info)
  texts_BL = state.tokens_BL
  given = loop.target, weights.target, texts_BL, drafter.taps
  wanted = np.asarray(windows.tapped(*given)[1])
  got, lengths_B = np.asarray(state.drafter[1]), np.asarray(state.lengths_B)
  for row, length in enumerate(lengths_B):
    ours, theirs = got[row, : length - 1], wanted[row, : length - 1]
    np.testing.assert_allclose(ours, theirs, atol=1e-6)  # kept in float32
  # Windows of every size wrote them.
  assert (np.asarray(info.hist_BN).sum(0) > 0).all()


@pytest.mark.more
def test_a_chat_is_drafted_for_as_if_it_was_read(world):
  loop, weights = world
  how = dict(new=9, sampling=sampling.Sampling(1.0, seed=3))
  items = requests.items(fakes.prompts(2, vocab=eagle_test.IDS), [7, 8], **how)
  sizes = dict(rows=2, length=L, stops=1)

  def ended(held, item):
    ((_, found),) = held.answers(collections.deque([(0, item)]))
    return found

  held, sizes_of = pool.Pool(loop, weights, prefix_caching=True, **sizes), []
  for item in items:
    first = ended(held, item)
    chat = item._replace(tokens=(*first.tokens, 2, 4))
    before = held.cached_tokens
    found = ended(held, chat)
    assert held.cached_tokens - before == len(first.tokens) - 1
    alone = ended(pool.Pool(loop, weights, **sizes), chat)
    assert found.tokens == alone.tokens
    # The drafts were the same, too.
    same = jax.tree.map(np.array_equal, found.info, alone.info)
    assert all(jax.tree.leaves(same))
    assert found.info.accepted_BK.sum() > 0
    sizes_of.append([x._cache_size() for x in held._programs])
  # The second chat waits for no program.
  assert sizes_of[0] == sizes_of[1]
