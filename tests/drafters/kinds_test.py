"""What every drafter that is read from a source does, of whatever kind."""

import dataclasses
import functools
import operator

import jax
import numpy as np
import pytest

from specdec_jax import build, requests, sharding
from specdec_jax.drafters import adaptive, hybrid, readings
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.io.published import draft_file
from specdec_jax.models import eagle
from tests import fakes
from tests.drafters import dflash_test, medusa_test
from tests.io import published_test, tiny

D, V = medusa_test.CONFIG.width, medusa_test.CONFIG.vocab
SLOW, MORE = pytest.mark.slow, pytest.mark.more


def medusa_heads(folder):
  return medusa_test.save(folder, 'pt')


def mtp(folder):
  return published_test.mimo(folder), folder


def trained(folder):
  """A file as scripts/distill.py writes it, of half of the ids."""
  folder.mkdir()
  target = build.load('random:tiny')
  c = eagle.settings(target.config, (0, 1))
  layer = {name: np.asarray(x) for name, x in eagle.init(c, 0).items()}
  about = {'tokenizer': target.tokenizer.fingerprint()}
  draft = draft_file.Eagle(c.taps, layer, np.arange(0, target.ids, 2), about)
  draft_file.write_eagle(folder / 'draft', draft)
  return 'random:tiny', folder / 'draft'


# (folder) -> (source of the target, that of the draft); Settings of a source.
KINDS = {
  'medusa': (medusa_heads, medusa_test.UNMEASURED),
  'dflash': (dflash_test.save, dflash_test.UNMEASURED),
  'mtp': (mtp, functools.partial(eagle_drafter.Settings, check='off')),
  'eagle': (trained, eagle_drafter.Settings),
}
asked = functools.partial(
  fakes.request,
  fakes.prompts(4, vocab=medusa_test.IDS, longest=9),
  16,
  vocab=medusa_test.IDS,
  length=32,
  temperature=[0.7, 1, 1, 0.0],
)


def opened(kind, folder):
  """(load, which makes the target; Settings of its draft)."""
  save, settings = KINDS[kind]
  target, source = save(folder / 'm')
  return functools.partial(build.load, str(target)), settings(source)


def text_of(engine, request):
  return fakes.texts(engine.programs.generate(engine.weights, request))


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_on_a_mesh_the_texts_are_the_same(x64, tmp_path, kind):
  """Drafts are whole on every device, but for a matrix of ids of Medusa's, and
  their caches split by rows."""
  load, settings = opened(kind, tmp_path)
  plain = build.engine(load(dtype='float64'), rule='coupled')
  mesh = sharding.make_mesh(2, 2)
  target = load(dtype='float64', mesh=mesh)
  made = build.engine(target, settings, rule='coupled', gamma=2)
  placed = requests.place(asked(), target.layout)
  assert text_of(plain, asked()) == text_of(made, placed)
  draft = dict(made.weights.draft)
  assert draft.pop('target') is target.params
  for path, x in jax.tree_util.tree_leaves_with_path(draft):
    if kind == 'medusa' and path[-1].key == 'head':
      assert x.sharding.shard_shape((D, V)) == (D, V // 2)
    else:
      assert x.sharding.is_fully_replicated
    assert x.sharding.device_set == set(mesh.devices.flat)
  state, _ = made.programs.start(made.weights, placed)
  for x in jax.tree.leaves(getattr(state.drafter, 'cache', ())):
    assert x.sharding.shard_shape(x.shape) == (2, *x.shape[1:])


@pytest.mark.more
@pytest.mark.parametrize(
  'dtype', ['float32', pytest.param('bfloat16', marks=SLOW)]
)
@pytest.mark.parametrize('kind', [pytest.param('medusa', marks=SLOW), 'dflash'])
def test_on_one_cpu_the_kernels_read_them(tmp_path, kind, dtype):
  load, settings = opened(kind, tmp_path)
  found = []
  for more in ({}, dict(kernels='xla')):
    target = load(dtype=dtype, **more)
    made = build.engine(target, settings, gamma=3)
    given = target, made.drafter, made.weights.draft
    _, seen = medusa_test.proposals(*given)
    found.append(seen[-1][3])
  close = dict(float32=1e-4, bfloat16=0.1)[dtype]
  np.testing.assert_allclose(*found, atol=close)


@SLOW
@pytest.mark.parametrize('rule', ['coupled', 'reject', 'block'])
@pytest.mark.parametrize('kind', ['medusa', 'dflash'])
@pytest.mark.parametrize('around', [adaptive, hybrid])
def test_inside_others_too(x64, tmp_path, around, kind, rule):
  """Whatever is drafted, a rule's text at temperature 0 is plain decoding's,
  and under coupled at any."""
  load, inner = opened(kind, tmp_path)
  target = load(dtype='float64')
  costs = {x: [1.0, 1.01, 1.02, 1.03] for x in ('verify', kind)}
  more = dict(costs=costs) if around is adaptive else {}
  made = build.engine(
    target, around.Settings(inner, **more), gamma=3, rule=rule
  )
  one, two = (
    text_of(x, asked()) for x in (made, build.engine(target, rule=rule))
  )
  assert one[-1] == two[-1]
  assert one == two or rule != 'coupled'


@pytest.mark.parametrize('kind', ['medusa', 'dflash', 'eagle'])
def test_engines_of_every_gamma_share_a_draft(tmp_path, kind):
  load, settings = opened(kind, tmp_path)
  target = load()
  one, two = (build.engine(target, settings, gamma=gamma) for gamma in (1, 2))
  same = jax.tree.map(operator.is_, one.weights.draft, two.weights.draft)
  assert jax.tree.all(same)
  _, by_name = KINDS[kind]
  again = build.engine(target, by_name(str(settings.source)), gamma=2)
  assert again.programs is two.programs


# --- refusals -----------------------------------------------------------------


def z_lab(**said):
  """What a DFlash's config.json says of it."""
  return {'dflash_config': dflash_test.FACTS['z-lab']['dflash_config'] | said}


# What of a draft is another: arrays (None: there is none), else its settings.
MARKOV = 'markov_head.markov_w1.weight'
BROKEN = [
  ('medusa', {'hydra.weight': np.ones(2)}, r'no place for \[hydra.weight\]'),
  (
    'medusa',
    {'1.0.linear.bias': None},
    r'nothing for \[1.0.linear.bias\]; giv',
  ),
  (
    *('medusa', {'2.0.linear.weight': np.ones((16, 16))}),
    r'2.0.linear.weight has shape \(16, 16\); heads of m need \(32, 32\)',
  ),
  (
    *('medusa', {'0.0.linear.bias': np.full(32, np.nan)}),
    '0.0.linear.bias has 32 values that are not finite',
  ),
  ('dflash', dict(architectures=['Llama']), 'Llama is no DFlash draft; give a'),
  (
    *('dflash', z_lab(mask_token_id=264)),
    'mask_token_id=264, block_size=4: needs an id below 264, and at least 2',
  ),
  (
    *('dflash', dict(dflash_config=dflash_test.BLOCK)),
    'config.json has no target_layer_ids',
  ),
  (
    *('dflash', z_lab(target_layer_ids=[0, 3])),
    r'it reads layers \(0, 3\), .* where m has -1 to 2; give a draft',
  ),
  (
    *('dflash', z_lab(aux_hidden_state_layer_ids=[1, 4])),
    r'it reads layers \(1, 4\), .* where m has 0 to 3; give a draft',
  ),
  (
    *('dflash', z_lab(target_layer_ids=[0, 1, -1])),
    r'fc.weight has shape \(32, 64\); its settings and .* need \(32, 96\)',
  ),
  ('dflash', dict(vocab_size=320), 'of vocabulary 320, and m has 264'),
  ('dflash', dict(target_hidden_size=64), 'target of width 64, and m has 32'),
  (
    *('dflash', dict(use_sliding_window=True, max_window_layers=1)),
    'layers with a sliding window are not read',
  ),
  ('dflash', {'fc.weight': None}, r'nothing for \[fc.weight\]'),
  ('dflash', {MARKOV: np.ones((264, 4))}, rf'no place for \[{MARKOV}\]'),
]


@pytest.mark.parametrize('kind, changes, message', BROKEN)
def test_other_drafts_are_refused_by_name(
  tmp_path, monkeypatch, kind, changes, message
):
  """Before anything is compiled."""
  monkeypatch.setattr(readings, 'own_text', None)
  arrays = {n: x for n, x in changes.items() if '.' in n}
  facts = {n: x for n, x in changes.items() if '.' not in n}
  module = {'medusa': medusa_test, 'dflash': dflash_test}[kind]
  own = module.arrays() | arrays
  own = {n: x.astype('f4') for n, x in own.items() if x is not None}
  folder, source = module.save(tmp_path / 'm', own=own, **facts)
  settings = module.UNMEASURED.func(source)
  with pytest.raises(ValueError, match=f'^{kind} {source}: .*{message}') as e:
    build.engine(tiny.read(folder), settings, gamma=2)
  assert '\n' not in str(e.value)


def test_a_draft_of_dflash_is_a_folder(tmp_path):
  target = tiny.read(dflash_test.save(tmp_path / 'm')[0])
  with pytest.raises(ValueError, match='safetensors: no such folder; give a f'):
    build.engine(target, dflash_test.UNMEASURED('model.safetensors'), gamma=1)


FEW = '; give gamma=4, a tree of 4 levels, tree=best:4, or less'


@pytest.mark.parametrize(
  'kind, tree, gamma, words',
  [
    ('medusa', '', 9, f'has 4 heads, and gamma=9 needs 9{FEW}'),
    ('medusa', 'best:8', 8, f'and tree=best:8 needs 5{FEW}'),
    ('medusa', '2,1,1,1,1', 6, f' needs 5{FEW}'),
    ('dflash', '', 9, 'drafts 3 tokens in a block, and gamma=9; give gamma=3'),
  ],
)
def test_a_window_has_as_many_drafts_as_there_are(
  tmp_path, kind, tree, gamma, words
):
  load, settings = opened(kind, tmp_path)
  settings = dataclasses.replace(settings, **{'tree': tree} if tree else {})
  with pytest.raises(ValueError, match=words):
    build.engine(load(), settings, gamma=gamma)
