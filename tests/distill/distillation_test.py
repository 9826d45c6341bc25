"""From a config to a draft that decodes."""

import json
import pathlib

import gguf
import jax
import numpy as np
import pytest

from specdec_jax import build, requests, sharding
from specdec_jax.distill import distillation
from specdec_jax.io import files
from specdec_jax.io.published import draft_file
from specdec_jax.models import convert, lm
from tests.distill import runs
from tests.io import tiny

Q4_1 = gguf.GGMLQuantizationType.Q4_1


@pytest.fixture(scope='module')
def eagle_run(tmp_path_factory):
  """(its folder, figures, lines of metrics) of a run of eight steps."""
  folder = tmp_path_factory.mktemp('eagle')
  return folder, *runs.run(folder, run=dict(steps=8, evaluate_every=4))


@pytest.mark.slow
def test_an_eagle_is_trained_judged_written_and_decodes(eagle_run):
  _, figures, lines = eagle_run
  found = runs.losses(lines)
  assert len(found) == 8 and found[-1] < found[0]
  judged = {x['step']: x for x in lines if 'block_efficiency' in x}
  best = max(judged, key=lambda step: judged[step]['block_efficiency'])
  assert figures['step'] == best
  assert figures['block_efficiency'] == judged[best]['block_efficiency']
  draft = draft_file.read_eagle(figures['draft'])
  assert len(draft.ids) == 256 and json.loads(draft.about['step']) == best
  options = {'source': figures['draft']}
  runs.assert_decodes_as_plain('eagle', draft_options=options)


def test_other_models_begin_another_run(eagle_run):
  _, figures, _ = eagle_run
  config = json.loads(draft_file.read_eagle(figures['draft']).about['config'])
  first, other = (build.load(f'random:tiny:{x}').digest for x in (0, 1))
  assert config['read'] == {'teacher': first}

  def read(teacher='random:tiny', **student):
    s = runs.settings(teacher=dict(source=teacher), student=student)
    return distillation.digests(s)

  lm_of = lambda source: runs.LM | dict(size='', source=source)
  assert read(**lm_of('random:tiny:1')) == dict(teacher=first, student=other)
  assert read('random:tiny:1') == {'teacher': other}
  draft = read(source=figures['draft'])['student']
  assert draft == files.sha256(pathlib.Path(figures['draft']))


def on_a_mesh(tmp_path, monkeypatch, **changes):
  """A run on four devices, where all that is trained and read must lie; each
  has a fourth of what is trained."""
  make, place, placed = distillation._task, requests.place, []

  def on_four(*args):
    task = make(*args)

    def evaluate(params):
      for x in jax.tree.leaves((params, task.frozen)):
        assert len(x.sharding.device_set) == 4
      for path, x in jax.tree.leaves_with_path(params):
        whole = x.ndim == 1 or path[-1].key == 'relative'  # T5's bias
        assert whole or x.addressable_shards[0].data.size * 4 == x.size
      return task.evaluate(params)

    return task._replace(evaluate=evaluate)

  def spy(request, layout):
    placed.append(layout)
    return place(request, layout)

  monkeypatch.setattr(distillation, '_task', on_four)
  monkeypatch.setattr(requests, 'place', spy)
  mesh = dict(data=2, model=2, fsdp=True)
  found = runs.run(tmp_path, mesh=mesh, **changes)
  # The rows of the teacher's answers and of the evaluation are split.
  assert placed and None not in placed
  return found


STUDENTS = {
  'eagle': dict(),
  'mtp': dict(kind='mtp', vocabulary=128),
  'dflash': dict(kind='dflash', taps=(0,), layers=(1,)),
  'medusa': dict(kind='medusa', vocabulary=0, share=False),
  'lm': dict(kind='lm', layers=(1,)),
  't5': dict(),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', STUDENTS)
def test_a_mesh_changes_nothing(name, tmp_path, monkeypatch):
  config = 't5' if name == 't5' else 'eagle'
  own = dict(config=config, student=STUDENTS[name])
  # An eagle's teacher answers on the mesh too; others read the same answers.
  answers = '' if name == 'eagle' else str(tmp_path / 'answers')
  own['data'] = dict(keep=name == 'lm', folder=answers)
  alone, lines = runs.run(tmp_path / '1', **own)
  figures, found = on_a_mesh(tmp_path / '4', monkeypatch, **own)
  assert figures.keys() == alone.keys() and len(runs.losses(found)) == 4
  np.testing.assert_allclose(runs.losses(found), runs.losses(lines), rtol=1e-3)
  both = (x['block_efficiency'] for x in (figures, alone))
  np.testing.assert_allclose(*both, rtol=2e-2)


@pytest.mark.slow
def test_an_lm_answers_on_a_mesh(tmp_path, monkeypatch):
  data = dict(completions='student', refresh=2)
  figures, lines = on_a_mesh(tmp_path, monkeypatch, student=runs.LM, data=data)
  assert figures['finished'] and len(runs.losses(lines)) == 4


@pytest.mark.more
def test_an_eagle_begins_with_another(eagle_run, tmp_path):
  folder, first, lines = eagle_run
  path = first['draft']
  # The most frequent ids of other questions are others; those of the path stay.
  second, more = runs.run(
    tmp_path / 'two', student=dict(source=path), data=dict(seed=5)
  )
  assert runs.losses(more)[0] < runs.losses(lines)[0] - 0.03
  one, two = draft_file.read_eagle(path), draft_file.read_eagle(second['draft'])
  np.testing.assert_array_equal(one.ids, two.ids)
  for why, student in (
    (r'reads layers \(1,\) and proposes 256 ids', dict(vocabulary=64)),
    ('not a file of', dict(source=str(folder / 'run/config.json'))),
  ):
    with pytest.raises(ValueError, match=why):
      runs.run(tmp_path / 'three', student=dict(source=path) | student)
  assert not (tmp_path / 'three/cache').exists()


@pytest.mark.more
def test_a_language_model_learns_from_both_and_is_exported(tmp_path):
  figures, _ = runs.run(
    tmp_path,
    student=dict(kind='lm', layers=(1,), vocabulary=0),
    data=runs.PROSE | dict(completions='mixed', refresh=2),
  )
  kept = (tmp_path / 'run/completions').iterdir()
  assert sorted(p.name for p in kept) == ['0.npz', '2.npz']
  draft = build.load(figures['draft'])
  assert draft.config.depth == 1
  runs.assert_decodes_as_plain(draft)


@pytest.mark.slow
def test_a_language_model_may_propose_the_most_frequent_ids_only(tmp_path):
  figures, lines = runs.run(
    tmp_path,
    student=dict(kind='lm', layers=(1,), vocabulary=64, share=False),
    data=runs.PROSE | dict(completions='text', prompts=16),
    run=dict(steps=8, checkpoint_every=8, evaluate_every=8),
  )
  assert runs.losses(lines)[-1] < runs.losses(lines)[0]
  target, draft = (
    build.load(x, kernels='xla') for x in ('random:tiny', figures['draft'])
  )
  own_config, params = draft.as_draft
  ids = list(own_config.proposes)
  assert len(ids) == 64 and params['head'].shape == (64, 64)
  # Other ids have the teacher's columns, for programs that know no such draft.
  own, theirs = (np.asarray(x.params['head']) for x in (draft, target))
  rest = np.setdiff1d(np.arange(target.config.vocab), ids)
  np.testing.assert_array_equal(own[:, rest], theirs[:, rest])
  assert not np.array_equal(own[:, ids], theirs[:, ids])
  runs.assert_decodes_as_plain(draft)


@pytest.mark.parametrize('layers, scan', [((1,), False), ((), None)])
def test_a_teacher_gives_its_layers_one_by_one(
  layers, scan, tmp_path, monkeypatch
):
  def load(source, **options):
    if 'scan_layers' in options:  # to train on; not to answer
      raise ValueError(f'asked for {options["scan_layers"]}')

  monkeypatch.setattr(build, 'load', load)
  own = runs.LM | dict(layers=layers, size='' if layers else 'tiny')
  with pytest.raises(ValueError, match=f'asked for {scan}'):
    runs.run(tmp_path, student=own)


@pytest.mark.parametrize(
  'dtype, kernels, student',
  [
    ('stored', 'auto', {}),
    pytest.param(
      *('int4', 'int8', runs.LM | dict(size='', layers=(0,), share=True)),
      marks=pytest.mark.more,
    ),
  ],
)
def test_a_quantised_teacher_answers_as_it_is_stored(
  tmp_path, dtype, kernels, student
):
  """Training reads the same numbers in float32; the draft decodes beside it."""
  tiny.needs_kernels()
  c = tiny.config(width=64, head_dim=16, mlp=96)
  path = str(tiny.write_gguf(tmp_path / 'a.gguf', c, quantise=Q4_1))
  figures, lines = runs.run(
    tmp_path,
    teacher=dict(source=path, dtype=dtype, kernels=kernels),
    student=student,
    data=runs.DATA | runs.PROSE | dict(folder=str(tmp_path / 'answers')),
  )
  found = runs.losses(lines)
  assert len(found) == 4 and np.isfinite(found).all()
  target = build.load(path, dtype=dtype, kernels=kernels)
  facts = files.read_json(tmp_path / 'answers/facts.json')
  assert facts['dtype'] == target.arithmetic != 'float32'
  plain = distillation.dequantised(target)
  assert plain.dtype == plain.config.activations == 'float32'
  for name, x in convert.plain(target.config, target.params)[1].items():
    np.testing.assert_array_equal(lm.flatten(plain.params)[name], x)
  draft, options = 'eagle', {'source': figures['draft']}
  if student:
    draft, options = 'lm', {'source': str(tmp_path / 'run/draft.safetensors')}
  runs.assert_decodes_as_plain(draft, target, draft_options=options)


def test_a_quantised_teacher_on_a_mesh_is_dequantised_where_it_lies():
  mesh = sharding.make_mesh(2, 2)
  one, several = (
    build.load('random:tiny', dtype='int8', mesh=x, kernels='xla')
    for x in (None, mesh)
  )
  flat = lm.flatten(distillation.dequantised(one).params)
  found = distillation.dequantised(several)
  for name, x in lm.flatten(found.params).items():
    np.testing.assert_array_equal(x, flat[name], err_msg=name)
    assert x.sharding == found.layout.parameter(name, x.ndim)
