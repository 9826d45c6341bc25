"""From a config to a draft that decodes; what configs may not say."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import distill
from specdec_jax import api, build, requests
from specdec_jax.analysis import output_file
from specdec_jax.bench import metrics
from specdec_jax.distill import distillation, students
from specdec_jax.distill import prompts as prompts_lib
from specdec_jax.io import checkpoint, eagles, export, files
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import text

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')


def config(**changes):
  c = distill.get_config('tiny')
  few = dict(
    data=dict(prompts=8, held_out=2, length=192, batch=10),
    batch=dict(rows=4),
    run=dict(steps=4, checkpoint_every=2, evaluate_every=2, log_every=1),
    judge=dict(gamma=2, new_tokens=6),
  )
  for section, values in [*few.items(), *changes.items()]:
    for name, value in values.items():
      with c.unlocked():
        c[section][name] = value
  return c


def a_run(tmp_path, monkeypatch, **changes):
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path / 'cache'))
  settings = distillation.settings(config(**changes))
  figures = distillation.run(settings, tmp_path / 'run')
  lines = (tmp_path / 'run/metrics.jsonl').read_text().splitlines()
  return figures, [json.loads(line) for line in lines]


@pytest.fixture(scope='module')
def eagle_run(tmp_path_factory):
  """(its folder, figures, lines of metrics) of a run of eight steps."""
  folder = tmp_path_factory.mktemp('eagle')
  with pytest.MonkeyPatch.context() as patch:
    figures, lines = a_run(folder, patch, run=dict(steps=8, evaluate_every=4))
  return folder, figures, lines


def test_an_eagle_is_trained_judged_written_and_decodes(eagle_run):
  _, figures, lines = eagle_run
  losses = {x['step']: x['loss'] for x in lines if 'loss' in x}
  assert sorted(losses) == list(range(1, 9)) and losses[8] < losses[1]
  judged = {x['step']: x for x in lines if 'block_efficiency' in x}
  best = max(judged, key=lambda step: judged[step]['block_efficiency'])
  assert figures['step'] == best
  assert figures['block_efficiency'] == judged[best]['block_efficiency']
  draft = eagles.read(figures['draft'])
  assert len(draft.ids) == 256 and json.loads(draft.about['step']) == best
  target = build.load('random:tiny')
  of = lambda **options: api.generate(
    target, ['Hello'], max_new_tokens=8, **options
  )[0]
  options = dict(
    draft='eagle', gamma=2, draft_options={'path': figures['draft']}
  )
  assert of(**options).tokens == of().tokens


def test_masters_stay_float32_where_the_teacher_is_not(tmp_path, monkeypatch):
  figures, lines = a_run(
    tmp_path,
    monkeypatch,
    teacher=dict(dtype='bfloat16'),
    student=dict(dtype='bfloat16'),
  )
  losses = [x['loss'] for x in lines if 'loss' in x]
  assert losses[-1] < losses[0] and figures['block_efficiency'] >= 1
  saved = checkpoint.read_manifest(tmp_path / 'run/checkpoints/4').leaves
  kinds = {x[0] for name, x in saved.items() if 'step' not in name}
  assert 'bfloat16' not in kinds and 'float32' in kinds, kinds


def test_other_models_begin_another_run(eagle_run, tmp_path):
  _, figures, _ = eagle_run
  config_ = json.loads(eagles.read(figures['draft']).about['config'])
  digest = build.load('random:tiny').digest
  assert config_['read'] == {'teacher': digest}
  size, words = model_config.sized('tiny'), build.load('random:tiny').tokenizer
  paths = [tmp_path / name for name in ('teacher', 'student')]
  seeds = [0, 0]

  def read(**student):
    for path, seed in zip(paths, seeds, strict=True):
      export.save(path, size, lm.init(size, seed), words, overwrite=True)
    c = config(teacher=dict(source=str(paths[0])), student=student)
    return distillation._read(distillation.settings(c))

  own = dict(kind='lm', vocabulary=0, share=False, path=str(paths[1]))
  before = read(**own)
  for i, name in enumerate(('teacher', 'student')):
    seeds[i] = 1
    now = read(**own)
    assert {x for x in now if now[x] != before[x]} == {name}
    seeds[i] = 0
  draft = read(path=figures['draft'])['student']
  assert draft == files.sha256(pathlib.Path(figures['draft']))


@pytest.mark.parametrize(
  ('keep', 'taps'),
  [((1, 0), (1,)), ((0,), (0,)), ((1,), (0, 1)), ((1, 2), (1,)), ((), (9, 29))],
)
def test_what_is_kept_has_what_is_read(keep, taps, tmp_path, monkeypatch):
  name = 'data.keep' if taps[-1] == 1 else 'student.taps'
  wanted = rf'{name}=\(.*: want layers of the teacher, 0 to 1, in increasing'
  with pytest.raises(ValueError, match=wanted):
    a_run(tmp_path, monkeypatch, student=dict(taps=taps), data=dict(keep=keep))
  assert not (tmp_path / 'cache').exists()


@pytest.mark.parametrize('said', ['student', 'mixed'])
def test_what_a_student_says_is_not_kept(said):
  own = dict(kind='lm', size='tiny', share=False)
  data = dict(said=said, keep=(1,))
  with pytest.raises(ValueError, match=r'keep=\(1,\): what a student says'):
    distillation.settings(config(student=own, data=data))


def test_an_lm_learns_from_a_record_what_its_teacher_would_say(
  tmp_path, monkeypatch
):
  """Of a text, some ids. The teacher reads it just once."""
  path = tmp_path / 'words.txt'
  path.write_text('What does the young sailor say about rivers? ' * 60)
  data = dict(source=str(path), prompt_tokens=8, length=24, said='text')
  own, ends = dict(kind='lm', layers=(0,), vocabulary=64), []
  for keep in ((), (0, 1)):
    _, lines = a_run(
      tmp_path / str(len(keep)),
      monkeypatch,
      student=own,
      data=data | dict(keep=keep),
    )
    ends.append([x['loss'] for x in lines if 'loss' in x])
  assert ends[0] != ends[1] and len(ends[0]) == 4
  np.testing.assert_allclose(*ends, rtol=2e-3)


def on_a_mesh(tmp_path, monkeypatch, **changes):
  """a_run on four devices, where what is trained and read lies."""
  judged = distillation.judged

  def on_four(s, target, student, prompts):
    judge = judged(s, target, student, prompts)

    def figures(params):
      for x in jax.tree.leaves((params, student.frozen)):
        assert len(x.sharding.device_set) == 4
      return judge(params)

    return figures

  monkeypatch.setattr(distillation, 'judged', on_four)
  mesh = dict(data=2, model=2)
  return a_run(tmp_path, monkeypatch, mesh=mesh, **changes)


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
  # The rows are split of what the teacher answers, and of what is judged.
  assert len(placed) == 2 and None not in placed


@pytest.mark.slow
def test_an_lm_learns_the_same_on_a_mesh(tmp_path, monkeypatch):
  own = dict(kind='lm', layers=(1,))
  data = dict(keep=(1,), folder=str(tmp_path / 'answers'))
  _, alone = a_run(tmp_path / '1', monkeypatch, student=own, data=data)
  _, found = on_a_mesh(tmp_path / '4', monkeypatch, student=own, data=data)
  of = lambda lines: [x['loss'] for x in lines if 'loss' in x]
  np.testing.assert_allclose(of(found), of(alone), rtol=1e-3)


@pytest.mark.slow
def test_an_lm_speaks_on_a_mesh(tmp_path, monkeypatch):
  own = dict(kind='lm', size='tiny', share=False, vocabulary=0)
  figures, lines = on_a_mesh(
    tmp_path, monkeypatch, student=own, data=dict(said='student', refresh=2)
  )
  assert figures['finished'] and sum('loss' in x for x in lines) == 4


def test_only_what_follows_a_prompt_is_counted():
  target = build.load('random:tiny')
  own = dict(kind='lm', size='tiny', share=False, vocabulary=1)
  data = dict(said='text', prompts=3, prompt_tokens=8, length=12)
  data |= dict(source='stdlib:prose')
  s = distillation.settings(config(student=own, data=data))
  texts = np.array([[5] * 8 + [7] * 4] * 5)
  asked = prompts_lib.Asked([[5] * 8] * 5, texts)
  assert distillation.vocabulary(s, target, asked, None).tolist() == [7]


@pytest.mark.parametrize(
  ('section', 'key'),
  [('batch', 'rows'), ('data', 'batch'), ('data', 'held_out')],
)
def test_a_mesh_divides_its_rows(section, key):
  with pytest.raises(ValueError, match=f'{section}.{key}=9: mesh.data=2 has'):
    distillation.settings(config(mesh=dict(data=2), **{section: {key: 9}}))


def test_a_student_shares_as_its_teacher_does():
  target = build.load('random:tiny')
  s = distillation.settings(
    config(student=dict(kind='lm', size='tiny', share=True, vocabulary=0))
  ).student
  for tied in (True, False):
    own = dataclasses.replace(target.config, tied=tied)
    teacher = dataclasses.replace(target, config=own, params=lm.init(own, 3))
    config_, params = students._first(s, teacher, 0, None)
    assert config_.tied == tied
    for name in {'embed', 'head'} & params.keys():
      np.testing.assert_array_equal(params[name], teacher.params[name])


def test_several_processes_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr('jax.process_count', lambda: 2)
  with pytest.raises(ValueError, match='2 processes: .* by one'):
    a_run(tmp_path, monkeypatch)


def test_an_eagle_learns_from_a_text(tmp_path, monkeypatch):
  own = dict(source='stdlib:prose', said='text', length=32, prompt_tokens=8)
  figures, lines = a_run(
    tmp_path, monkeypatch, data=own, run=dict(steps=8, checkpoint_every=8)
  )
  losses = [x['loss'] for x in lines if 'loss' in x]
  assert losses[-1] < losses[0] and figures['finished']
  (facts,) = (tmp_path / 'cache/answers').glob('*/facts.json')
  assert json.loads(facts.read_text())['temperatures'] == []
  tokens = np.load(facts.with_name('tokens.npy'))
  s = distillation.settings(config(data=own))
  wanted = prompts_lib.ask(s.data, build.load('random:tiny')).texts
  np.testing.assert_array_equal(tokens, wanted)


def test_an_eagle_goes_on_from_another(eagle_run, tmp_path, monkeypatch):
  folder, first, lines = eagle_run
  path = first['draft']
  # Of other questions: their commonest ids are others, and the path's stay.
  more = dict(data=dict(prompts=8, held_out=2, length=192, batch=10, seed=5))
  second, on = a_run(
    tmp_path / 'two', monkeypatch, student=dict(path=path), **more
  )
  begin = lambda lines: next(x['loss'] for x in lines if 'loss' in x)
  assert begin(on) < begin(lines) - 0.1
  one, two = eagles.read(path), eagles.read(second['draft'])
  np.testing.assert_array_equal(one.ids, two.ids)
  for why, student in (
    (r'reads layers \(1,\) and proposes 256 ids', dict(vocabulary=64)),
    ('not a file of', dict(path=str(folder / 'run/config.json'))),
    ('no such file', dict(path='nowhere')),
  ):
    with pytest.raises(ValueError, match=why):
      a_run(tmp_path / 'three', monkeypatch, student=dict(path=path) | student)
  assert not (tmp_path / 'three/cache').exists()


def test_a_language_model_learns_from_both_and_is_exported(
  tmp_path, monkeypatch
):
  figures, _ = a_run(
    tmp_path,
    monkeypatch,
    student=dict(kind='lm', layers=(1,), vocabulary=0),
    data=dict(
      source='stdlib:prose', said='mixed', length=32, prompt_tokens=8, refresh=2
    ),
  )
  assert sorted(p.name for p in (tmp_path / 'run/said').iterdir()) == [
    '0.npz',
    '2.npz',
  ]
  target, draft = build.load('random:tiny'), build.load(figures['draft'])
  assert draft.config.depth == 1
  (one,) = api.generate(target, ['Hello'], draft=draft, max_new_tokens=8)
  (plain,) = api.generate(target, ['Hello'], max_new_tokens=8)
  assert one.tokens == plain.tokens


@pytest.mark.parametrize('share', [True, False])
def test_a_language_model_may_propose_the_commonest_ids_only(
  share, tmp_path, monkeypatch
):
  figures, lines = a_run(
    tmp_path,
    monkeypatch,
    student=dict(kind='lm', layers=(1,), vocabulary=64, share=share),
    data=dict(
      source='stdlib:prose', said='text', length=32, prompt_tokens=8, prompts=16
    ),
    run=dict(steps=8, checkpoint_every=8, evaluate_every=8),
  )
  losses = [x['loss'] for x in lines if 'loss' in x]
  assert losses[-1] < losses[0]
  target, draft = build.load('random:tiny'), build.load(figures['draft'])
  config, params = draft.as_draft
  assert len(config.proposes) == 64 and params['head'].shape == (64, 64)
  # Others have the teacher's columns, for who knows no such draft.
  own, theirs = (np.asarray(x.params['head']) for x in (draft, target))
  rest = np.setdiff1d(np.arange(target.config.vocab), config.proposes)
  np.testing.assert_array_equal(own[:, rest], theirs[:, rest])
  few = list(config.proposes)
  assert share == np.array_equal(own[:, few], theirs[:, few])
  engine = build.engine(target, draft, gamma=2)
  text = requests.encode(target.tokenizer, 'Hello', chat=False)
  request = requests.make(
    requests.items([text]),
    ids=target.ids,
    context=99,
    max_new_tokens=9,
    gamma=2,
  )
  out = engine.programs.generate(engine.weights, request)
  plain = build.engine(target, gamma=0)
  same = plain.programs.generate(plain.weights, request)
  np.testing.assert_array_equal(out.tokens_BL, same.tokens_BL)
  # What its q is, it was judged by.
  q_V = engine.q.head(params, jnp.ones((1, 1, 64)))[0, 0]
  assert np.flatnonzero(np.isfinite(q_V)).tolist() == few


def test_more_ids_than_there_are_are_refused_at_once(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match='student.vocabulary=9999: the teacher'):
    a_run(tmp_path, monkeypatch, student=dict(vocabulary=9999))
  assert not (tmp_path / 'cache').exists()


def test_what_a_student_will_say_cannot_be_counted(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match='student.vocabulary=64: what .*mixed'):
    a_run(
      tmp_path,
      monkeypatch,
      student=dict(kind='lm', layers=(1,), vocabulary=64),
      data=dict(said='student'),
    )


def test_a_teacher_in_bfloat16_leaves_a_student_in_float32(
  tmp_path, monkeypatch
):
  figures, _ = a_run(
    tmp_path,
    monkeypatch,
    teacher=dict(dtype='bfloat16'),
    student=dict(kind='lm', vocabulary=0, dtype='bfloat16', layers=(1,)),
    data=dict(source='stdlib:prose', said='text', length=32, prompt_tokens=8),
    run=dict(steps=2),
  )
  assert figures['finished']
  saved = checkpoint.read_manifest(tmp_path / 'run/checkpoints/2').leaves
  kinds = {x[0] for x in saved.values()}
  assert 'bfloat16' not in kinds and 'float32' in kinds, kinds


def test_an_lm_reads_no_taps():
  with pytest.raises(ValueError, match=r'taps=\(1,\) given for an lm'):
    distillation.settings(
      config(student=dict(kind='lm', size='tiny', share=False, taps=(1,)))
    )


def test_a_draft_of_some_ids_goes_on_with_them(tmp_path, monkeypatch):
  target, size = build.load('random:tiny'), model_config.sized('tiny')
  folder, ids = tmp_path / 'few', (1, 2)
  params = lm.init(size, 0)
  export.save(folder, size, params, target.tokenizer, draft_ids=ids)
  begin = lambda vocabulary: a_run(
    tmp_path,
    monkeypatch,
    student=dict(
      kind='lm', vocabulary=vocabulary, share=False, path=str(folder)
    ),
    data=dict(source='stdlib:prose', said='text', length=32, prompt_tokens=8),
    run=dict(steps=2),
    optimiser=dict(learning_rate=1e-9, warmup=0),
  )
  with pytest.raises(ValueError, match='proposes 2 ids; set student.vocab'):
    begin(3)
  # It learns next to nothing: the same model with the same ids.
  again = build.load(begin(2)[0]['draft'])
  assert again.draft_ids == ids
  np.testing.assert_allclose(again.params['head'], params['head'], atol=1e-6)
  # Another draft than the same weights with all ids, and held beside them.
  few = build.load(folder)
  whole = dataclasses.replace(few, draft_ids=())
  assert output_file.identify('x', few) != output_file.identify('x', whole)
  both = metrics.own_bytes((few.as_draft[1], few.params), {})
  size = metrics.tree_bytes(few.params)
  assert size < both < size + metrics.tree_bytes(few.params['head']) * 1.1
  monkeypatch.setattr('specdec_jax.io.hub.fetch', lambda source: folder)
  assert build.load('hf:org/few').draft_ids == ids
  mark = folder / export.MARK
  mark.write_text(mark.read_text().replace('2', '9999'))
  own = dict(kind='lm', vocabulary=2, share=False, path=str(folder))
  with pytest.raises(ValueError, match='few/specdec_jax.json: its draft_ids'):
    assert build.load(folder).as_draft
  with pytest.raises(ValueError, match='few/specdec_jax.json: its draft_ids'):
    students.begin(distillation.settings(config(student=own)).student, target)


def test_a_damaged_list_of_ids_is_refused(tmp_path):
  (tmp_path / export.MARK).write_text('{"draft_ids": [1, "2"]}')
  with pytest.raises(ValueError, match='draft_ids is no list of ids'):
    export.draft_ids(tmp_path)


@pytest.mark.parametrize(
  ('section', 'changes', 'why'),
  [
    ('teacher', dict(source=''), "teacher.source=''"),
    ('student', dict(kind='medusa'), "student.kind='medusa': .* eagle, lm"),
    ('student', dict(kind='lm', vocabulary=0), 'nothing given for an lm'),
    (
      'student',
      dict(kind='lm', vocabulary=0, size='tiny', layers=(0,)),
      'size and layers given',
    ),
    ('student', dict(dtype='bfloat16'), "the dtype of its teacher, 'float32'"),
    ('student', dict(remat=True), 'one layer of an eagle needs none'),
    ('student', dict(layers=(0,)), 'size or layers given for an eagle'),
    (
      'student',
      dict(kind='lm', vocabulary=0, path='x'),
      'of a path has an embedding .* share=False',
    ),
    ('data', dict(said='me'), "said='me': allowed are text, teacher"),
    ('data', dict(said='text'), 'no answers of their own'),
    ('data', dict(said='text', source='x', chat=True), 'no answers of their'),
    ('data', dict(said='student'), 'an eagle learns from features'),
    ('data', dict(prompts=0), 'data.prompts=0'),
    ('data', dict(prompt_tokens=192), 'data.prompt_tokens=192'),
    ('data', dict(temperatures=()), 'data.temperatures='),
    ('judge', dict(gamma=0), 'judge.gamma=0'),
    ('optimiser', dict(learning_rate=0.0), 'optimiser.learning_rate=0.0'),
    ('run', dict(steps=0), 'run.steps=0'),
    ('loss', dict(unroll=0), 'loss.unroll=0'),
  ],
)
def test_refuses_settings(section, changes, why):
  with pytest.raises(ValueError, match=why):
    distillation.settings(config(**{section: changes}))


def test_refuses_unknown_keys_and_sections():
  c = config()
  with c.unlocked():
    c.loss.gama = 1
  with pytest.raises(ValueError, match='loss.gama=1: no such setting'):
    distillation.settings(c)
  with c.unlocked():
    del c['loss']
  with pytest.raises(ValueError, match='config sections'):
    distillation.settings(c)


def test_refuses_more_prompts_than_the_text_has(tmp_path):
  (tmp_path / 'short.txt').write_text('a few words\n' * 20)
  s = distillation.settings(
    config(data=dict(source=str(tmp_path / 'short.txt'), length=32))
  )
  with pytest.raises(
    ValueError, match='data.prompts=8 and held_out=2: .* rows'
  ):
    prompts_lib.ask(s.data, build.load('random:tiny'))


def test_ones_own_questions_go_through_the_chat_template(tmp_path):
  asked = [f'what is {i}?' for i in range(12)] + ['why ' * 200]
  path = tmp_path / 'mine.jsonl'
  path.write_text('\n'.join(json.dumps({'prompt': x}) for x in asked))
  own = dict(source=str(path), field='prompt', chat=True, length=64)
  s = distillation.settings(config(data=own))
  target = build.load('random:tiny')
  prompts, texts = prompts_lib.ask(s.data, target)
  assert texts is None and len(prompts) == 10
  known = [requests.encode(target.tokenizer, x, chat=True) for x in asked[:12]]
  assert all(x in known for x in prompts)
  assert len({tuple(x) for x in prompts}) == 10
  assert prompts_lib.ask(s.data, target).prompts == prompts
  s = distillation.settings(config(data=own | dict(prompts=11)))
  with pytest.raises(ValueError, match='has 12 questions shorter .* of 13'):
    prompts_lib.ask(s.data, target)


TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


def asker(template, **options):
  target = build.load('random:tiny', **options)
  own = dataclasses.replace(target.tokenizer, chat_template=template)
  return dataclasses.replace(target, tokenizer=own)


def test_a_teacher_asks_its_own_questions(tmp_path, monkeypatch):
  own = dict(source='magpie', prompt_tokens=24, length=64, batch=64)
  s = distillation.settings(
    config(data=own | dict(folder=str(tmp_path / 'one')))
  )
  target = asker(TEMPLATE)
  prompts, texts = prompts_lib.ask(s.data, target)
  assert texts is None and len(prompts) == 10
  words = [target.tokenizer.decode(x) for x in prompts]
  assert len(set(words)) == 10
  # Each ended by itself, after at most 24 ids, in the place of the user.
  assert all(x[0] == '<' and x[-1] == '>' and x[1:-1].strip() for x in words)
  said = np.load(tmp_path / 'one/questions/0/tokens.npy')
  spans = np.load(tmp_path / 'one/questions/0/spans.npy')
  assert (spans[:, 0] == 1).all() and spans.max() <= 25
  ended = said[np.arange(len(said)), spans[:, 1] - 1]
  ended = np.isin(ended, target.tokenizer.eos_ids)
  assert 10 <= ended.sum() < len(said)
  # Those of a teacher that computes otherwise are others.
  with pytest.raises(ValueError, match='holds answers with other dtype;'):
    prompts_lib.ask(s.data, asker(TEMPLATE, dtype='bfloat16'))
  # The batch changes none, more are the same and then more, a seed all.
  again = dataclasses.replace(s.data, folder=str(tmp_path / 'two'), batch=256)
  assert prompts_lib.ask(again, target).prompts == prompts
  more = dataclasses.replace(s.data, prompts=int(ended.sum()) + 20)
  longer = prompts_lib.ask(more, target).prompts
  assert longer[:10] == prompts and len(longer) == more.prompts + 2
  other = dataclasses.replace(again, folder=str(tmp_path / 'three'), seed=1)
  assert not set(map(tuple, prompts_lib.ask(other, target).prompts)) & set(
    map(tuple, longer)
  )


@pytest.mark.parametrize(
  ('template', 'changes', 'why'),
  [
    (None, {}, 'tiny .random weights. has no chat template'),
    ('always the same', {}, 'leaves out what a user says'),
    (TEMPLATE, dict(prompt_tokens=63), 'must be above prompt_tokens=63 and 1'),
    (TEMPLATE, dict(prompt_tokens=1), 'only 0 of 10 questions; the last 256'),
  ],
)
def test_a_teacher_that_cannot_ask(template, changes, why, tmp_path):
  own = dict(source='magpie', length=64, folder=str(tmp_path))
  s = distillation.settings(config(data=own | changes))
  with pytest.raises(ValueError, match=why):
    prompts_lib.ask(s.data, asker(template))


def test_a_student_of_another_tokenizer_is_refused(tmp_path, monkeypatch):
  corpus = text.Corpus('x', ('some words, then some more words',), '')
  other = text.train_tokenizer(corpus, 260, tmp_path / 'tokenizer')
  size = model_config.sized('tiny')
  export.save(tmp_path / 'student', size, lm.init(size, 0), other)
  own = dict(kind='lm', vocabulary=0, share=False)
  with pytest.raises(ValueError, match='have different tokenizers: id '):
    a_run(
      tmp_path,
      monkeypatch,
      student=own | dict(path=str(tmp_path / 'student')),
      data=dict(source='stdlib:prose', said='text', length=32, prompt_tokens=8),
    )


@pytest.mark.parametrize(
  ('student', 'scan'), [(dict(layers=(1,)), False), (dict(size='tiny'), None)]
)
def test_a_teacher_gives_its_layers_one_by_one(
  student, scan, tmp_path, monkeypatch
):
  def load(source, **options):
    raise ValueError(f'asked for {options["scan_layers"]}')

  monkeypatch.setattr(build, 'load', load)
  own = dict(kind='lm', vocabulary=0, share=False) | student
  with pytest.raises(ValueError, match=f'asked for {scan}'):
    a_run(tmp_path, monkeypatch, student=own)


def test_refuses_layers_that_the_teacher_has_not(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match=r'taps=\(7,\)'):
    a_run(tmp_path, monkeypatch, student=dict(taps=(7,)))
