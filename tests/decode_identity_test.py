"""Speculation says what plain decoding says, in float64, token for token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, sampling, types
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import lookup, scripted
from specdec_jax.models import lm
from specdec_jax.verify import coupled, reject
from tests import fakes

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

V, NEW, L = 13, 20, 48


@pytest.fixture
def world(x64):
  """A transformer, its weights, another's, and plain decoding of 8 prompts."""
  config = fakes.tiny()
  model = lm.make(config)
  target, other = fakes.wild(config, 0), fakes.wild(config, 1)
  prompts = fakes.prompts(8, vocab=V, seed=2)
  # The last four rows look for matches in what they have said themselves.
  request = fakes.request(prompts, NEW, vocab=V, length=L)
  plain = decode.programs(model, decode.PLAIN, reject.RULE).generate
  return model, target, other, request, plain


def cut(request, rows, **settings):
  """The first rows of a request, sampled as asked."""
  request = jax.tree.map(lambda x: x[:rows], request)
  sampling = request.sampling._replace(
    **{k: np.full(rows, v, float) for k, v in settings.items()}
  )
  return request._replace(sampling=sampling)


def check_same(out, plain, rows):
  np.testing.assert_array_equal(out.tokens_BL, plain.tokens_BL[:rows])
  np.testing.assert_array_equal(out.lengths_B, plain.lengths_B[:rows])


# The certificate has more shapes; these are its cheapest cases.
def test_lm_drafts(world, gamma=4, rows=3):
  model, target, other, request, plain = world
  drafter = lm_drafter.make(model, gamma=gamma)
  programs = decode.programs(model, drafter, reject.RULE)
  text = plain(types.Weights(target), request)
  greedy = cut(request, rows)
  for draft in (other, target):
    out = programs.generate(types.Weights(target, draft), greedy)
    check_same(out, text, rows)
  # Draft = target: nothing is ever refused, greedy or sampled.
  warm = cut(request, rows, temperature_B=0.8, top_p_B=0.9)
  for req in (greedy, warm):
    info = programs.generate(types.Weights(target, target), req).info
    np.testing.assert_array_equal(info.tried_BK, info.accepted_BK)
    whole_BN = np.asarray(info.whole_BN)
    assert (whole_BN[:, :-1] == 0).all() and whole_BN[:, -1].sum() > 0
    assert (whole_BN[:, -1] == NEW // (gamma + 1)).all()
  # Another draft is refused at times, so the test above can fail.
  info = programs.generate(types.Weights(target, other), warm).info
  assert np.asarray(info.tried_BK).sum() > np.asarray(info.accepted_BK).sum()


def test_scripted_and_lookup_drafts(world, gamma=4, rows=3):
  model, target, _, request, plain = world
  text = plain(types.Weights(target), request)
  tokens = np.asarray(text.tokens_BL)
  greedy = cut(request, rows)
  counts = np.full((rows, L), gamma, np.int32)
  rng = np.random.default_rng(gamma)
  noisy = np.where(rng.random(tokens.shape) < 0.3, 1, tokens)
  programs = decode.programs(model, scripted.make(gamma=gamma), reject.RULE)
  for script in (tokens, fakes.adversary(tokens, V), noisy):
    weights = types.Weights(target, (script[:rows].astype(np.int32), counts))
    check_same(programs.generate(weights, greedy), text, rows)
  finder = lookup.make(gamma=gamma, min_match=1, max_match=3)
  programs = decode.programs(model, finder, reject.RULE)
  out = programs.generate(types.Weights(target), greedy)
  check_same(out, text, rows)
  assert np.asarray(out.info.accepted_BK).sum() > 0


@pytest.mark.more
@pytest.mark.parametrize('kind', ['lm', 'lookup', 'scripted', 'ragged'])
def test_coupled_says_what_plain_sampling_says(world, kind):
  model, target, other, request, plain = world
  gamma, rows = 3, 8
  temperature = np.array([0.0, 0.8, 0.8, 0.8, 1.3, 0.8, 0.5, 0.8])
  warm = cut(request, rows)
  warm = warm._replace(
    sampling=warm.sampling._replace(
      temperature_B=temperature,
      top_k_B=np.array([0, 0, 5, 0, 0, 0, 3, 0], np.int32),
      top_p_B=np.array([1, 1, 1, 0.7, 1, 1, 0.9, 1.0]),
    ),
    seed_B=np.arange(8, dtype=np.uint32) // 4,
  )
  text = plain(types.Weights(target), warm)
  draft = lm_drafter.make(model, gamma=gamma)
  drafter = dict(
    lm=draft,
    ragged=fakes.ragged(draft),
    lookup=lookup.make(gamma=gamma, min_match=1),
    scripted=scripted.make(gamma=gamma),
  )[kind]
  programs = decode.programs(model, drafter, coupled.RULE)
  script = fakes.adversary(text.tokens_BL, V).astype(np.int32)
  counts = np.full((rows, L), gamma, np.int32)
  for draft in dict(
    lm=(other, target),
    ragged=(other,),
    lookup=((),),
    scripted=((script, counts), (text.tokens_BL, counts)),
  )[kind]:
    out = programs.generate(types.Weights(target, draft), warm)
    check_same(out, text, rows)
  if kind in ('lm', 'scripted'):  # the last draft was the target's own
    np.testing.assert_array_equal(out.info.tried_BK, out.info.accepted_BK)


@pytest.mark.parametrize(
  'rule', [reject.RULE, coupled.RULE], ids=lambda r: r[0]
)
def test_proposing_nothing_is_plain_decoding_bit_for_bit(x64, rule):
  model = fakes.table_model(V)
  weights = types.Weights(fakes.table(0, V))
  request = fakes.request(
    fakes.prompts(6, vocab=V), NEW, vocab=V, length=L, temperature=0.9
  )
  text = decode.programs(model, decode.PLAIN, rule).generate(weights, request)
  nothing = (np.zeros((6, L), np.int32),) * 2
  # Wide windows, so that it is not the narrow body that does it.
  options = decode.Options(narrow=False)
  programs = decode.programs(model, scripted.make(gamma=2), rule, options)
  out = programs.generate(weights._replace(draft=nothing), request)
  check_same(out, text, 6)
  assert int(out.info.wide) == 0
  np.testing.assert_array_equal(out.info.origin_BL, text.info.origin_BL)


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


def test_q_none_is_one_hot_q(x64):
  model = fakes.table_model(V)
  script = np.random.default_rng(0).integers(0, V, (8, L)).astype(np.int32)
  weights = types.Weights(fakes.table(0, V), (script, script % 4))
  request = fakes.request(
    fakes.prompts(8, vocab=V), NEW, vocab=V, length=L, temperature=1.2
  )
  drafter = scripted.make(gamma=3)
  none, one_hot = (
    decode.programs(model, d, reject.RULE).generate(weights, request)
    for d in (drafter, fakes.certain(drafter, V))
  )
  for x, y in zip(jax.tree.leaves(none), jax.tree.leaves(one_hot), strict=True):
    np.testing.assert_array_equal(x, y)
  assert np.asarray(none.info.accepted_BK).sum() > 0
