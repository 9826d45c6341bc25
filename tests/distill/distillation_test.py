"""From a config to a draft that decodes; which configs are refused."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import distill
from specdec_jax import api, build, requests
from specdec_jax.distill import distillation
from specdec_jax.drafters import eagle_file
from specdec_jax.io import export, files
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import text

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')
LM = dict(kind='lm', vocabulary=0, share=False, size='tiny')
# A text with few different words, quickly learnt.
PROSE = dict(source='stdlib:prose', length=32, prompt_tokens=8)


def config(**changes):
  c = distill.get_config('tiny').unlock()
  few = dict(
    data=dict(prompts=8, held_out=2, length=192, batch=10),
    batch=dict(rows=4),
    run=dict(steps=4, checkpoint_every=2, evaluate_every=2, log_every=1),
    judge=dict(gamma=2, new_tokens=6),
  )
  for section, values in [*few.items(), *changes.items()]:
    c[section].update(values)
  return c


def a_run(tmp_path, monkeypatch, **changes):
  """(figures, the lines of its metrics)."""
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path / 'cache'))
  settings = distillation.settings(config(**changes))
  figures = distillation.run(settings, tmp_path / 'run')
  lines = (tmp_path / 'run/metrics.jsonl').read_text().splitlines()
  return figures, [json.loads(line) for line in lines]


def losses(lines):
  return [x['loss'] for x in lines if 'loss' in x]


def assert_decodes_as_plain(draft, **options):
  target = build.load('random:tiny')
  of = lambda **more: (
    api.generate(target, ['Hello'], max_new_tokens=8, **more)[0].tokens
  )
  assert of(draft=draft, gamma=2, **options) == of()


@pytest.fixture(scope='module')
def eagle_run(tmp_path_factory):
  """(its folder, figures, lines of metrics) of a run of eight steps."""
  folder = tmp_path_factory.mktemp('eagle')
  with pytest.MonkeyPatch.context() as patch:
    figures, lines = a_run(folder, patch, run=dict(steps=8, evaluate_every=4))
  return folder, figures, lines


def test_an_eagle_is_trained_judged_written_and_decodes(eagle_run):
  _, figures, lines = eagle_run
  found = losses(lines)
  assert len(found) == 8 and found[-1] < found[0]
  judged = {x['step']: x for x in lines if 'block_efficiency' in x}
  best = max(judged, key=lambda step: judged[step]['block_efficiency'])
  assert figures['step'] == best
  assert figures['block_efficiency'] == judged[best]['block_efficiency']
  draft = eagle_file.read(figures['draft'])
  assert len(draft.ids) == 256 and json.loads(draft.about['step']) == best
  assert_decodes_as_plain('eagle', draft_options={'path': figures['draft']})


def test_other_models_begin_another_run(eagle_run, tmp_path):
  _, figures, _ = eagle_run
  config_ = json.loads(eagle_file.read(figures['draft']).about['config'])
  digest = build.load('random:tiny').digest
  assert config_['read'] == {'teacher': digest}
  size, words = model_config.sized('tiny'), build.load('random:tiny').tokenizer
  for seed in range(2):
    export.save(tmp_path / str(seed), size, lm.init(size, seed), words)

  def read(teacher='random:tiny', **student):
    c = config(teacher=dict(source=teacher), student=student)
    return distillation.digests(distillation.settings(c))

  first, second = (LM | dict(size='', path=str(tmp_path / x)) for x in '01')
  before = read(**first)
  for name, now in (
    ('teacher', read('random:tiny:1', **first)),
    ('student', read(**second)),
  ):
    assert {x for x in now if now[x] != before[x]} == {name}
  draft = read(path=figures['draft'])['student']
  assert draft == files.sha256(pathlib.Path(figures['draft']))


def on_a_mesh(tmp_path, monkeypatch, **changes):
  """a_run on four devices, where all that is trained and read must lie; each
  has a fourth of what is trained."""
  make = distillation._task

  def on_four(*args):
    task = make(*args)

    def judge(params):
      for x in jax.tree.leaves((params, task.frozen)):
        assert len(x.sharding.device_set) == 4
      for x in jax.tree.leaves(params):
        assert x.addressable_shards[0].data.size * 4 == x.size or x.ndim == 1
      return task.judge(params)

    return task._replace(judge=judge)

  monkeypatch.setattr(distillation, '_task', on_four)
  mesh = dict(data=2, model=2, fsdp=True)
  return a_run(tmp_path, monkeypatch, mesh=mesh, **changes)


@pytest.mark.slow
def test_a_mesh_changes_nothing(eagle_run, tmp_path, monkeypatch):
  _, figures, lines = eagle_run
  place, placed = requests.place, []

  def spy(request, layout):
    placed.append(layout)
    return place(request, layout)

  monkeypatch.setattr(requests, 'place', spy)
  found = on_a_mesh(tmp_path, monkeypatch, run=dict(steps=8, evaluate_every=4))
  for name in ('loss', 'block_efficiency'):
    want, got = ([x[name] for x in y if name in x] for y in (lines, found[1]))
    assert len(got) == {'loss': 8, 'block_efficiency': 2}[name]
    np.testing.assert_allclose(got, want, rtol=2e-2)
  assert found[0].keys() == figures.keys()
  # The rows of the teacher's answers and of the judge are split.
  assert placed and None not in placed


@pytest.mark.slow
def test_an_lm_learns_the_same_on_a_mesh(tmp_path, monkeypatch):
  own = dict(kind='lm', layers=(1,))
  data = dict(keep=True, folder=str(tmp_path / 'answers'))
  _, alone = a_run(tmp_path / '1', monkeypatch, student=own, data=data)
  _, found = on_a_mesh(tmp_path / '4', monkeypatch, student=own, data=data)
  np.testing.assert_allclose(losses(found), losses(alone), rtol=1e-3)


@pytest.mark.slow
def test_an_lm_answers_on_a_mesh(tmp_path, monkeypatch):
  data = dict(completions='student', refresh=2)
  figures, lines = on_a_mesh(tmp_path, monkeypatch, student=LM, data=data)
  assert figures['finished'] and len(losses(lines)) == 4


@pytest.mark.more
def test_an_eagle_begins_with_another(eagle_run, tmp_path, monkeypatch):
  folder, first, lines = eagle_run
  path = first['draft']
  # The most frequent ids of other questions are others; those of the path stay.
  second, more = a_run(
    tmp_path / 'two',
    monkeypatch,
    student=dict(path=path),
    data=dict(prompts=8, held_out=2, length=192, batch=10, seed=5),
  )
  assert losses(more)[0] < losses(lines)[0] - 0.03
  one, two = eagle_file.read(path), eagle_file.read(second['draft'])
  np.testing.assert_array_equal(one.ids, two.ids)
  for why, student in (
    (r'reads layers \(1,\) and proposes 256 ids', dict(vocabulary=64)),
    ('not a file of', dict(path=str(folder / 'run/config.json'))),
    ('no such file', dict(path='nowhere')),
  ):
    with pytest.raises(ValueError, match=why):
      a_run(tmp_path / 'three', monkeypatch, student=dict(path=path) | student)
  assert not (tmp_path / 'three/cache').exists()


@pytest.mark.more
def test_a_language_model_learns_from_both_and_is_exported(
  tmp_path, monkeypatch
):
  figures, _ = a_run(
    tmp_path,
    monkeypatch,
    student=dict(kind='lm', layers=(1,), vocabulary=0),
    data=PROSE | dict(completions='mixed', refresh=2),
  )
  kept = (tmp_path / 'run/completions').iterdir()
  assert sorted(p.name for p in kept) == ['0.npz', '2.npz']
  draft = build.load(figures['draft'])
  assert draft.config.depth == 1
  assert_decodes_as_plain(draft)


@pytest.mark.slow
def test_an_lm_learns_the_same_from_recorded_features(tmp_path, monkeypatch):
  """Of some ids; then the teacher reads its answers only as it writes them."""
  path = tmp_path / 'words.txt'
  path.write_text('What does the young sailor say about rivers? ' * 60)
  data = dict(source=str(path), prompt_tokens=8, length=24)
  own, ends = dict(kind='lm', layers=(0,), vocabulary=64), []
  for keep in (False, True):
    folder = tmp_path / str(keep)
    figures, lines = a_run(
      folder, monkeypatch, student=own, data=data | dict(keep=keep)
    )
    ends.append(losses(lines))
    kept = list((folder / 'cache/answers').glob('*/features.npy'))
    assert len(kept) == keep
  assert ends[0] != ends[1] and len(ends[0]) == 4
  np.testing.assert_allclose(*ends, rtol=2e-3)
  # A student that shares its teacher's head leaves all of it as it was.
  draft, target = build.load(figures['draft']), build.load('random:tiny')
  np.testing.assert_array_equal(draft.params['head'], target.params['head'])


@pytest.mark.slow
def test_a_language_model_may_propose_the_most_frequent_ids_only(
  tmp_path, monkeypatch
):
  figures, lines = a_run(
    tmp_path,
    monkeypatch,
    student=dict(kind='lm', layers=(1,), vocabulary=64, share=False),
    data=PROSE | dict(completions='text', prompts=16),
    run=dict(steps=8, checkpoint_every=8, evaluate_every=8),
  )
  assert losses(lines)[-1] < losses(lines)[0]
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
  assert_decodes_as_plain(draft)
  # Its q, by which it was judged, has these ids.
  engine = build.engine(target, draft, gamma=2)
  assert engine.q is not None
  q_V = engine.q.head(params, jnp.ones((1, 1, 64)))[0, 0]
  assert np.flatnonzero(np.isfinite(q_V)).tolist() == ids


# --- what is refused ----------------------------------------------------------


@pytest.mark.parametrize(
  ('section', 'changes', 'why'),
  [
    ('teacher', dict(source=''), 'teacher.source is empty: give a model'),
    ('student', dict(kind='medusa'), "student.kind='medusa': .* eagle, lm"),
    ('student', LM | dict(size=''), 'nothing given for an lm'),
    ('student', LM | dict(layers=(0,)), 'size and layers given for an lm'),
    ('student', LM | dict(taps=(1,)), r'taps=\(1,\): an lm reads none'),
    (
      'student',
      LM | dict(size='', path='x', share=True),
      'of a path has its own embedding .* share=False',
    ),
    ('student', dict(dtype='bfloat16'), "the dtype of its teacher, 'float32'"),
    ('student', dict(remat=True), 'remat=True: an eagle is one layer'),
    ('student', dict(layers=(0,)), r'layers=\(0,\): an eagle is one layer'),
    ('data', dict(completions='me'), "completions='me': allowed are text, tea"),
    ('data', dict(completions='text'), 'questions come without answers'),
    (
      'data',
      dict(completions='text', source='x', chat=True),
      'questions come without answers',
    ),
    ('data', dict(completions='student'), 'an eagle learns from features'),
    (
      'data',
      dict(completions='text', source='x'),
      'an eagle learns from features',
    ),
    ('data', dict(completions='mixed', keep=True), 'keep=True: hidden states'),
    ('data', dict(prompts=0), 'data.prompts=0'),
    ('data', dict(prompt_tokens=192), 'data.prompt_tokens=192'),
    ('data', dict(temperatures=()), 'data.temperatures='),
    ('loss', dict(divergence='kl'), "loss.divergence='kl': allowed are forw"),
    ('loss', dict(gama=1), 'loss.gama=1'),
  ],
)
def test_refuses_settings(section, changes, why):
  with pytest.raises(ValueError, match=why):
    distillation.settings(config(**{section: changes}))


@pytest.mark.parametrize(
  ('section', 'key'),
  [('batch', 'rows'), ('data', 'batch'), ('data', 'held_out')],
)
def test_a_mesh_divides_its_rows(section, key):
  with pytest.raises(ValueError, match=f'{section}.{key}=9: mesh.data=2 has'):
    distillation.settings(config(mesh=dict(data=2), **{section: {key: 9}}))


@pytest.mark.parametrize(
  ('student', 'data', 'why'),
  [
    (dict(vocabulary=9999), {}, 'student.vocabulary=9999: the teacher'),
    (
      LM | dict(vocabulary=64),
      dict(completions='student'),
      'student.vocabulary=64: the completions .*mixed',
    ),
    ({}, dict(length=9999), 'data.length=9999: the context of the teacher'),
    (dict(taps=(9, 29)), {}, r'taps=\(9, 29\): needs .* last layer 1'),
    (dict(taps=(1, 0)), {}, r'taps=\(1, 0\): needs .* increasing'),
  ],
)
def test_what_the_teacher_cannot_do_is_refused_before_it_answers(
  student, data, why, tmp_path, monkeypatch
):
  with pytest.raises(ValueError, match=why):
    a_run(tmp_path, monkeypatch, student=student, data=data)
  assert not (tmp_path / 'cache/answers').exists()


def test_a_student_that_does_not_fit_is_refused(tmp_path, monkeypatch):
  corpus = text.Corpus('x', ('some words, then some more words',), '')
  other = text.train_tokenizer(corpus, 260, tmp_path / 'tokenizer')
  own, size = build.load('random:tiny').tokenizer, model_config.sized('tiny')
  short = dataclasses.replace(size, context=16)
  for words, student, why in (
    (other, size, 'have different tokenizers: id '),
    (own, short, 'data.length=32: the context of the student holds 16 tokens'),
  ):
    path = tmp_path / f'student{student.context}'
    export.save(path, student, lm.init(student, 0), words)
    with pytest.raises(ValueError, match=why):
      a_run(
        tmp_path,
        monkeypatch,
        student=LM | dict(size='', path=str(path)),
        data=PROSE | dict(completions='text'),
      )


def test_a_student_that_cannot_be_saved_is_refused(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match='export: only models of the Llama'):
    a_run(
      tmp_path,
      monkeypatch,
      student=LM | dict(size='gpt_6m'),
      data=PROSE | dict(completions='text'),
    )
  assert not (tmp_path / 'run/metrics.jsonl').exists()


@pytest.mark.parametrize(
  ('student', 'scan'), [(dict(layers=(1,), size=''), False), ({}, None)]
)
def test_a_teacher_gives_its_layers_one_by_one(
  student, scan, tmp_path, monkeypatch
):
  def load(source, **options):
    raise ValueError(f'asked for {options["scan_layers"]}')

  monkeypatch.setattr(build, 'load', load)
  with pytest.raises(ValueError, match=f'asked for {scan}'):
    a_run(tmp_path, monkeypatch, student=LM | student)
