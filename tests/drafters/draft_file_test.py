"""Files of drafts: what is read fits its target, or an error says why not."""

import dataclasses
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import api, build, sharding
from specdec_jax.distill import lm_student
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import load, tokenizer
from specdec_jax.io.published import draft_file, eagle_folder
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, eagle, lm
from tests import fakes

KIND = draft_file.NGRAM
OWN = tokenizer.from_bytes(300, 'bytes 300')
ARRAYS = {
  'a': np.arange(3, dtype=np.int32),
  'b': np.arange(6, dtype=np.float32).reshape(2, 3).T,
}
ABOUT = {'tokenizer': OWN.fingerprint(), 'steps': 3, 'taps': (1, 2)}


@pytest.fixture
def path(tmp_path):
  draft_file.write(KIND, tmp_path / 'draft', ARRAYS, ABOUT)
  return tmp_path / 'draft'


def test_what_is_written_is_read(path):
  arrays, about = draft_file.read(KIND, path)
  assert about == ABOUT | {'steps': '3', 'taps': '[1, 2]'}
  assert set(arrays) == set(ARRAYS)
  for name, x in ARRAYS.items():
    np.testing.assert_array_equal(arrays[name], x)
  with pytest.raises(ValueError, match='^output .*: cannot be written: No suc'):
    draft_file.write(KIND, path.parent / 'no' / 'a', ARRAYS, ABOUT)
  assert [x.name for x in path.parent.iterdir()] == ['draft']


def test_what_is_no_file_of_a_draft(path):
  folder = path.parent
  (folder / 'cut').write_bytes(path.read_bytes()[:-9])
  (folder / 'text').write_text('to be or not to be')
  safetensors.numpy.save_file(ARRAYS, folder / 'plain')
  draft_file.write(draft_file.EAGLE, folder / 'eagle', ARRAYS, ABOUT)
  for name, message in (
    ('cut', 'damaged, or not a file of scripts/ngram.py'),
    ('text', 'damaged, or not a file'),
    ('plain', 'not a file of scripts/ngram.py'),
    ('eagle', 'is a draft of eagle: give it as eagle.source'),
    ('.', 'no such file; give a file of scripts/ngram.py'),
    ('absent', 'no such file; give a file of scripts/ngram.py'),
  ):
    with pytest.raises(ValueError, match=f'^ngram {folder}.*: {message}'):
      draft_file.read(KIND, folder / name)


def test_the_zoo_is_a_folder_of_drafts(tmp_path, monkeypatch):
  monkeypatch.setattr(draft_file, 'ZOO', tmp_path)
  with pytest.raises(ValueError, match='^ngram zoo:a: the zoo has no draft y'):
    draft_file.find(KIND, 'zoo:a')
  file = tmp_path / 'one' / 'draft.safetensors'
  file.parent.mkdir()
  draft_file.write(KIND, file, ARRAYS, ABOUT)
  assert draft_file.find(KIND, 'zoo:one') == file
  with pytest.raises(ValueError, match='^ngram zoo:two: the zoo has one$'):
    draft_file.read(KIND, 'zoo:two')


# --- the layer of an EAGLE draft ---------------------------------------------

LISTED = 'damaged: its vocabulary is not a list of different ids below 258'


def saved(taps=(0, 1), ids=(4, 1, 257), **about) -> draft_file.Eagle:
  c = eagle.settings(fakes.tiny(vocab=264, dtype='float32'), taps)
  layer = {name: np.asarray(x) for name, x in eagle.init(c, 0).items()}
  facts = {'tokenizer': OWN.fingerprint(), 'who': 'a test'}
  return draft_file.Eagle(taps, layer, np.array(ids), facts | about)


def fit(made: draft_file.Eagle, **changes):
  """(settings, weights.draft, the target)."""
  config = fakes.tiny(**dict(vocab=264, dtype='float32') | changes)
  target = python_types.SimpleNamespace(
    config=config,
    params=lm.init(config, 0),
    tokenizer=OWN,
    ids=258,
    layout=None,
  )
  own = draft_file.check_eagle(made, 'F', target)
  config, params = eagle_folder.placed(own, made.layer, made.ids, target)
  return config, params, target


@pytest.mark.more
def test_a_random_layer_is_drawn_by_its_seed():
  target = load.load('random:tiny')
  made = lambda seed: draft_file.eagle_for(f'random:{seed}', target)
  (config, one), (_, again), (_, other) = map(made, (0, 0, 1))
  assert config.taps == (target.config.depth - 1,)
  assert len(one['ids']) == target.ids
  same = lambda x, y: jax.tree.all(jax.tree.map(np.array_equal, x, y))
  assert same(one, again) and not same(one, other)
  with pytest.raises(ValueError, match='eagle random:x: must be random:SEED'):
    made('x')


@pytest.mark.more
def test_an_eagle_that_is_written_is_read_and_gets_its_columns(tmp_path):
  made = saved()
  draft_file.write_eagle(tmp_path / 'draft', made)
  again = draft_file.read_eagle(tmp_path / 'draft')
  assert (again.taps, again.about) == (made.taps, made.about)
  config, own, target = fit(again)
  assert config == eagle.settings(target.config, (0, 1))
  assert own['target'] is target.params
  assert own['ids'].dtype == jnp.int32 and own['ids'].tolist() == [4, 1, 257]
  wanted = target.params['head'][:, [4, 1, 257]]
  np.testing.assert_array_equal(own['head'], wanted)
  layer = lm.flatten(own['layer'])
  assert set(layer) == set(made.layer)
  for name, x in made.layer.items():
    np.testing.assert_array_equal(layer[name], x)
  # In the target's type.
  _, own, _ = fit(again, dtype='bfloat16')
  del own['ids'], own['target']
  assert {x.dtype for x in jax.tree.leaves(own)} == {jnp.dtype('bfloat16')}


@pytest.mark.parametrize(
  'made, message',
  [
    (saved()._replace(taps=(0, 2)), r'taps=\(0, 2\): needs .* at last layer 1'),
    (saved()._replace(taps=(1,)), r'no place for \[fuse/kernel\]; train one'),
    (
      saved()._replace(layer=saved((1,)).layer),
      r'nothing for \[fuse/kernel\]; train one for this target',
    ),
    *((saved(ids=x), LISTED) for x in ((1, 1), (-1, 3), (), (1.5,))),
  ],
)
def test_a_draft_of_something_else(made, message):
  with pytest.raises(ValueError, match=f'^eagle F: {message}'):
    fit(made)


# --- layers on the target's embedding, head and encoder ----------------------

IDS = tuple(range(0, 256, 2))


def layers(folder, size='t5_tiny', name='draft.safetensors', **about):
  """(path, config, flat parameters) of a draft: a layer of another model."""
  of = lambda seed: load.load(
    f'random:{size}:{seed}', scan_layers=False, kernels='xla'
  )
  target, other = of(0), of(1)
  config, params = lm_student.pruned(other.config, other.params, (1,))
  config, params = convert.reduce(config, params, IDS)
  config = dataclasses.replace(config, rotated=(False,))
  facts = {'tokenizer': target.tokenizer.fingerprint(), 'made_by': 'a test'}
  draft_file.write_layers(folder / name, config, params, facts | about)
  return str(folder / name), *convert.plain(config, params)


def two_devices():
  return sharding.make_mesh(data=1, model=2)


@pytest.mark.more
@pytest.mark.parametrize(
  ('size', 'plan'),
  [
    ('t5_tiny', dict(kernels='auto')),
    ('t5_tiny', dict(kernels='xla')),
    ('t5_tiny', dict(kernels='xla', scan_layers=True)),
    ('t5_tiny', dict(kernels='xla', mesh=two_devices)),
    ('tiny', dict(kernels='auto')),
  ],
)
def test_it_is_laid_out_as_its_target_is(size, plan, tmp_path):
  path, _, flat = layers(tmp_path, size)
  if 'mesh' in plan:
    plan = plan | {'mesh': plan['mesh']()}
  target = load.load(f'random:{size}:0', **plan)
  draft = draft_file.layers_for(path, target)
  assert draft is draft_file.layers_for(path, target) and draft.draft_ids == IDS
  assert draft.config.rotated == (False,)
  for name in target.params:
    shared = draft.params[name] is target.params[name]
    assert shared == (name in draft_file.SHARED), name
  _, found = convert.plain(draft.config, draft.params)
  for name, x in flat.items():
    if name.split('/')[0] in draft_file.SHARED:
      continue
    most = np.abs(x).max(0) if name.endswith('/kernel') else 0
    # The CPU kernels have blocks of int8, whose scales are of 16 bits.
    again = 2.3 if draft.config.run.packed else 1.001
    assert np.all(np.abs(found[name] - x) <= most / 254 * again), name


@pytest.mark.more
@pytest.mark.parametrize(
  'size', [pytest.param('t5_tiny', marks=pytest.mark.slow), 'tiny']
)
def test_the_text_is_plain_decodings(size, tmp_path):
  path, _, _ = layers(tmp_path, size)
  target = load.load(f'random:{size}:0')
  text = lambda **draft: (
    api.generate(target, 'some words', max_new_tokens=12, **draft)[0].tokens
  )
  assert text(draft=lm_drafter.Settings(path)) == text()
  engine = build.engine(target, lm_drafter.Settings(path), gamma=2)
  assert engine.q is not None and engine.draft is not None
  width = engine.draft.config.width
  logits_V = engine.q.head(engine.weights.draft, jnp.ones((1, 1, width)))[0, 0]
  assert np.flatnonzero(np.isfinite(logits_V)).tolist() == list(IDS)


@pytest.mark.more
def test_the_targets_own_layers_are_accepted(tmp_path):
  """All but what rounding to int8 changes; kernels come in any memory order."""
  target = load.load('random:t5_tiny:0', kernels='xla')
  turned = jax.tree.map(lambda x: np.asarray(x, order='F'), target.params)
  about = {'tokenizer': target.tokenizer.fingerprint()}
  path = tmp_path / 'all.safetensors'
  draft_file.write_layers(path, target.config, turned, about)
  (found,) = api.generate(
    target,
    'some words',
    draft=lm_drafter.Settings(path),
    gamma=2,
    max_new_tokens=24,
  )
  assert found.metrics['draft_acceptance_rate'] > 0.7


def test_layers_that_do_not_fit_are_refused(tmp_path):
  path, *_ = layers(tmp_path)
  read = lambda source, path=path: draft_file.layers_for(
    path, load.load(source)
  )
  with pytest.raises(
    ValueError, match='^lm .*: no place for .*, relative.; train'
  ):
    read('random:tiny')
  other = layers(tmp_path, name='other', tokenizer='another')[0]
  with pytest.raises(ValueError, match='^lm .*: made with another tokenizer'):
    read('random:t5_tiny', other)
  arrays, about = draft_file.read(draft_file.LAYERS, path)
  for ids in ([1, 999], [2, 1], [1, 1], [-1, 1]):
    arrays['ids'][-2:] = ids
    draft_file.write(draft_file.LAYERS, other, arrays, about)
    with pytest.raises(ValueError, match='damaged: its ids are not ascending'):
      read('random:t5_tiny', other)
  for source, why in (
    ('zoo:nothing', 'the zoo has flan-t5-small-titles, smollm2'),
    ('zoo:smollm2-135m-instruct', 'is a draft of eagle: give it as eagle.so'),
    ('no.safetensors', 'no such file; give a file of scripts/distill.py'),
  ):
    with pytest.raises(ValueError, match=f'^lm {source}: {why}'):
      build.engine(load.load('random:t5_tiny'), lm_drafter.Settings(source))


def test_the_shipped_draft_fits_flan_t5_small():
  """Without the weights of its target, which are not here."""
  source = 'zoo:flan-t5-small-titles'
  assert draft_file.find(draft_file.LAYERS, source).stat().st_size < 5e6
  _, about = draft_file.read(draft_file.LAYERS, source)
  tokenizer = python_types.SimpleNamespace(
    fingerprint=lambda: about['tokenizer'], size=32100
  )
  target = load.LanguageModel(
    'random', 'random', tokenizer, {}, model_config.sized('t5_small')
  )
  draft = draft_file.layers_for(source, target)
  wanted = lm.shapes(dataclasses.replace(target.config, depth=1))
  found = lm.flatten(draft.params)
  assert jax.tree.map(np.shape, found) == {
    n: x.shape
    for n, x in wanted.items()
    if n.split('/')[0] not in draft_file.SHARED
  }
  assert len(draft.draft_ids) == 4096
