"""A walk along a text drafts what decoding drafts there."""

import functools

import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.bench import predict
from specdec_jax.certify import base, load
from specdec_jax.verify import lenient, reject
from tests.drafters import windows

MORE = pytest.mark.more
V, GAMMA = 11, 3
OTHERS = 'self', 'lm', 'medusa', 'dflash', 'ngram', 'early_exit', base.TREE
OPTIONS = decode.Options(chunk=8)  # texts have more than one
asked = functools.partial(
  windows.asked, [21, 12, 20, 2], [1.0, 0.7, 0.0, 1.0], vocab=V, length=48
)


def made(name):
  """(target, drafter, weights, the draft's own model)."""
  world = base.transformers(V)
  drafter, params = load.RECIPES[name](world, GAMMA)
  weights = types.Weights(world.weights.target, params)
  return world.target, drafter, weights, world.draft


@pytest.mark.parametrize(
  'name', ['eagle', 'lookup', *(pytest.param(x, marks=MORE) for x in OTHERS)]
)
def test_first_drafts_along_a_text_are_those_of_its_windows(name, x64):
  target, drafter, weights, _ = made(name)
  request = asked()
  out, windows_seen = windows.proposals(target, drafter, weights, request)
  text = request._replace(tokens_BL=out.tokens_BL, limit_B=out.lengths_B)
  loop = decode.Loop(target, drafter, reject.RULE, OPTIONS)
  q_BLV = np.asarray(windows.q_along(weights, text, loop=loop))
  compared = 0
  for b, n, _, q_KV, count in windows_seen:
    if name == 'ngram' and not count:  # it stops where nothing is likely
      continue
    np.testing.assert_allclose(q_BLV[b, n], (count > 0) * q_KV[0], atol=1e-12)
    compared += 1
  assert compared > 9


def test_alpha_by_a_walk_is_that_of_a_parallel_pass(x64):
  target, drafter, weights, draft = made('lm')
  request = asked()
  plain = decode.programs(target, decode.PLAIN, reject.RULE, OPTIONS)
  out = plain.generate(weights, request)
  text = request._replace(tokens_BL=out.tokens_BL, limit_B=out.lengths_B)
  loop = decode.Loop(target, drafter, lenient.make(0.5), OPTIONS)
  one, two = (
    np.stack(predict.overlap(weights, text, loop=loop, q=q))
    for q in (None, draft)
  )
  at_1L = np.arange(text.tokens_BL.shape[1])[None]
  text_BL = (at_1L >= text.lengths_B[:, None]) & (
    at_1L < out.lengths_B[:, None]
  )
  np.testing.assert_allclose(one[:, text_BL], two[:, text_BL], atol=1e-6)
  alpha, distance = one[:, text_BL].mean(1)
  assert 0.1 < alpha < 0.9 and distance > 1e-3
