"""Encoder-decoders: what is read once, and what nothing may change."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import (
  api,
  decode,
  forward,
  requests,
  sharding,
  types,
)
from specdec_jax.certify import base
from specdec_jax.chips import hlo
from specdec_jax.costs import scripted
from specdec_jax.drafters import eagle, early_exit, hybrid
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import hf, load
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.verify import coupled, reject
from tests import fakes, loops
from tests.drafters import windows
from tests.io import tiny

V, L, NEW = 31, 24, 16
SOURCES = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15, 9, 9]]


def config_of(width=16, depth=2, **more):
  sizes = dict(heads=4, head_dim=8, mlp=24, vocab=V, context=64)
  found = model_config.t5(depth, width=width, tied=False, **sizes | more)
  return model_config.LMConfig(**found).running(dtype='float64')


def wild(config, seed: int):
  """Random weights that make other tokens likely after other ones."""
  params = lm.init(config, seed)
  return params | {'head': params['head'] * 3}


def request_of(sources=SOURCES, new=NEW, gamma=0, **more):
  items = [requests.Item([0], i, source=x) for i, x in enumerate(sources)]
  return base.request_of(items, new, gamma=gamma, length=L, **more)


def plain_text(config, params, request):
  plain = decode.programs(lm.make(config), decode.PLAIN, reject.RULE)
  return fakes.texts(plain.generate(types.Weights(params), request))


@pytest.mark.more
@pytest.mark.parametrize('scan', [False, True], ids=['unrolled', 'scan'])
def test_a_window_equals_its_tokens_one_by_one(x64, scan):
  config = config_of().running(scan_layers=scan)
  model, params = lm.make(config), wild(config, 0)
  source = request_of().source
  far = 140  # past the last bucket
  cache = forward.open_cache(model, params, 3, far, source)
  tokens = jnp.arange(15, dtype=jnp.int32).reshape(3, 5)
  start_B = jnp.array([0, 4, 132])

  @jax.jit
  def read(tokens_BT, start_B, cache):
    hidden, _, cache = forward.read(
      model, params, tokens_BT, start_B, cache, slots=far
    )
    return model.head(params, hidden), cache

  together, whole = read(tokens, start_B, cache)
  for t in range(5):
    one, cache = read(tokens[:, t : t + 1], start_B + t, cache)
    np.testing.assert_allclose(one[:, 0], together[:, t], atol=1e-11)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), whole, cache
  )


@pytest.mark.more
def test_other_rows_padding_and_what_lies_behind_a_source_change_nothing(x64):
  config = config_of()
  params, (tokens_BI, lengths_B) = wild(config, 0), request_of().source

  def logits(tokens_BI, lengths_B):
    source, read = (
      types.Source(tokens_BI, lengths_B),
      np.tile(np.arange(4), (3, 1)),
    )
    return np.asarray(tiny.logits(config, params, read, source))

  want = logits(tokens_BI, lengths_B)
  behind = np.arange(tokens_BI.shape[1])[None] >= lengths_B[:, None]
  garbage = np.where(behind, 30, tokens_BI)
  np.testing.assert_allclose(logits(garbage, lengths_B), want, atol=1e-12)
  longer = np.pad(garbage, ((0, 0), (0, 9)), constant_values=3)
  np.testing.assert_allclose(logits(longer, lengths_B), want, atol=1e-12)
  order = np.array([2, 0, 1])
  np.testing.assert_allclose(
    logits(tokens_BI[order], lengths_B[order]), want[order], atol=1e-12
  )
  # And it is read: another first token changes every row.
  other = tokens_BI.copy()
  other[:, 0] = 20
  assert (np.abs(logits(other, lengths_B) - want).max((1, 2)) > 1e-3).all()


@pytest.mark.more
@pytest.mark.parametrize('rule', [reject.RULE, coupled.RULE], ids=['r', 'c'])
def test_text_is_plain_decodings_whatever_drafts(x64, rule):
  """Drafts of another shape, greedy or coupled, and the target itself."""
  config, small = config_of(), config_of(width=8, depth=1)
  params, other = wild(config, 0), wild(small, 1)
  more = dict(temperature=0.8, seed=3) if rule.coupled else {}
  want = plain_text(config, params, request_of(gamma=3, **more))
  drafts = [(small, other), (config, params)][: 1 if rule.coupled else 2]
  for draft, weights in drafts:
    drafter = lm_drafter.make(lm.make(draft), gamma=3)
    programs = decode.programs(lm.make(config), drafter, rule)
    out = programs.generate(
      types.Weights(params, weights), request_of(gamma=3, **more)
    )
    assert fakes.texts(out) == want
    mean = np.mean(out.info.hist_BN @ np.arange(4) / out.info.calls_B)
    assert (mean > 2) == (draft is config)


@pytest.mark.slow
def test_a_walk_along_a_text_reads_the_source():
  """Early exit proposes what its layers predict there."""
  config = config_of(depth=3).running(dtype='float32')
  model, params = lm.make(config), wild(config, 0)
  request = request_of()
  text_BL = fakes.pad(plain_text(config, params, request), L)
  drafter = early_exit.make(model, gamma=2, exit=2)
  q_BLV = windows.q_along(
    types.Weights(params),
    request._replace(tokens_BL=text_BL),
    loop=decode.Loop(model, drafter, reject.RULE),
  )
  view = early_exit.view(model, 2)
  hidden_BLD = forward.hidden(view, params, text_BL, request.source)
  predicted_BL = jnp.argmax(view.head(params, hidden_BLD), -1)
  np.testing.assert_array_equal(
    q_BLV.argmax(-1)[:, 1 : NEW + 1], predicted_BL[:, :NEW]
  )


@pytest.mark.more
def test_the_store_is_what_encoding_gave_after_any_rejection(x64):
  config = config_of()
  model, params = lm.make(config), wild(config, 0)
  request = request_of(gamma=3)
  plain = plain_text(config, params, request)
  script_BL = fakes.pad([fakes.adversary(x, V) for x in plain], L)
  weights = types.Weights(params, (script_BL, np.full_like(script_BL, 3)))
  programs = decode.programs(model, scripted.make(gamma=3), reject.RULE)
  begun, _ = programs.start(weights, request)
  store = jax.device_get((begun.cache.store, begun.cache.mask_B1I))

  def look(state, info):
    found = jax.device_get((state.cache.store, state.cache.mask_B1I))
    jax.tree.map(np.testing.assert_array_equal, found, store)

  fakes.run_steps(programs, weights, request, look=look)


@pytest.mark.more
@pytest.mark.parametrize('shared', [(), ('encoder', 'embed')])
def test_target_and_draft_encode_once_before_the_loop(shared):
  """A draft with the target's encoder, and its embedding, encodes nothing."""
  config, small = (
    config_of(width, depth).running(dtype='float32')
    for width, depth in ((16, 2), (16 if shared else 12, 1))
  )
  small = dataclasses.replace(
    small, encoder=config.encoder if shared else small.encoder
  )
  drafter = lm_drafter.make(lm.make(small), gamma=2, shared=shared)
  programs = decode.programs(lm.make(config), drafter, reject.RULE)
  weights = jax.eval_shape(
    lambda: types.Weights(lm.init(config, 0), lm.init(small, 1))
  )
  compiled = programs.generate.lower(weights, request_of(gamma=2)).compile()

  def rows(text):
    """Of each product."""
    found = [x[1] for x in hlo.instructions(text) if x[0] == 'dot']
    return [math.prod(hlo.dimensions(shape)[:-1]) for shape in found]

  # Three sources in buffers of 16 ids: each of the seven kernels of an
  # encoder's layer, and the keys and values of each of the decoder's.
  encoded = 2 if shared else 2 + 1
  assert rows(compiled.as_text()).count(48) == encoded * 7 + (2 + 1) * 2
  windows = [x for x in loops.bodies(compiled.as_text()) if '/verify/' in x]
  assert any(3 * (2 + 1) in rows(text) for text in windows)
  assert not any('/encode/' in x or 48 in rows(x) for x in windows)


@pytest.mark.slow
@pytest.mark.parametrize(
  'data, model, scan', [(2, 4, False), (4, 2, True)], ids=['unrolled', 'scan']
)
def test_tokens_do_not_depend_on_the_mesh(x64, data, model, scan):
  """Nor where the heads of a draft, of another shape, are not divided."""
  config, small = (
    config_of(*sizes[:2], heads=sizes[2]).running(scan_layers=scan)
    for sizes in ((16, 2, 8), (8, 1, 2))
  )
  sources = [*SOURCES, [4, 4], [1], [2, 3], [8, 9, 8], [7]]
  request = request_of(sources, gamma=2, temperature=[0.0, 0.8] * 4, seed=1)

  def side(seed, c, mesh):
    layout = mesh and sharding.lay_out(mesh, c)
    params = lm.init(c, seed, layout and layout.put)
    return lm.make(c, constrain=layout and layout.constrain), params, layout

  found = []
  for mesh in (None, sharding.make_mesh(data, model)):
    target, params, layout = side(0, config, mesh)
    draft, others, _ = side(1, small, mesh)
    drafter = lm_drafter.make(draft, gamma=2)
    programs = decode.programs(target, drafter, reject.RULE)
    args = types.Weights(params, others), requests.place(request, layout)
    found.append(fakes.texts(programs.generate(*args)))
  assert found[0] == found[1]

  shard = lambda x: x.sharding.shard_shape(x.shape)
  state, _ = programs.start(*args)
  for c, placed, cache, split in (
    (config, params, state.cache, model),
    (small, others, state.drafter.cache, 1 if model == 4 else model),
  ):
    B, H, N = 8 // data, c.heads // split, (c.depth,) * scan
    # Stacked, the decoder's own heads are one axis with their channels.
    own = (B, *N, L, H * 8) if scan else (B, H, L, 8)
    for x in jax.tree.leaves(cache.own):
      assert shard(x) == own
    for x in jax.tree.leaves(cache.store):
      assert shard(x) == (B, *N, H, 16, 8)
    for table in (placed['relative'], placed['encoder']['relative']):
      assert shard(table) == (32, H)


@pytest.mark.more
@pytest.mark.parametrize('family', ['t5', 't5_gated'])
def test_logits_and_greedy_text_are_those_of_transformers(family):
  folder = tiny.GOLDEN / family
  config, reader, _ = hf.open_folder(folder, family)
  golden = np.load(folder / 'logits.npz')
  sources = [
    row[:end].tolist()
    for row, end in zip(golden['source'], golden['lengths'], strict=True)
  ]
  request = requests.make(
    [requests.Item([0], i, source=x, new=24) for i, x in enumerate(sources)]
  )
  params = tiny.params(reader, config)
  logits = tiny.logits(config, params, golden['tokens'], request.source)
  np.testing.assert_allclose(logits, golden['logits'], atol=1e-4, rtol=1e-4)
  assert plain_text(config, params, request) == golden['greedy'].tolist()
  far = types.Source(golden['far'], golden['far_lengths'])
  logits = tiny.logits(config, params, golden['tokens'][:, :8], far)
  np.testing.assert_allclose(logits, golden['far_logits'], atol=1e-4, rtol=1e-4)


def test_a_prompt_becomes_a_source_with_its_end():
  model = load.load('random:t5_tiny')
  end = model.tokenizer.eos_ids[0]
  item = requests.item(model, 'ab', 7, chat=False)
  assert item.tokens == (0,) and item.number == 7
  assert item.source == [97, 98, end]
  assert requests.item(model, item.source, 7, chat=False) == item
  # Cut, it keeps its beginning and its end.
  cut = requests.item(model, 'abcdef', 7, chat=False, most=3)
  assert cut.source == [97, 98, end]
  assert requests.item(model, 'ab', 7, chat=False, most=3) == item
  with pytest.raises(
    ValueError, match='prediction: .* has an encoder, and its'
  ):
    api.generate(model, 'ab', draft='lookup', prediction='b')
  with pytest.raises(ValueError, match='empty source'):
    requests.item(model, [], 7, chat=False)


@pytest.mark.more
def test_a_draft_that_has_the_targets_encoder_shares_its_pass():
  """Known by its arrays; the text is plain decoding's."""
  target, other = (load.load(f'random:t5_tiny:{seed}') for seed in (0, 1))
  same, changed = (
    dataclasses.replace(other, params=other.params | few)
    for few in (
      {n: target.params[n] for n in ('encoder', 'embed')},
      {'encoder': target.params['encoder']},
    )
  )
  assert lm_drafter._shared(same.params, target) == ('encoder', 'embed')
  assert lm_drafter._shared(changed.params, target) == ()
  text = lambda draft: api.generate(target, 'abc', draft=draft)[0].tokens
  assert text(same) == text(None)


T5, TINY = 'random:t5_tiny', 'random:tiny'
EAGLE = eagle.Settings('zoo:smollm2-135m-instruct')


@pytest.mark.parametrize(
  'target, draft, message',
  [
    (T5, TINY, 'both need one, or neither'),
    (TINY, T5, 'both need one, or neither'),
    (T5, EAGLE, 'eagle: t5_tiny .* has an encoder, .* adaptive.drafter=lookup'),
    (T5, hybrid.Settings(EAGLE), 'eagle: t5_tiny .* has an encoder'),
  ],
)
def test_drafts_without_an_encoder_are_refused(target, draft, message):
  draft = load.load(draft) if isinstance(draft, str) else draft
  with pytest.raises(ValueError, match=message):
    api.generate(load.load(target), 'ab', draft=draft)
