"""Drafting in the target's own cache, by its first layers or all rounded: the
same tokens, and no layer run twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import build, decode, forward, sampling, types
from specdec_jax.certify import base
from specdec_jax.drafters import adaptive, early_exit, hybrid
from specdec_jax.io import load
from specdec_jax.models import config as model_config
from specdec_jax.models import lm, weights, work
from specdec_jax.verify import coupled, reject
from tests import fakes

V, GAMMA, DEPTH, EXIT, L = 13, 3, 4, 1, 24
RECIPES = {'early_exit': early_exit.recipe, 'self': early_exit.Itself.recipe}


def world_of(scan: bool) -> base.World:
  """Four layers, one after the other or scanned."""
  run = model_config.Execution(scan_layers=scan)
  own = dict(windows=(6, 0), rotated=(True, True, False))
  return base.transformers(V, depth=DEPTH, run=run, **own)


@pytest.mark.parametrize(
  'name, scan, rule',
  [
    ('self', False, reject.RULE),
    *(
      pytest.param(*case, marks=pytest.mark.more)
      for case in (
        ('self', False, coupled.RULE),
        ('self', True, reject.RULE),
        ('early_exit', False, reject.RULE),
        ('early_exit', True, reject.RULE),
      )
    ),
  ],
)
def test_text_is_plain_decodings(x64, name, scan, rule):
  """Greedy; under coupled, sampled too."""
  world = world_of(scan)
  pair = base.Pair(rule, *RECIPES[name](world, GAMMA))
  more = dict(temperature=0.9, seed=3) if rule.coupled else {}
  prompts = base.ragged_prompts(4, V, 0)
  request = base.make_request(world, prompts, 20, length=40, **more)
  out = base.run(world, pair, request)
  assert base.texts(out) == base.plain(world, request)
  # Some of each, or this would show little.
  tried, accepted = out.info.tried_BK.sum(), out.info.accepted_BK.sum()
  assert 0 < accepted < tried


def begun(world, drafter, own, windows: int) -> decode.State:
  """Two prompts, and what so many windows have emitted."""
  request = base.make_request(world, [[1, 2, 3], [4]], 12, length=L)
  programs = decode.programs(world.target, drafter, reject.RULE)
  both = types.Weights(world.weights.target, own)
  state, info = programs.start(both, request)
  for _ in range(windows):
    state, info = programs.step(both, request, state, info)
  return state


def proposed(world, drafter, own, state):
  """(the likeliest draft after a state, the cache), at temperature 1."""
  warm = sampling.settings(2, 1.0)
  context = types.Context(*state[:3], warm, jnp.full(2, GAMMA, jnp.int32))
  draw = lambda offset, q_BV: jnp.argmax(q_BV, -1).astype(jnp.int32)
  noise = types.Noise(jnp.zeros((2, GAMMA)), draw, draw)
  both = types.Weights(world.weights.target, own)
  draft, _, cache = drafter.propose(both, (), context, noise, state.cache)
  assert draft.count_B.tolist() == [GAMMA] * 2
  return draft, cache


def by_layer(cache) -> list[np.ndarray]:
  """Keys and values of a cache, layers first: [DEPTH, ...] each."""
  if len(cache) != DEPTH:  # scanned: one array, rows first
    return [np.moveaxis(np.asarray(x), 1, 0) for x in cache]
  return [np.stack(x) for x in zip(*cache, strict=True)]


@pytest.mark.more
@pytest.mark.parametrize('scan', [False, True])
def test_the_residual_is_what_the_layers_make_in_one_pass(x64, scan):
  """What propose hands on equals one pass over the window it proposed."""
  world = world_of(scan)
  drafter, own = early_exit.recipe(world, GAMMA)
  state = begun(world, drafter, own, 0)
  draft, cache = proposed(world, drafter, own, state)
  view = early_exit.view(world.target, EXIT)
  tokens_BL = np.array(state.tokens_BL)
  for b, n in enumerate(state.lengths_B):
    tokens_BL[b, n : n + GAMMA] = draft.tokens_BK[b]
  hidden_BLD = forward.hidden(view, world.weights.target, tokens_BL)
  logits_BLV = world.target.head(world.weights.target, hidden_BLD)
  q_BLV = jax.nn.softmax(logits_BLV)
  close = functools.partial(np.testing.assert_allclose, atol=1e-12)
  for b, n in enumerate(state.lengths_B):
    close(draft.marks['residual_BND'][b], hidden_BLD[b, n - 1 : n + GAMMA])
    close(draft.q_BKV[b], q_BLV[b, n - 1 : n - 1 + GAMMA])
  # Its keys are in the target's cache, and nothing else was written there.
  for old_D, new_D in zip(by_layer(state.cache), by_layer(cache), strict=True):
    changed = (old_D != new_D).reshape(DEPTH, -1).any(-1)
    assert changed.tolist() == [True] + [False] * (DEPTH - 1)


def test_a_window_does_exactly_the_work_it_claims(capsys):
  """n layers over gamma + 1 tokens, the rest once, the head for each draft."""
  config = model_config.sized('tiny', depth=DEPTH, context=128)
  target, gamma, L = lm.make(config), 5, 64
  params = jax.eval_shape(lambda: lm.init(config, 0))
  weights = types.Weights(params)
  request = fakes.request([[1] * 9], 9, vocab=9, length=L)

  def flops(drafter):
    options = decode.Options(widths=())
    loop = decode.Loop(target, drafter, reject.RULE, options)
    start, step = (
      functools.partial(x, loop) for x in (decode.start, decode.step)
    )
    begun = jax.eval_shape(start, weights, request)
    return fakes.matmul_flops(
      jax.make_jaxpr(step)(weights, request, *begun).jaxpr,
      turns=iter((1, gamma - 1)),
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


# --- the target's own weights, rounded ----------------------------------------


@pytest.mark.more
def test_drafts_with_its_own_weights_over_the_targets_cache(x64):
  """q is of one pass of them over the window, after the target's prefill."""
  world = world_of(False)
  drafter, own = RECIPES['self'](world, GAMMA)
  state = begun(world, drafter, own, 1)
  draft, _ = proposed(world, drafter, own, state)
  target, given = world.target, world.weights.target
  tokens_BL, start_B = state.tokens_BL, state.lengths_B - 1
  cache = forward.prefill(
    target, given, tokens_BL, start_B, target.init_cache(2, L), chunk=8
  )
  last_B1 = jnp.take_along_axis(tokens_BL, start_B[:, None], 1)
  window_BK = jnp.concatenate([last_B1, draft.tokens_BK[:, :-1]], 1)
  hidden_BKD, _, _ = forward.read(
    target, own, window_BK, start_B, cache, slots=L
  )
  q_BKV = jax.nn.softmax(target.head(own, hidden_BKD))
  np.testing.assert_allclose(draft.q_BKV, q_BKV, atol=1e-12)


@pytest.mark.more
@pytest.mark.parametrize(
  'source, dtype',
  [
    ('random:tiny', 'float32'),
    ('random:tiny', 'int8'),
    ('random:t5_tiny', 'float32'),
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


@pytest.mark.slow
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
