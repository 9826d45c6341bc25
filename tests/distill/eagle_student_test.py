"""Students as others publish them: saved, read, and what they learn."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import build, requests
from specdec_jax.distill import eagle_student, evaluate, sections
from specdec_jax.drafters import dflash
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.io import export
from specdec_jax.io.published import dflash_folder, eagle_folder
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from tests.distill import runs
from tests.drafters import dflash_test
from tests.io import published_test

OWN = {
  'eagle3': dict(kind='eagle3', taps=(0, 1), vocabulary=128),
  'mtp': dict(kind='mtp', vocabulary=128),
  'mtp of all ids': dict(kind='mtp', vocabulary=0),
  'dflash': dict(kind='dflash', taps=(0,), layers=(1, 0), vocabulary=128),
}


def untrained(target, ids=None, **student):
  """(settings, config, Student) of these ids, or of random ones."""
  if ids is None:
    size = student['vocabulary'] or target.ids
    ids = np.sort(np.random.default_rng(0).permutation(target.ids)[:size])
  s, made = runs.made(target, ids, student=student)
  return s, eagle_student.config_of(s.student, target.config), made


@pytest.mark.parametrize('name', OWN)
def test_what_is_saved_is_read_bit_for_bit(tmp_path, name):
  target = build.load('random:tiny', scan_layers=False, kernels='xla')
  s, config, made = untrained(target, **OWN[name])
  draw = np.random.default_rng(1).normal
  params = jax.tree.map(
    lambda x: draw(size=x.shape).astype('f2').astype('f4'), made.params
  )
  folder = made.write(tmp_path, params, dict(target='a target'))
  if s.student.kind == 'dflash':
    blocks, found = dflash_folder.fit(folder, target)
    assert (blocks.size, blocks.first) == (s.loss.unroll + 1, 1)
    assert blocks.mask == eagle_student.mask_id(target)
    read = blocks.config
  else:
    read, found = eagle_folder.fit(folder, '', target)
  # By the head that it was trained with, and so to the same logits.
  x_11D = draw(size=(1, 1, target.config.width)).astype('f4')
  again = eagle.logits(read, target.model, found, x_11D).whole()
  first = eagle.logits(
    config, target.model, made.weights(params), x_11D
  ).whole()
  assert np.isfinite(again).sum() == (s.student.vocabulary or target.ids)
  np.testing.assert_allclose(again, first, rtol=1e-5, atol=2e-3)
  nested = {n: x for n, x in params.items() if n != 'head'}
  layers = {'0': nested['block']} | nested.get('more', {})
  block, _ = eagle_folder.convert.fuse(config.block, {'layers': layers})
  assert read == dataclasses.replace(config, block=block)
  want, have = lm.flatten(nested), lm.flatten(found['layer'])
  assert want.keys() == have.keys()
  for key, x in want.items():
    np.testing.assert_array_equal(have[key], x)


@pytest.mark.parametrize('kind', ['eagle3', 'dflash'])
def test_taps_that_nobody_gave_are_layers_of_the_teacher(kind):
  student, found = runs.settings(student=dict(kind=kind)).student, {}
  for depth in range(1, 41):
    c = dataclasses.replace(model_config.sized('tiny'), depth=depth)
    taps = found[depth] = eagle_student.config_of(student, c).taps
    assert taps == tuple(sorted({*taps} & {*range(depth)}))
    assert len(taps) == min(depth, 3)
  # EAGLE-3's of Llama 3.1 8B, counted from 1: 2, 16, 29.
  assert found[32] == (1, 15, 28) and found[2] == (0, 1)


@pytest.mark.parity
@pytest.mark.parametrize('name', ['eagle3', 'dflash'])
def test_speculators_reads_what_is_saved(tmp_path, name):
  """And computes the same: of three chained steps, of every block."""
  golden = {'eagle3': published_test.GOLDEN, 'dflash': dflash_test.GOLDEN}[name]
  make = published_test.maker(golden)
  import speculators

  first = build.load('random:tiny', scan_layers=False, kernels='xla')
  c = dataclasses.replace(first.config, rope_theta=500.0)
  # As a draft is saved.
  half = lambda x: np.asarray(x, 'f2').astype('f4')
  model = tmp_path / 'model'
  export.save(model, c, jax.tree.map(half, first.params), first.tokenizer)
  target = build.load(str(model), scan_layers=False, kernels='xla')
  s, config, made = untrained(target, **OWN[name])
  draw = np.random.default_rng(1)
  moved = lambda x: half(x + draw.normal(0, 0.1, x.shape))
  params = jax.tree.map(moved, made.params)
  folder = made.write(tmp_path, params, dict(target='a target'))
  facts = speculators.SpeculatorModelConfig.from_pretrained(folder)
  facts.transformer_layer_config._attn_implementation = 'eager'
  theirs = speculators.SpeculatorModel.from_pretrained(folder, config=facts)
  tokens = draw.integers(0, target.ids, 12).astype('i4')
  features = draw.normal(size=(12, theirs.fc.in_features)).astype('f4')
  want = make.logits(theirs.eval(), tokens, features)
  weights = made.weights(params)
  if name == 'eagle3':
    draft = config, weights, target.model
    found = published_test.logits(*draft, tokens, features)
    want = [x[: len(tokens) - k] for k, x in enumerate(want)]
  else:
    mask = eagle_student.mask_id(target)
    draft = eagle.Blocks(config, mask, s.loss.unroll + 1), target.model
    each = [
      dflash_test.after(*draft, weights, tokens, features, n + 1)
      for n in range(len(want))
    ]
    found = np.stack(each)[..., weights['ids']]
  for x, y in zip(found, want, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


def alpha(target, kind: str, source) -> float:
  """How much of what the drafter of a folder proposes is accepted."""
  module = dflash if kind == 'dflash' else eagle_drafter
  # Trained for a few steps, it agrees in too little to be measured.
  settings = module.Settings(source, check='off')
  made = build.engine(target, settings, gamma=2)
  items = requests.items([[1, 2, 3], [7] * 9, [100, 50], [8]])
  judge = sections.Judge(2, 12, 1.0)
  given = judge, target, lambda gamma: made.drafter, made.q, items, 0
  return evaluate.make(*given)(made.weights.draft)['alpha']


@pytest.mark.slow
@pytest.mark.parametrize('name', ['eagle3', 'mtp', 'dflash'])
def test_a_draft_learns(tmp_path, name):
  """Its drafter proposes what is accepted more often."""
  _, lines = runs.run(
    tmp_path, student=OWN[name], run=dict(steps=8), optimiser=dict(warmup=1)
  )
  found = runs.losses(lines)
  assert len(found) == 8 and sum(found[-2:]) < sum(found[:2])
  folder = tmp_path / 'run/draft'
  target = build.load('random:tiny', scan_layers=False, kernels='xla')
  ids = np.flatnonzero(
    safetensors.numpy.load_file(folder / 'model.safetensors')['t2d']
  )
  _, _, made = untrained(target, ids, **OWN[name])
  before = made.write(tmp_path, made.params, dict(target='a target'))
  first, last = (alpha(target, name, x) for x in (before, folder))
  assert first + 1e-3 < last
  if name == 'eagle3':  # whose head is its own
    head = safetensors.numpy.load_file(folder / 'model.safetensors')
    columns = np.asarray(target.params['head'])[:, ids].T
    assert abs(head['lm_head.weight'] - columns).max() > 1e-3
  options = {'source': str(folder), 'check': 'off'}
  drafter = 'dflash' if name == 'dflash' else 'eagle'
  runs.assert_decodes_as_plain(drafter, draft_options=options)
