"""Drafts of a few layers on the target's own embedding, head and encoder."""

import dataclasses
import json
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import api, build, sharding
from specdec_jax.distill import lm_student
from specdec_jax.drafters import draft_file, layers_file
from specdec_jax.io import load
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm

IDS = tuple(range(0, 256, 2))


def saved(folder, size='t5_tiny', name='draft.safetensors', **about):
  """(path, config, flat parameters) of a draft: a layer of another model."""
  of = lambda seed: load.load(
    f'random:{size}:{seed}', scan_layers=False, kernels='xla'
  )
  target, other = of(0), of(1)
  config, params = lm_student.pruned(other.config, other.params, (1,))
  config, params = convert.reduce(config, params, IDS)
  config = dataclasses.replace(config, rotated=(False,))
  facts = {'tokenizer': target.tokenizer.fingerprint(), 'made_by': 'a test'}
  layers_file.write(folder / name, config, params, facts | about)
  return str(folder / name), *convert.plain(config, params)


@pytest.fixture
def path(tmp_path):
  return saved(tmp_path)[0]


def two_devices():
  return sharding.make_mesh(data=1, model=2)


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
  path, _, flat = saved(tmp_path, size)
  if 'mesh' in plan:
    plan = plan | {'mesh': plan['mesh']()}
  target = load.load(f'random:{size}:0', **plan)
  draft = layers_file.read(path, target)
  assert draft is layers_file.read(path, target) and draft.draft_ids == IDS
  assert draft.config.rotated == (False,)
  for name in target.params:
    shared = draft.params[name] is target.params[name]
    assert shared == (name in layers_file.SHARED), name
  _, found = convert.plain(draft.config, draft.params)
  for name, x in flat.items():
    if name.split('/')[0] in layers_file.SHARED:
      continue
    most = np.abs(x).max(0) if name.endswith('/kernel') else 0
    assert np.all(np.abs(found[name] - x) <= most / 254 * 1.001), name


@pytest.mark.parametrize('size', ['t5_tiny', 'tiny'])
def test_the_text_is_plain_decodings(size, tmp_path):
  path, _, _ = saved(tmp_path, size)
  target = load.load(f'random:{size}:0')
  text = lambda **draft: (
    api.generate(target, 'some words', max_new_tokens=12, **draft)[0].tokens
  )
  assert text(draft='lm', draft_options=dict(source=path)) == text()
  engine = build.engine(target, 'lm', gamma=2, source=path)
  assert engine.q is not None and engine.draft is not None
  width = engine.draft.config.width
  logits_V = engine.q.head(engine.weights.draft, jnp.ones((1, 1, width)))[0, 0]
  assert np.flatnonzero(np.isfinite(logits_V)).tolist() == list(IDS)


def test_the_targets_own_layers_are_accepted(tmp_path):
  """All but what rounding to int8 changes; kernels come in any memory order."""
  target = load.load('random:t5_tiny:0', kernels='xla')
  turned = jax.tree.map(lambda x: np.asarray(x, order='F'), target.params)
  about = {'tokenizer': target.tokenizer.fingerprint()}
  path = tmp_path / 'all.safetensors'
  layers_file.write(path, target.config, turned, about)
  (found,) = api.generate(
    target,
    'some words',
    draft='lm',
    gamma=2,
    draft_options=dict(source=str(path)),
    max_new_tokens=24,
  )
  assert found.metrics['draft_acceptance_rate'] > 0.7


def test_the_steps_are_as_small_as_int8_allows(tmp_path):
  path, _, flat = saved(tmp_path)
  arrays, about = draft_file.read(layers_file.KIND, path)
  assert about['made_by'] == 'a test' and json.loads(about['windows']) == [0]
  assert json.loads(about['rotated']) == [False]
  name = 'layers/0/mlp/down/kernel'
  assert arrays[name].dtype == np.int8
  assert (np.abs(arrays[name]).max(0) == 127).all()
  own = arrays[name] * arrays[f'{name}/step']
  np.testing.assert_allclose(np.abs(own).max(0), np.abs(flat[name]).max(0))


def test_what_does_not_fit_its_target_is_refused(path, tmp_path):
  read = lambda source, path=path: layers_file.read(path, load.load(source))
  with pytest.raises(ValueError, match=r'^lm .*: layers/0/.* is \(64, 64\), t'):
    read('random:tiny')
  other = saved(tmp_path, name='other', tokenizer='another')[0]
  with pytest.raises(ValueError, match='^lm .*: made with another tokenizer'):
    read('random:t5_tiny', other)
  arrays, about = draft_file.read(layers_file.KIND, path)
  arrays['ids'][-1] = 999
  draft_file.write(layers_file.KIND, other, arrays, about)
  with pytest.raises(ValueError, match='damaged: it proposes ids that are not'):
    read('random:t5_tiny', other)
  for source, why in (
    ('zoo:nothing', 'the zoo has flan-t5-small-titles, smollm2'),
    ('zoo:smollm2-135m-instruct', 'not a file of scripts/distill.py'),
    ('no.safetensors', 'no such file; give a file of scripts/distill.py'),
  ):
    with pytest.raises(ValueError, match=f'^lm {source}: {why}'):
      build.engine(load.load('random:t5_tiny'), 'lm', source=source)


def test_the_shipped_draft_fits_flan_t5_small():
  """Without the weights of its target, which are not here."""
  source = 'zoo:flan-t5-small-titles'
  assert draft_file.find(layers_file.KIND, source).stat().st_size < 5e6
  _, about = draft_file.read(layers_file.KIND, source)
  tokenizer = python_types.SimpleNamespace(
    fingerprint=lambda: about['tokenizer'], size=32100
  )
  target = load.LanguageModel(
    'random', 'random', tokenizer, {}, model_config.sized('t5_small')
  )
  draft = layers_file.read(source, target)
  wanted = lm.shapes(dataclasses.replace(target.config, depth=1))
  found = lm.flatten(draft.params)
  assert jax.tree.map(np.shape, found) == {
    n: x.shape
    for n, x in wanted.items()
    if n.split('/')[0] not in layers_file.SHARED
  }
  assert len(draft.draft_ids) == 4096
