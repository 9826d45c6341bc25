"""Leaving the target early: same tokens, one cache, and no layer run twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, forward, sampling, types
from specdec_jax.certify import base
from specdec_jax.drafters import early_exit
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.verify import reject
from tests import fakes

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

GAMMA, DEPTH, EXIT = 3, 4, 1


def by_layer(cache) -> list[np.ndarray]:
  """Keys and values of a cache, layers first: [DEPTH, ...] each."""
  if len(cache) != DEPTH:  # scanned: one array, rows first
    return [np.moveaxis(np.asarray(x), 1, 0) for x in cache]
  return [np.stack(x) for x in zip(*cache, strict=True)]


@pytest.fixture(scope='module', params=[False, True])
def world(request):
  """Four layers, one after the other or scanned, float64."""
  with jax.enable_x64(True):
    yield base.transformers(
      13,
      depth=DEPTH,
      run=model_config.Execution(scan_layers=request.param),
      windows=(6, 0),
      rotated=(True, True, False),
    )


@pytest.mark.more
def test_greedy_text_is_plain_decodings(world):
  with jax.enable_x64(True):
    drafter = early_exit.make(world.target, gamma=GAMMA, exit=EXIT)
    prompts = base.ragged_prompts(4, 13, 0)
    request = base.make_request(world, prompts, 20, length=40)
    out = base.run(world, base.Pair(reject.RULE, drafter), request)
    plain = base.run(world, base.Pair(reject.RULE, decode.PLAIN), request)
    assert base.texts(out) == base.texts(plain)
    # Some of each, or this would show little.
    hist_N = out.info.hist_BN.sum(0)
    assert hist_N[0] and hist_N[1:].any()


@pytest.mark.more
def test_the_residual_is_what_the_layers_make_in_one_pass(world):
  """What propose hands on equals one pass over the window it proposed."""
  with jax.enable_x64(True):
    drafter = early_exit.make(world.target, gamma=GAMMA, exit=EXIT)
    request = base.make_request(world, [[1, 2, 3], [4]], 12, length=24)
    programs = decode.programs(world.target, drafter, reject.RULE)
    state, _ = programs.start(world.weights, request)
    draw = lambda offset, q_BV: jnp.argmax(q_BV, -1).astype(jnp.int32)
    context = types.Context(
      *state[:3], request.sampling, jnp.full(2, GAMMA, jnp.int32)
    )
    noise = types.Noise(jnp.zeros((2, GAMMA)), draw, draw)
    draft, _, cache = drafter.propose(
      world.weights, (), context, noise, state.cache
    )
    view = early_exit.view(world.target, EXIT)
    tokens_BL = np.array(state.tokens_BL)
    for b, n in enumerate(state.lengths_B):
      tokens_BL[b, n : n + GAMMA] = draft.tokens_BK[b]
    hidden_BLD = forward.hidden(view, world.weights.target, tokens_BL)
    logits_BLV = world.target.head(world.weights.target, hidden_BLD)
    for b, n in enumerate(state.lengths_B):
      window = slice(n - 1, n + GAMMA)
      np.testing.assert_allclose(
        draft.residual_BND[b], hidden_BLD[b, window], atol=1e-12
      )
      best_N = jnp.argmax(logits_BLV[b, window], -1)
      q_KV = jax.nn.one_hot(best_N[:GAMMA], 13)
      np.testing.assert_array_equal(draft.q_BKV[b], q_KV)
    # Its keys are in the target's cache, and nothing else was written there.
    for old_D, new_D in zip(
      by_layer(state.cache), by_layer(cache), strict=True
    ):
      changed = (old_D != new_D).reshape(DEPTH, -1).any(-1)
      assert changed.tolist() == [True] + [False] * (DEPTH - 1)


def test_a_window_does_exactly_the_work_it_claims(capsys):
  """n layers over gamma + 1 tokens, the rest once, the head for each draft."""
  config = model_config.sized('tiny', depth=DEPTH, context=128)
  target, gamma, L = lm.make(config), 5, 64
  params = jax.eval_shape(lambda: lm.init(config, 0))
  weights = types.Weights(params)
  abstract = jax.eval_shape(
    lambda: (
      decode.State(
        jnp.zeros((1, L), jnp.int32),
        jnp.full(1, 9, jnp.int32),
        jnp.ones(1, bool),
        target.init_cache(1, L),
        (),
      ),
      types.empty_info(1, L, gamma, False),
    )
  )
  request = jax.eval_shape(
    lambda: decode.Request(
      jnp.zeros((1, L), jnp.int32),
      *[jnp.ones(1, jnp.int32)] * 4,
      sampling.settings(1, 0.0),
      jnp.zeros((1, 1), jnp.int32),
      jnp.ones(1, jnp.int32),
    )
  )

  def flops(drafter):
    options = decode.Options(widths=())
    loop = decode.Loop(target, drafter, reject.RULE, options)
    step = functools.partial(decode.step, loop)
    return fakes.matmul_flops(
      jax.make_jaxpr(step)(weights, request, *abstract).jaxpr, turns=gamma
    )

  own = flops(early_exit.make(target, gamma=gamma, exit=EXIT))
  # Per token: a layer's matmuls and attention over L slots; the head.
  c, N = config, gamma + 1
  wide = c.head_dim * (2 * c.heads + 2 * c.kv_heads)
  layer = 2 * (c.width * wide + 3 * c.width * c.mlp)
  layer += 2 * 2 * c.heads * c.head_dim * L
  head = 2 * c.width * c.vocab
  drafting = EXIT * N * layer + gamma * head
  verifying = (DEPTH - EXIT) * N * layer + N * head
  with capsys.disabled():
    print(f'\nwindow: {own:,} FLOPs = {drafting:,} + {verifying:,}', end=' ')
  assert own == drafting + verifying
