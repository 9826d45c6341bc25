"""The target's own weights, rounded, draft in its cache: the same tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import build, decode, forward, sampling, types
from specdec_jax.certify import base, enumerated
from specdec_jax.drafters import adaptive, early_exit, hybrid
from specdec_jax.io import load
from specdec_jax.models import config as model_config
from specdec_jax.models import weights, work
from specdec_jax.verify import block, coupled, reject

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

V, GAMMA = 13, 3
recipe = early_exit.Itself.recipe


def world_of(scan: bool) -> base.World:
  run = model_config.Execution(scan_layers=scan)
  windows, rotated = (6, 0), (True, True, False)
  return base.transformers(V, run=run, windows=windows, rotated=rotated)


@pytest.mark.parametrize(
  'scan, rule',
  [
    (False, reject.RULE),
    pytest.param(False, coupled.RULE, marks=pytest.mark.more),
    pytest.param(True, reject.RULE, marks=pytest.mark.more),
  ],
)
def test_text_is_plain_decodings(x64, scan, rule):
  """Greedy; under coupled, sampled too."""
  world = world_of(scan)
  pair = base.Pair(rule, *recipe(world, GAMMA))
  more = dict(temperature=0.9, seed=3) if rule.coupled else {}
  prompts = base.ragged_prompts(4, V, 0)
  request = base.make_request(world, prompts, 20, length=40, **more)
  out = base.run(world, pair, request)
  assert base.texts(out) == base.plain(world, request)
  # Some of each, or this would show little.
  tried, accepted = out.info.tried_BK.sum(), out.info.accepted_BK.sum()
  assert 0 < accepted < tried


@pytest.mark.more
@pytest.mark.parametrize('rule', [reject.RULE, block.RULE], ids=['r', 'b'])
def test_the_law_of_three_windows_is_the_targets(x64, rule):
  world = base.tables(3)
  pair = base.Pair(rule, *recipe(world, 2))
  enumerated.windows_error(world, pair, dict(temperature=1.0))


def test_drafts_with_its_own_weights_over_the_targets_cache(x64):
  """q is of one pass of them over the window, after the target's prefill."""
  world = world_of(False)
  drafter, own = recipe(world, GAMMA)
  many = types.Weights(world.weights.target, own)
  request = base.make_request(world, [[1, 2, 3], [4]], 12, length=24)
  cautious = early_exit.make_whole(
    world.target, gamma=GAMMA, min_confidence=0.5
  )
  programs = decode.programs(world.target, drafter, reject.RULE)
  state, info = programs.start(many, request)
  state, _ = programs.step(many, request, state, info)
  warm = sampling.settings(2, 1.0)
  context = types.Context(*state[:3], warm, jnp.full(2, GAMMA, jnp.int32))
  draw = lambda offset, q_BV: jnp.argmax(q_BV, -1).astype(jnp.int32)
  noise = types.Noise(jnp.zeros((2, GAMMA)), draw, draw)
  rest = many, (), context, noise, state.cache
  draft, _, _ = drafter.propose(*rest)
  few, _, _ = cautious.propose(*rest)

  tokens_BL, start_B = state.tokens_BL, state.lengths_B - 1
  cache, _ = forward.prefill(
    world.target,
    world.weights.target,
    tokens_BL,
    start_B,
    world.target.init_cache(2, 24),
    chunk=8,
  )
  last_B1 = jnp.take_along_axis(tokens_BL, start_B[:, None], 1)
  window_BK = jnp.concatenate([last_B1, draft.tokens_BK[:, :-1]], 1)
  hidden_BKD, _, _ = forward.read(
    world.target, own, window_BK, start_B, cache, slots=24
  )
  q_BKV = jax.nn.softmax(world.target.head(own, hidden_BKD))
  np.testing.assert_allclose(draft.q_BKV, q_BKV, atol=1e-12)
  sure_BK = np.cumprod(np.max(q_BKV, -1) >= 0.5, -1)
  assert few.count_B.tolist() == sure_BK.sum(-1).tolist()
  assert draft.count_B.tolist() == [GAMMA] * 2


@pytest.mark.parametrize(
  'source, dtype',
  [
    ('random:tiny', 'float32'),
    pytest.param('random:tiny', 'int8', marks=pytest.mark.more),
    pytest.param('random:t5_tiny', 'float32', marks=pytest.mark.more),
  ],
)
def test_a_loaded_target_drafts_for_itself(source, dtype):
  """Without a state; its copy is read once, without an encoder."""
  target = specdec_jax.load(source, dtype=dtype)
  engine = build.engine(target, 'self', gamma=2)
  params = engine.weights.draft
  assert 'encoder' not in params and engine.draft.label.endswith('(int4)')
  assert weights.is_stored(params['layers']['0']['attn']['o']['kernel'])
  assert work.step_bytes(params) < 0.75 * work.step_bytes(target.params)
  again = build.engine(target, 'self', gamma=3)
  assert again.weights.draft is params
  ask = dict(max_new_tokens=12, temperature=0.0)
  (plain,) = specdec_jax.generate(target, ['hello'], **ask)
  (out,) = specdec_jax.generate(target, ['hello'], draft='self', **ask)
  assert out.tokens == plain.tokens and out.metrics['accepted_tokens']


@pytest.mark.more
@pytest.mark.parametrize('around', [hybrid, adaptive])
def test_others_may_be_around_it(around):
  target = specdec_jax.load('random:tiny')
  ask = dict(max_new_tokens=24, temperature=0.0, gamma=3)
  (plain,) = specdec_jax.generate(target, ['hello'], **ask)
  draft = around.Settings('self')
  (out,) = specdec_jax.generate(target, ['hello'], draft=draft, **ask)
  assert out.tokens == plain.tokens


REFUSED = [
  (
    dict(dtype='int4'),
    {},
    "draft='self': tiny (random weights) (int4) rounded to int4 would draft a "
    'token at c=1.00 of a plain step, by the bytes that they read; at most 0.8 '
    'can pay: give a smaller draft',
  ),
  (dict(dtype='int8'), dict(dtype='int8'), 'rounded to int8 would draft a tok'),
  (
    dict(dtype='bfloat16', kernels='xla'),
    {},
    'rounded to int4 computes in float32, which the cache of a target in '
    "bfloat16 does not hold; load that with dtype='float32'",
  ),
]


@pytest.mark.parametrize('how, options, message', REFUSED)
def test_a_copy_that_cannot_pay_or_share_a_cache_is_refused(
  monkeypatch, how, options, message
):
  target = specdec_jax.load('random:tiny', **how)
  monkeypatch.setattr(load, 'read', None)  # before anything is read
  with pytest.raises(ValueError) as caught:
    build.engine(target, early_exit.Itself.Settings(**options), gamma=2)
  assert message in str(caught.value)
