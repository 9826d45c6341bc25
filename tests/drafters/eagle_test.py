"""Drafting from features: what training made is what decoding does."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import (
  build,
  debug,
  decode,
  forward,
  requests,
  sharding,
  types,
)
from specdec_jax.certify import base, enumerated, load
from specdec_jax.distill import eagle_loss
from specdec_jax.drafters import draft_file
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from specdec_jax.verify import block, coupled, reject
from tests import fakes

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

GAMMA, B, L, V, IDS = 3, 6, 48, 7, 6
TEMPERATURES = [1.0, 0.7, 1.0, 1.0, 1.0, 0.0]
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


@pytest.fixture(scope='module', params=[*KINDS, 'eagle3.1'])
def world(request, all_compile_in_less_time):
  """A world, and what proposals says of it."""
  with jax.enable_x64(True):
    made = make_world(request.param)
    yield made, *proposals(*made)


def sampled():
  """Rows that end in different windows, the last one greedy.

  The first one begins with a single token.
  """
  return fakes.request(
    [[5], *fakes.prompts(B - 1, vocab=IDS, longest=9)],
    [30, 12, 30, 30, 2, 30],
    vocab=IDS,
    length=L,
    temperature=TEMPERATURES,
    request=range(B),
  )


def proposals(c, target, weights, **settings):
  """(texts, [(row, length before, tokens_K, q_KV, count)] of live windows)."""
  drafter = eagle_drafter.make(c, target, gamma=GAMMA, chunk=4, **settings)
  options = decode.Options(chunk=8)
  programs = decode.programs(
    target, debug.watched(drafter), coupled.RULE, options
  )
  request = sampled()
  state, info = programs.start(weights, request)
  seen = []
  while np.asarray(state.live_B).any():
    lengths_B, live_B = np.array(state.lengths_B), np.array(state.live_B)
    state, info = programs.step(weights, request, state, info)
    inner, draft, _ = state.drafter
    state = state._replace(drafter=inner)
    for b in np.flatnonzero(live_B):
      seen.append((b, lengths_B[b], *(np.asarray(x)[b] for x in draft[:3])))
  # Windows of every kind, or this would show little.
  assert (np.asarray(info.hist_BN).sum(0) > 0).all()
  return fakes.texts(
    decode.Output(state.tokens_BL, state.lengths_B, info)
  ), seen


def by_training(world, tokens_XL):
  """q of each step at every index, [K, X, L, V], by training."""
  c, target, weights = world
  X = len(tokens_XL)
  _, tapped, _ = forward.read(
    target,
    weights.target,
    tokens_XL,
    jnp.zeros(X, jnp.int32),
    target.init_cache(X, L),
    slots=L,
    taps=c.taps,
  )
  at_XL = jnp.broadcast_to(jnp.arange(L)[None], (X, L))
  hidden = eagle_loss.steps(
    c,
    weights.draft['layer'],
    eagle.embed(target, weights.draft, tokens_XL, at_XL),
    forward.concat(tapped),
    GAMMA,
  )
  return jax.nn.softmax(
    eagle.logits(c, target, weights.draft, jnp.stack(hidden))
  )


def assert_same(q_V, wanted_V, row: int):
  """wanted_V: at temperature 1."""
  if temperature := TEMPERATURES[row]:
    wanted_V = np.asarray(wanted_V) ** (1 / temperature)
    wanted_V /= wanted_V.sum()
  else:
    wanted_V = np.arange(V) == np.argmax(wanted_V)
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


@pytest.mark.more
def test_drafting_stops_where_the_draft_is_not_sure(world):
  """Before the first law whose peak, at temperature 1, is low; row by row."""
  made, plain, _ = world
  least = 0.4
  with jax.enable_x64(True):
    texts, seen = proposals(*made, min_confidence=least)
    assert texts == plain  # coupled: whatever is drafted
    said = [
      [*texts[b][:n], *tokens_K[:count]] for b, n, tokens_K, _, count in seen
    ]
    q_KXLV = jax.jit(functools.partial(by_training, made))(
      fakes.pad([text[:L] for text in said], L)
    )
    peak_KXL = np.max(q_KXLV, -1)
  counts = set()
  for x, (_, n, _, _, count) in enumerate(seen):
    sure = [peak_KXL[k, x, n - 1 + k] for k in range(GAMMA) if n + k <= L]
    stops = [k for k, peak in enumerate(sure) if peak < least]
    if len(sure) == GAMMA:
      assert count == min([*stops, GAMMA]), sure
      counts.add(int(count))
  assert len(counts) > 2, counts


def test_the_view_is_the_first_draft_of_a_window_at_every_index(world):
  (c, target, weights), texts, seen = world
  with jax.enable_x64(True):
    view = eagle_drafter.view(c, target)
    tokens_BL = jnp.asarray(fakes.pad(texts, L))

    @jax.jit
    def read(weights, tokens_BL):
      cache, logits = view.init_cache(B, L), []
      for start, end in ((0, 11), (11, L)):
        start_B = jnp.full(B, start, jnp.int32)
        part_BT = tokens_BL[:, start:end]
        hidden, _, cache = forward.read(
          view, weights, part_BT, start_B, cache, slots=L
        )
        logits.append(view.head(weights, hidden))
      return jax.nn.softmax(jnp.concatenate(logits, 1))

    q_BLV = read(weights.draft, tokens_BL)
    for b, n, _, q_KV, _ in seen:
      assert_same(q_KV[0], q_BLV[b, n - 1], b)


def test_text_is_plain_decodings(world):
  """Sampled and greedy; the texts are those of the tests above."""
  (_, target, weights), texts, _ = world
  with jax.enable_x64(True):
    programs = decode.programs(target, decode.PLAIN, coupled.RULE)
    assert fakes.texts(programs.generate(weights, sampled())) == texts


@pytest.mark.more
@pytest.mark.parametrize(
  'temperature', [0.0, pytest.param(0.7, marks=pytest.mark.slow), 1.0]
)
@pytest.mark.parametrize('rule', [reject.RULE, block.RULE])
def test_three_windows_of_a_published_draft_enumerated(rule, temperature, x64):
  """Under coupled they are plain decoding's, as above."""
  world = base.tables(3)
  c, layer, own = published(4)
  own = dict(head=own['head'][:, :2], embed=own['embed'][:3])
  drafter = eagle_drafter.make(c, world.target, gamma=2)
  weights = eagle.weights(layer, [2, 0], world.weights.target, **own)
  pair = base.Pair(rule, drafter, weights)
  enumerated.windows_error(world, pair, dict(temperature=temperature))


@pytest.mark.more
@pytest.mark.parametrize('kind', ['', 'eagle3.1'])
def test_tokens_do_not_depend_on_the_row_or_the_batch(kind, x64):
  """Under a rule whose texts are not plain decoding's."""
  c, target, weights = make_world(kind, taps=(1,))
  drafter = eagle_drafter.make(c, target, gamma=GAMMA, chunk=4)
  programs = decode.programs(target, drafter, reject.RULE)
  prompts = [[5], *fakes.prompts(B - 1, vocab=IDS, longest=9)]

  def run(numbers):
    request = fakes.request(
      [prompts[i] for i in numbers],
      12,
      vocab=IDS,
      length=L,
      temperature=1.0,
      request=numbers,
      rows=B,
    )
    out = fakes.texts(programs.generate(weights, request))
    return dict(zip(numbers, out, strict=False))

  together = run(list(range(B)))
  for numbers in ([3, 1, 5, 0, 2, 4], [4], [1, 0]):
    for number, text in run(numbers).items():
      assert text == together[number]


def certified(dtype: str):
  """What decoding takes: target, drafter, rule, weights, a request."""
  world = base.transformers(13, dtype=dtype)
  drafter, other = load.RECIPES['eagle'](world, GAMMA)
  weights = types.Weights(world.weights.target, other)
  request = base.make_request(world, [[1], [2, 3, 4]], 9, length=20)
  return world.target, drafter, reject.RULE, weights, request


@pytest.mark.more
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


@pytest.fixture
def path(tmp_path):
  """A file for random:tiny: half of the ids."""
  target = build.load('random:tiny')
  c = eagle.settings(target.config, (0, 1))
  layer = {name: np.asarray(x) for name, x in eagle.init(c, 0).items()}
  about = {'tokenizer': target.tokenizer.fingerprint()}
  ids = np.arange(0, target.ids, 2)
  draft = draft_file.Eagle(c.taps, layer, ids, about)
  draft_file.write_eagle(tmp_path / 'draft', draft)
  return tmp_path / 'draft'


@pytest.mark.slow
def test_on_a_mesh_the_texts_are_the_same(x64, path):
  """The draft is whole on every device, its cache split by rows."""
  make = functools.partial(build.load, 'random:tiny', dtype='float64')
  request = fakes.request(
    fakes.prompts(4, vocab=300), 6, vocab=300, length=32, temperature=0.9
  )
  plain = build.engine(make(), rule='coupled')
  mesh = sharding.make_mesh(2, 2)
  target = make(mesh=mesh)
  e = build.engine(
    target, eagle_drafter.Settings(path), rule='coupled', gamma=2
  )
  placed = requests.place(request, target.layout)
  one, two = (
    fakes.texts(x.programs.generate(x.weights, y))
    for x, y in ((plain, request), (e, placed))
  )
  assert one == two
  own = {k: x for k, x in e.weights.draft.items() if k != 'target'}
  for x in jax.tree.leaves(own):
    assert x.sharding.is_fully_replicated
    assert x.sharding.device_set == set(mesh.devices.flat)
  assert e.weights.draft['target'] is target.params
  state, _ = e.programs.start(e.weights, placed)
  for x in jax.tree.leaves(state.drafter.cache):
    assert x.sharding.shard_shape(x.shape) == (2, 2, 32, 16)


def test_engines_of_every_gamma_share_one_draft(path):
  target = build.load('random:tiny')
  make = lambda path, gamma: build.engine(
    target, eagle_drafter.Settings(path), gamma=gamma
  )
  one, two = (make(path, gamma) for gamma in (1, 2))
  same = jax.tree.map(operator.is_, one.weights.draft, two.weights.draft)
  assert jax.tree.all(same)
  assert make(str(path), 2).programs is two.programs


@pytest.mark.more
def test_a_target_without_an_embedding_is_refused():
  c, target, _ = make_world(dtype='float32')
  with pytest.raises(ValueError, match='without embed cannot'):
    eagle_drafter.make(c, target._replace(embed=None), gamma=1)
