"""Speculation says what plain decoding says, in float64, token for token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, decode, sampling, types
from specdec_jax.costs import scripted
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import lookup
from specdec_jax.models import lm
from specdec_jax.verify import reject
from tests import fakes

V, GAMMA, NEW, L, B = 13, 3, 20, 48, 8


@pytest.fixture
def world(x64):
  """A transformer, its weights, another's, and a greedy request."""
  config = fakes.tiny(windows=(5,), rotated=(True, False), residual_scale=0.8)
  # The last rows look for matches in what they have said themselves.
  prompts = fakes.prompts(B, vocab=V, seed=2)
  request = fakes.request(prompts, NEW, vocab=V, length=L)
  params = fakes.wild(config, 0), fakes.wild(config, 1)
  return lm.make(config), *params, request


def mixed(request):
  """The same prompts sampled, each row in another way, two with each seed."""
  sampling = request.sampling._replace(
    temperature_B=np.array([0.0, 0.8, 0.8, 0.8, 1.3, 0.8, 0.5, 0.8]),
    top_k_B=np.array([0, 0, 5, 0, 0, 0, 3, 0], np.int32),
    top_p_B=np.array([1, 1, 1, 0.7, 1, 1, 0.9, 1.0]),
  )
  seed_B = np.arange(B, dtype=np.uint32) // 4
  return request._replace(sampling=sampling, seed_B=seed_B)


def check_same(out, plain):
  np.testing.assert_array_equal(out.tokens_BL, plain.tokens_BL)
  np.testing.assert_array_equal(out.lengths_B, plain.lengths_B)


more = functools.partial(pytest.param, marks=pytest.mark.more)


# The certificate has more shapes; these are its cheapest cases.
@pytest.mark.parametrize('kind', ['lm', 'lookup', 'scripted', more('ragged')])
@pytest.mark.parametrize('rule', ['reject', more('coupled')])
def test_text_is_plain_decodings(world, kind, rule):
  """Greedy under reject; sampled too under coupled, whose noise is its own."""
  model, target, other, request = world
  request = mixed(request) if rule == 'coupled' else request
  plain = decode.programs(model, decode.PLAIN, reject.RULE)
  text = plain.generate(types.Weights(target), request)
  right = np.asarray(text.tokens_BL)
  at_times = np.random.default_rng(4).random(right.shape) < 0.3
  scripts = fakes.adversary(right, V), np.where(at_times, 1, right), right
  counts = np.full((B, L), GAMMA, np.int32)
  draft = lm_drafter.make(model, gamma=GAMMA)
  drafter, drafts = dict(
    lm=(draft, (other, target)),
    ragged=(fakes.ragged(draft), (other,)),
    lookup=(lookup.make(gamma=GAMMA, min_match=1, max_match=3), ((),)),
    scripted=(
      scripted.make(gamma=GAMMA),
      [(x.astype(np.int32), counts) for x in scripts],
    ),
  )[kind]
  programs = decode.programs(model, drafter, build.rule_of(rule))
  for draft in drafts:
    out = programs.generate(types.Weights(target, draft), request)
    check_same(out, text)
  tried, accepted = np.sum(out.info.tried_BK), np.sum(out.info.accepted_BK)
  assert accepted > 0
  if kind in ('lm', 'scripted'):  # the last draft was the target's own
    assert tried == accepted


def test_plain_decoding_is_a_loop_over_single_draws(x64):
  """The oracle of everything else, itself against ten lines of Python."""
  model, V = fakes.table_model(5), 5
  params = fakes.table(3, V)
  prompts = fakes.prompts(6, vocab=V)
  temperature = [0.0, 0.7, 1.0, 1.5, 0.7, 0.7]
  request = fakes.request(
    prompts, 9, vocab=V, seed=4, temperature=temperature, top_k=3
  )
  out = decode.programs(model, decode.PLAIN, reject.RULE).generate(
    types.Weights(params), request
  )

  @jax.jit
  def next_tokens(logits_BNV, lengths_B):
    p_BNV = sampling.probabilities(logits_BNV, request.sampling)
    noise = sampling.noise(
      request.seed_B,
      request.request_B,
      lengths_B,
      request.sampling,
      gamma=0,
      coupled=False,
    )
    return noise.next(jnp.zeros_like(lengths_B), p_BNV[:, 0])

  texts = [list(text) for text in prompts]
  for _ in range(9):
    logits = np.stack([fakes.row_of(params, text) for text in texts])
    lengths = np.array([len(text) for text in texts], np.int32)
    tokens = next_tokens(logits[:, None], lengths)
    for text, token in zip(texts, tokens.tolist(), strict=True):
      text.append(token)
  assert fakes.texts(out) == texts
