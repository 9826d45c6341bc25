"""Drafting from features: what training made is what decoding does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import debug, decode, types
from specdec_jax.certify import base, load
from specdec_jax.distill import eagle_loss
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from specdec_jax.verify import reject
from tests import fakes
from tests.drafters import windows

GAMMA, B, L, V, IDS = 3, 6, 48, 7, 6
TEMPERATURES = [1.0, 0.7, 1.0, 1.0, 1.0, 0.0]
asked = functools.partial(
  windows.asked, [30, 12, 30, 30, 2, 30], TEMPERATURES, vocab=IDS, length=L
)
KINDS = {
  'gpt': fakes.GPT | dict(tied=False),
  'gemma': fakes.GEMMA
  | dict(wide_norm=True, embed_scale=4.0, logit_softcap=5.0)
  | dict(run=model_config.Execution(scan_layers=True)),
}


def published(features: int):
  """(settings, layer, own) of a random EAGLE-3.1; features: of each tap.

  Width, layers, rotations, embedding and head are its own, and it does not read
  a prompt's first token.
  """
  block = fakes.tiny(vocab=V, width=8, rope_theta=50.0)
  c = eagle.EagleConfig(
    block.running(fused=True),
    taps=(-1, 0, 2),
    tap_width=features,
    tap_norm='each',
    reads='beside',
    last_norm='fed',
    reads_first=False,
  )
  layer = lm.nest(jax.tree.map(lambda x: 2 * x, eagle.init(c, 1)))
  draw = np.random.default_rng(0).normal
  own = dict(head=draw(size=(8, 5)), embed=draw(size=(V, 8)))
  return c, layer, jax.tree.map(jnp.asarray, own)


def make_world(kind: str = '', taps=(0, 1), **changes):
  """(settings of the draft, target, weights), the draft random.

  Its vocabulary lacks an id; one more is padding of the target's.
  """
  config = fakes.tiny(vocab=V, **KINDS.get(kind, {}) | changes)
  target, own = lm.make(config, ids=IDS), {}
  params = jax.tree.map(lambda x: 1.5 * x, lm.init(config, 0))
  if kind == 'eagle3.1':
    c, layer, own = published(config.width)
  else:
    c = eagle.settings(config, taps)
    layer = lm.nest(jax.tree.map(lambda x: 2 * x, eagle.init(c, 1)))
  ids = jnp.array([5, 0, 1, 3, 4], jnp.int32)
  weights = eagle.weights(layer, ids, params, **own)
  return c, target, types.Weights(params, weights)


@pytest.fixture(
  scope='module',
  params=[
    *(pytest.param(x, marks=pytest.mark.more) for x in KINDS),
    'eagle3.1',
  ],
)
def world(request):
  """A world, and what proposals says of it."""
  with jax.enable_x64(True):
    made = make_world(request.param)
    yield made, *proposals(*made)


def proposals(c, target, weights):
  """(texts, live windows) as tests.drafters.windows has them; some of every
  kind, or this would show little."""
  drafter = eagle_drafter.make(c, target, gamma=GAMMA, chunk=4)
  out, seen = windows.proposals(target, drafter, weights, asked())
  assert (np.asarray(out.info.hist_BN).sum(0) > 0).all()
  return fakes.texts(out), seen


def by_training(world, tokens_XL):
  """q of each step at every index, [K, X, L, V], by training."""
  c, target, weights = world
  _, features_XLE = windows.tapped(target, weights.target, tokens_XL, c.taps)
  at_XL = jnp.broadcast_to(jnp.arange(L)[None], tokens_XL.shape)
  hidden = eagle_loss.steps(
    c,
    weights.draft['layer'],
    eagle.embed(target, weights.draft, tokens_XL, at_XL),
    features_XLE,
    GAMMA,
  )
  return jax.nn.softmax(
    eagle.logits(c, target, weights.draft, jnp.stack(hidden)).whole()
  )


def assert_same(q_V, wanted_V, row: int):
  """wanted_V: at temperature 1."""
  wanted_V = windows.warmed(wanted_V, TEMPERATURES[row])
  np.testing.assert_allclose(q_V, wanted_V, rtol=0, atol=1e-9)


@pytest.mark.more
def test_every_draft_is_what_training_makes_of_the_same_tokens(world):
  """Step s at index i is the s-th draft of a window, from scratch.

  So the drafter has seen exactly the target's features of what is committed,
  and of the tokens after that its own hidden states.
  """
  made, texts, seen = world
  with jax.enable_x64(True):
    said = [[*texts[b][:n], *tokens_K] for b, n, tokens_K, *_ in seen]
    q_KXLV = jax.jit(functools.partial(by_training, made))(
      fakes.pad([text[:L] for text in said], L)
    )
    for x, (b, n, _, q_KV, _) in enumerate(seen):
      for k in range(min(GAMMA, L - n)):
        assert_same(q_KV[k], q_KXLV[k, x, n - 1 + k], b)
        assert not q_KV[k, [2, 6]].any()
    # What it cannot draft is said all the same.
    assert any(2 in text for text in texts)


def certified(dtype: str):
  """What decoding takes: target, drafter, rule, weights, a request."""
  world = base.transformers(13, dtype=dtype)
  drafter, other = load.RECIPES['eagle'](world, GAMMA)
  weights = types.Weights(world.weights.target, other)
  request = base.make_request(world, [[1], [2, 3, 4]], 9, length=20)
  return world.target, drafter, reject.RULE, weights, request


@pytest.mark.slow
def test_in_bfloat16_it_remembers_what_the_text_says():
  """In every window, recomputed from scratch."""
  *parts, weights, request = certified('bfloat16')
  debug.check_cache(decode.Loop(*parts), weights, request)


@pytest.mark.more
def test_a_prefill_may_say_features_in_a_wider_type(x64):
  *parts, weights, request = certified('float32')
  state, _ = jax.eval_shape(
    decode.programs(*parts).generate.__wrapped__, weights, request
  )[:2]
  assert state.dtype == jnp.int32
