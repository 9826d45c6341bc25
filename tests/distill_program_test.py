"""From a config to a draft that decodes; what configs may not say."""

import json

import pytest

from configs import distill
from specdec_jax import api, build, distill_program
from specdec_jax.io import eagles

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
  settings = distill_program.settings(config(**changes))
  figures = distill_program.run(settings, tmp_path / 'run')
  lines = (tmp_path / 'run/metrics.jsonl').read_text().splitlines()
  return figures, [json.loads(line) for line in lines]


def test_an_eagle_is_trained_judged_written_and_decodes(tmp_path, monkeypatch):
  figures, lines = a_run(tmp_path, monkeypatch)
  losses = {x['step']: x['loss'] for x in lines if 'loss' in x}
  assert sorted(losses) == [1, 2, 3, 4] and losses[4] < losses[1]
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
    ('student', dict(kind='lm', layers=(0,)), 'vocabulary=256: an lm'),
    ('data', dict(said='me'), "said='me': allowed are text, teacher"),
    ('data', dict(said='text'), 'no answers of their own'),
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
    distill_program.settings(config(**{section: changes}))


def test_refuses_unknown_keys_and_sections():
  c = config()
  with c.unlocked():
    c.loss.gama = 1
  with pytest.raises(ValueError, match='config.loss: .*gama'):
    distill_program.settings(c)
  with c.unlocked():
    del c['loss']
  with pytest.raises(ValueError, match='config sections'):
    distill_program.settings(c)


def test_refuses_more_prompts_than_the_text_has(tmp_path):
  (tmp_path / 'short.txt').write_text('a few words\n' * 20)
  s = distill_program.settings(
    config(data=dict(source=str(tmp_path / 'short.txt'), length=32))
  )
  with pytest.raises(
    ValueError, match='data.prompts=8 and held_out=2: .* rows'
  ):
    distill_program.ask(s.data, build.load('random:tiny'))


def test_refuses_layers_that_the_teacher_has_not(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match=r'taps=\(7,\)'):
    a_run(tmp_path, monkeypatch, student=dict(taps=(7,)))
