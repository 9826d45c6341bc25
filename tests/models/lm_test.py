"""The language model: one function for every pass, whatever the cache held."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward
from specdec_jax.models import convert, lm, rope
from tests import fakes

B, S = 3, 12
TOKENS = np.random.default_rng(0).integers(0, 13, (B, S)).astype(np.int32)
# Every other switch of the architecture at once.
RICH = fakes.GEMMA | dict(
  heads=4,
  kv_heads=2,
  tied=False,
  embed_scale=4.0,
  query_scale=0.5,
  attn_softcap=2.0,
  qkv_bias=True,
  o_bias=True,
  mlp_bias=True,
  act='gelu_tanh',
  wide_norm=True,
  logit_softcap=3.0,
  residual_scale=0.6,
  head_scale=0.7,
  rope_scaling=rope.Yarn(4.0, 5, magnitude=1.2),
)


def params_of(config, seed=0):
  """Random weights, biases and norms included."""
  params = fakes.wild(config, seed)
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  noise = [jnp.asarray(rng.normal(size=x.shape), x.dtype) / 4 for x in leaves]
  return jax.tree.unflatten(
    tree, [x + n for x, n in zip(leaves, noise, strict=True)]
  )


@functools.partial(jax.jit, static_argnames=('model', 'T', 'taps'))
def read(
  model, params, start_B, T, cache, *, tokens=TOKENS, keep=None, taps=()
):
  """Reads T tokens a row from start_B on; (logits, taps, cache)."""
  at_BT = jnp.clip(start_B[:, None] + jnp.arange(T)[None], 0, S - 1)
  tokens_BT = jnp.take_along_axis(jnp.asarray(tokens), at_BT, 1, mode='clip')
  hidden, tapped, cache = forward.read(
    model,
    params,
    tokens_BT,
    start_B,
    cache,
    slots=S,
    keep_BT=keep,
    taps=taps,
  )
  return model.head(params, hidden), tapped, cache


START = np.array([2, 0, 4], np.int32)


@functools.partial(jax.jit, static_argnums=0)
def prefilled(model, params):
  cache = model.init_cache(B, S)
  return forward.prefill(
    model, params, jnp.asarray(TOKENS), jnp.asarray(START), cache, chunk=3
  )


@pytest.mark.parametrize(
  'settings, scan',
  [
    pytest.param({}, False, marks=pytest.mark.more),
    *((fakes.GPT, True), (RICH, False), (RICH, True)),
  ],
  ids=['plain-unrolled', 'gpt-scan', 'rich-unrolled', 'rich-scan'],
)
def test_five_tokens_at_once_equal_one_at_a_time(x64, settings, scan):
  config = fakes.tiny(**settings).running(scan_layers=scan)
  model, params = lm.make(config), params_of(config)
  cache = prefilled(model, params)
  together, _, whole = read(model, params, START, 5, cache)
  for t in range(5):
    single, _, cache = read(model, params, START + t, 1, cache)
    np.testing.assert_allclose(single[:, 0], together[:, t], atol=1e-11)
  for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(cache), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-12)
  # And a causal pass over everything, without any cache from before.
  fresh, _, _ = read(model, params, np.zeros(B, int), S, model.init_cache(B, S))
  for b in range(B):
    np.testing.assert_allclose(
      fresh[b, START[b] : START[b] + 5], together[b], atol=1e-11
    )


@pytest.mark.parametrize(
  'settings, scan',
  [({}, False), (fakes.GEMMA, True)],
  ids=['plain-unrolled', 'windows-scan'],
)
def test_what_stale_slots_hold_changes_nothing(x64, settings, scan):
  """As after a rejection, whose slots are written again."""
  config = fakes.tiny(**settings).running(scan_layers=scan)
  model, params = lm.make(config), params_of(config)
  cache = prefilled(model, params)
  clean, _, _ = read(model, params, START, 3, cache)
  slots = np.arange(S)
  stale_BS = slots[None] >= START[:, None]
  stale = stale_BS[:, None, :, None]  # [B, G or depth, S, C or G * C]

  def poison(path, x):
    leaf = jax.tree_util.keystr(path)
    bad = np.where(np.arange(x.shape[-1]) % 2, 1e30, -1e30)
    return jnp.where(stale, np.nan if '.k_' in leaf else bad, x)

  with jax.debug_nans(False):
    dirty, _, after = read(
      model, params, START, 3, jax.tree_util.tree_map_with_path(poison, cache)
    )
  np.testing.assert_array_equal(dirty, clean)
  assert any(np.isnan(x).any() for x in jax.tree.leaves(after))


@pytest.mark.parametrize(
  'settings',
  [{}, dict(qkv_bias=True) | fakes.OLMO2, fakes.GPT],
  ids=['plain', 'biases', 'no gate'],
)
def test_fused_projections_change_no_result(x64, settings):
  config, start_B = fakes.tiny(**settings), np.zeros(B, int)
  fused_config, fused = convert.fuse(config, params_of(config))
  assert set(lm.flatten(fused)) == set(lm.shapes(fused_config))
  apart, together = (
    read(model := lm.make(c), x, start_B, S, model.init_cache(B, S))[0]
    for c, x in ((config, params_of(config)), (fused_config, fused))
  )
  np.testing.assert_allclose(together, apart, rtol=1e-10)


@pytest.mark.parametrize('scan', [False, True], ids=['unrolled', 'scan'])
def test_slots_past_the_end_and_masked_tokens_write_nowhere(x64, scan):
  config = fakes.tiny().running(scan_layers=scan)
  model, params = lm.make(config), params_of(config)
  cache = jax.tree.map(lambda x: x + 7, model.init_cache(B, S))

  def written(start_B, keep=None):
    _, _, new = read(model, params, start_B, 4, cache, keep=keep)
    changed = [np.asarray(x != 7) for x in jax.tree.leaves(new)]
    # In both layouts rows are axis 0, slots axis 2.
    per = [x.any((1, 3)) for x in changed]
    assert all((x == per[0]).all() for x in per)
    return [np.flatnonzero(row).tolist() for row in per[0]]

  assert written(np.array([0, 10, 12])) == [[0, 1, 2, 3], [10, 11], []]
  assert written(np.array([-1, -4, 3])) == [[0, 1, 2], [], [3, 4, 5, 6]]
  keep = np.array([[True] * 4, [False] * 4, [True, False, True, False]])
  assert written(np.array([0, 0, 5]), keep) == [[0, 1, 2, 3], [], [5, 7]]


@pytest.mark.parametrize('scan', [False, True], ids=['unrolled', 'scan'])
def test_taps_are_the_residual_streams_after_their_layers(x64, scan):
  deep = fakes.tiny(depth=3, embed_scale=2.0, logit_softcap=3.0)
  shallow = dataclasses.replace(deep, depth=1)
  params = params_of(deep)
  cut = params | {'layers': {'0': params['layers']['0']}}
  start = np.zeros(B, int)

  @functools.partial(jax.jit, static_argnums=(0, 2))
  def run(model, params, taps):
    cache = model.init_cache(B, S)
    return forward.read(
      model, params, TOKENS, jnp.asarray(start), cache, slots=S, taps=taps
    )

  alone, _, _ = run(lm.make(shallow), cut, ())
  if scan:
    layers = params['layers'].values()
    params['layers'] = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    deep = deep.running(scan_layers=True)
  model = lm.make(deep)
  hidden, streams, _ = run(model, params, (2, 3, 0, -1))
  last, normed, first, embedded = streams
  np.testing.assert_array_equal(last, hidden)
  np.testing.assert_allclose(first, alone, atol=1e-12)
  positions_BT = jnp.zeros_like(TOKENS)
  wanted = model.embed(params, TOKENS, positions_BT)
  np.testing.assert_allclose(embedded, wanted, atol=1e-12)
  np.testing.assert_allclose(normed, model.norm(params, last), atol=1e-12)
  logits = model.head(params, hidden)
  np.testing.assert_allclose(model.project(params, normed), logits, atol=1e-12)


def test_one_bfloat16_row_equals_the_same_row_among_others():
  config = fakes.tiny(dtype='bfloat16')
  model, params = lm.make(config), lm.init(config, 0)
  run = lambda rows: read(
    model,
    params,
    np.zeros(rows, int),
    1,
    model.init_cache(rows, S),
    tokens=TOKENS[:rows],
  )[0]
  many, one = run(B), run(1)
  assert one.dtype == jnp.float32
  np.testing.assert_array_equal(one[0], many[0])


@pytest.mark.more
@pytest.mark.parametrize('tied', [True, False])
def test_a_model_of_some_ids_says_the_same_of_them(x64, tied):
  """More ids are asked for than it has, as where a target is padded."""
  ids = (1, 2, 5, 6)
  config = fakes.tiny(vocab=7, tied=tied, logit_softcap=3.0, embed_scale=2.0)
  params = lm.init(config, 0)
  few, own = convert.reduce(config, params, ids)
  assert {n: x.shape for n, x in lm.flatten(own).items()} == {
    n: x.shape for n, x in lm.shapes(few).items()
  }
  tokens_BT = jnp.array([[3, 0, 6, 2]])

  def logits(config, params):
    model = lm.make(config, ids=6, vocab=9)
    hidden = forward.hidden(model, params, tokens_BT)
    return np.asarray(model.head(params, hidden))

  whole, some = logits(config, params), logits(few, own)
  kept = [1, 2, 5]  # 6 is no id
  np.testing.assert_allclose(some[..., kept], whole[..., kept], rtol=1e-12)
  others = [i for i in range(9) if i not in kept]
  assert (some[..., others] == -np.inf).all()
