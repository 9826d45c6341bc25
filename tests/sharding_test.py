"""A mesh changes where arrays live and nothing else."""

import logging

import jax
import numpy as np
import pytest

from specdec_jax import build, decode, requests, sharding, types
from specdec_jax.chips import hlo, train_step
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.models import lm
from specdec_jax.train import data as data_lib
from specdec_jax.train import step as step_lib
from specdec_jax.train import text_loss
from tests import fakes

B, L, NEW = 8, 32, 8
# Heads that every mesh divides, and SmolLM2-135M's 9 and 3.
EVEN = dict(
  heads=8, kv_heads=4, head_dim=4, width=16, mlp=32, vocab=16, depth=1
)
ODD = EVEN | dict(heads=9, kv_heads=3)
GPT = fakes.GPT | dict(gated=True)


def place(config, layout, seed):
  model = lm.make(config, constrain=layout and layout.constrain)
  return model, lm.init(config, seed, put=layout and layout.put)


def run(config, target_layout, draft_layout, rule='reject'):
  model, params = place(config, target_layout, 0)
  draft_model, draft_params = place(config, draft_layout, 1)
  weights = types.Weights(params, draft_params)
  request = fakes.request(
    fakes.prompts(B, vocab=config.vocab, longest=9),
    NEW,
    vocab=config.vocab,
    length=L,
    temperature=[0.0, 0.8] * 4,
    top_k=[0, 0, 0, 9] * 2,
    top_p=[1.0, 1.0, 1.0, 0.9] * 2,
    seed=1,
  )
  drafter = lm_drafter.make(draft_model, gamma=2)
  programs = decode.programs(model, drafter, build.rule_of(rule))
  request = requests.place(request, target_layout)
  generate = programs.generate.lower(weights, request).compile()
  out = generate(weights, request)
  return out, weights, (programs, request), generate.as_text()


def shard_shape(x):
  return x.sharding.shard_shape(x.shape)


@pytest.mark.more
@pytest.mark.parametrize(
  'sizes, data, model, draft_split',
  [
    pytest.param(EVEN, 2, 4, 4, marks=pytest.mark.slow),
    (EVEN, 2, 4, 2),
    (ODD | GPT, 4, 2, 1),
  ],
  ids=['even', 'draft on fewer', 'odd'],
)
def test_tokens_do_not_depend_on_the_mesh(x64, sizes, data, model, draft_split):
  config, even = fakes.tiny(**sizes), sizes is EVEN
  mesh = sharding.make_mesh(data, model, tensor_parallel=draft_split)
  layout = sharding.lay_out(mesh, config)
  draft_layout = sharding.lay_out(mesh, config, tensor_parallel=draft_split)
  out, weights, (programs, request), _ = run(config, layout, draft_layout)
  assert fakes.texts(out) == fakes.texts(run(config, None, None)[0])

  C, heads = config.head_dim, model if even else 1
  flat = lm.flatten(weights.target)
  wanted = {
    'head': (16, 16 // model),
    'layers/0/attn/k/kernel': (16, config.kv_heads * C // heads),
    'layers/0/attn/o/kernel': (config.heads * C // heads, 16),
    'layers/0/mlp/down/kernel': (32 // model, 16),
    'layers/0/attn_norm/scale': (16,),
  }
  if not even:
    wanted['layers/0/attn/q/bias'] = (9 * C,)
    wanted['layers/0/mlp/up/bias'] = (32 // model,)
  assert {name: shard_shape(flat[name]) for name in wanted} == wanted
  draft = lm.flatten(weights.draft)
  for name in 'head', 'layers/0/mlp/up/kernel':
    assert shard_shape(draft[name])[1] * draft_split == draft[name].shape[1]
  assert draft_split > 1 or all(
    x.sharding.is_fully_replicated for x in draft.values()
  )
  # The caches, after the prompts have been read.
  state, _ = programs.start(weights, request)
  draft_heads = draft_split if even else 1
  for cache, split in (
    (state.cache, heads),
    (state.drafter.cache, draft_heads),
  ):
    for x in jax.tree.leaves(cache):
      assert shard_shape(x) == (B // data, config.kv_heads // split, L, C)


RULES = 'reject', 'block', 'coupled', 'lenient:0.5'


@pytest.mark.slow
@pytest.mark.parametrize(
  'rule, draft_split', [(rule, 4) for rule in RULES] + [('reject', 2)]
)
def test_no_device_gathers_the_vocabulary(x64, rule, draft_split):
  """Logits, p and q stay split, and so do the draws and cuts made of them."""
  vocab, model = 1016, 4  # 1016, 508 and 254 are no other dimension
  config = fakes.tiny(**EVEN | dict(vocab=vocab))
  mesh = sharding.make_mesh(2, model, tensor_parallel=draft_split)
  layout = sharding.lay_out(mesh, config)
  draft = sharding.lay_out(mesh, config, tensor_parallel=draft_split)
  out, _, _, text = run(config, layout, draft, rule)
  assert fakes.texts(out) == fakes.texts(run(config, None, None, rule)[0])
  found = list(hlo.instructions(text))
  sizes = {vocab, vocab // model, vocab // draft_split}
  of_vocab = lambda shape: sizes & set(hlo.dimensions(shape))
  assert any(of_vocab(shape) for _, shape, _ in found)
  for opcode, shape, line in found:
    assert not (hlo.COLLECTIVE.fullmatch(opcode) and of_vocab(shape)), line


@pytest.mark.slow
def test_scanned_layers_on_a_mesh(x64):
  """The stacked cache splits heads with their channels, in whole heads."""
  config = fakes.tiny(**EVEN | fakes.GEMMA | dict(depth=2))
  config = config.running(scan_layers=True)
  base = fakes.texts(run(config, None, None)[0])
  layout = sharding.lay_out(sharding.make_mesh(2, 4), config)
  out, weights, (programs, request), _ = run(config, layout, layout)
  assert fakes.texts(out) == base
  flat = lm.flatten(weights.target)
  assert shard_shape(flat['layers/attn/q/kernel']) == (2, 16, 8)
  state, _ = programs.start(weights, request)
  for x in jax.tree.leaves(state.cache):
    assert shard_shape(x) == (B // 2, 2, L, 4)


def test_requests_are_split_over_the_data_axis():
  layout = sharding.lay_out(sharding.make_mesh(4, 2), fakes.tiny(**EVEN))
  request = fakes.request([[1]] * 8, 4, vocab=16)
  placed = requests.place(request, layout)
  for x, y in zip(
    jax.tree.leaves(placed), jax.tree.leaves(request), strict=True
  ):
    np.testing.assert_array_equal(x, y)
    assert shard_shape(x) == (2, *y.shape[1:])
  assert requests.place(request, None) is request


@pytest.mark.parametrize(
  'sizes, model, whole',
  [
    (EVEN, 4, set()),
    (EVEN | dict(kv_heads=2), 4, {'heads', 'kv_heads'}),
    (ODD, 2, {'heads', 'kv_heads'}),
    (EVEN | dict(mlp=30), 4, {'mlp'}),
    (ODD | dict(vocab=15), 2, {'heads', 'kv_heads', 'vocab'}),
  ],
)
def test_axes_that_do_not_divide_stay_whole_and_are_named(
  caplog, sizes, model, whole
):
  with caplog.at_level(logging.INFO, logger='absl'):
    layout = sharding.lay_out(sharding.make_mesh(2, model), fakes.tiny(**sizes))
  assert layout.whole == whole
  if not whole:
    assert caplog.text == ''
  else:
    assert f'model={model}' in caplog.text
    for axis in whole:
      assert f'{axis}={getattr(fakes.tiny(**sizes), axis)}' in caplog.text


def test_every_parameter_has_a_place(x64):
  layout = sharding.lay_out(sharding.make_mesh(2, 4), fakes.tiny(**EVEN))
  rich = dict(qkv_bias=True, tied=False) | fakes.OLMO2
  for changes in ({}, rich, fakes.GPT, fakes.GEMMA):
    for scan in (False, True):
      config = fakes.tiny(**EVEN | changes).running(scan_layers=scan)
      for name, s in lm.shapes(config).items():
        layout.parameter(name, len(s.shape)).shard_shape(s.shape)


def train(config, layout, remat=False):
  """(losses of four steps, the state after them)."""
  params = lm.init(config, 0, put=layout and layout.put)
  state = step_lib.start(train_step.ADAM, 4, params)
  loss = text_loss.cross_entropy(
    config, ids=config.vocab, remat=remat, layout=layout
  )
  advance = step_lib.make(train_step.ADAM, 4, loss, 0, state)
  shape, losses = (16, 12), []
  tokens_BT = np.random.default_rng(0).integers(0, config.vocab, shape)
  batch = dict(tokens=tokens_BT.astype(np.int32), counted=np.ones(shape, bool))
  for _ in range(4):
    placed = data_lib.placer(layout)(batch)
    state, figures = advance(state, {}, placed)
    losses.append(float(figures['loss']))
  return losses, state


@pytest.mark.more
@pytest.mark.parametrize(
  'data, model, fsdp',
  [
    (4, 2, True),
    pytest.param(8, 1, True, marks=pytest.mark.slow),
    pytest.param(2, 4, False, marks=pytest.mark.slow),
  ],
)
def test_training_on_a_mesh_learns_the_same(x64, data, model, fsdp):
  config = fakes.tiny(**EVEN)
  mesh = sharding.make_mesh(data, model)
  layout = sharding.lay_out(mesh, config, fsdp=fsdp)
  losses, state = train(config, layout, remat=fsdp)
  np.testing.assert_allclose(losses, train(config, None)[0], rtol=1e-6)
  # Bytes of a device: of parameters and of both moments, all matrices.
  held = [x for x in jax.tree.leaves(state) if x.ndim > 1]
  assert len(held) == 3 * sum(x.ndim > 1 for x in jax.tree.leaves(state.params))
  parts = data * model if fsdp else model
  for x in held:
    assert x.addressable_shards[0].data.nbytes * parts == x.nbytes


@pytest.mark.parametrize(
  'shape, processes, words',
  [
    (dict(data=8, model=2), 1, 'needs 16 devices; there are 8'),
    (dict(data=0, model=1), 1, 'data=0'),
    (
      dict(data=2, model=4, tensor_parallel=3),
      1,
      'tensor_parallel=3: mesh.model=4 is no multiple of it; give a divisor',
    ),
    (dict(model=4), 2, '2 processes have 8 devices, and mesh.data times'),
  ],
)
def test_a_mesh_that_cannot_be_is_refused(monkeypatch, shape, processes, words):
  monkeypatch.setattr(jax, 'process_count', lambda: processes)
  with pytest.raises(ValueError, match=words):
    sharding.make_mesh(**shape)


def test_a_layout_that_cannot_be_is_refused():
  mesh, config = sharding.make_mesh(2, 4), fakes.tiny(**EVEN | dict(width=12))
  layout = sharding.lay_out(mesh, config, fsdp=True)
  with pytest.raises(ValueError, match='layers/0/moe/kernel'):
    layout.parameter('layers/0/moe/kernel', 2)
  for options, words in (
    (dict(tensor_parallel=2), 'tensor_parallel=2: give it to make_mesh too'),
    (
      dict(tensor_parallel=1, fsdp=True),
      r'8 devices .* not divide the width 12',
    ),
  ):
    with pytest.raises(ValueError, match=words):
      sharding.lay_out(mesh, config, **options)


@pytest.mark.parametrize(
  'processes, backend, rows, want',
  [(1, 'cpu', 8, 1), (1, 'tpu', 8, 4), (1, 'tpu', 3, 3), (2, 'cpu', 1, 4)],
)
def test_the_devices_that_are_left_split_the_rows(
  monkeypatch, processes, backend, rows, want
):
  """Of 8, 2 along model; no more than rows, unless processes need all."""
  monkeypatch.setattr(jax, 'process_count', lambda: processes)
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  monkeypatch.setattr(sharding, 'make_mesh', lambda data, *_, **__: data)
  assert sharding.mesh_of(-1, 2, rows) == want
  assert sharding.mesh_of(3, 2, rows) == 3
