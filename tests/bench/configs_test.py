"""Every config builds at :tiny; what is wrong with one is said before work."""

import dataclasses
import importlib
import pathlib
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from specdec_jax import build, decode, settings
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts
from specdec_jax.distill import distillation
from specdec_jax.train import train_lm
from tests import programs

FOLDER = pathlib.Path(__file__).parents[2] / 'configs'
# Of these the programs have settings of their own.
TRAINING = {
  'train_lm': train_lm,
  'train_t5': train_lm,
  'distill': distillation,
  'distill_t5': distillation,
}
OTHERS = ('default', '__init__', *TRAINING)
NAMES = sorted(p.stem for p in FOLDER.glob('*.py') if p.stem not in OTHERS)


def config(name: str, size: str = 'tiny'):
  return importlib.import_module(f'configs.{name}').get_config(size)


@pytest.mark.parametrize('name', NAMES)
def test_builds_at_tiny(name):
  e = settings.load(settings.settings(config(name)))
  arms = plan_lib.arms(e, measure=False)
  assert arms[0].engine.drafter is decode.PLAIN
  assert {arm.drafter for arm in arms[1:]} == set(e.settings.decode.methods)
  named = [(arm.drafter, arm.gamma) for arm in arms]
  assert len(named) == len({*named}) >= 1 + len(e.settings.decode.methods)
  for arm in arms[1:]:
    assert arm.engine.drafter.gamma >= arm.gamma > 0
    if arm.drafter == 'lm':
      # The drafter's own function, or it would be compiled again.
      assert arm.engine.q is arm.engine.draft.draft_model(e.target)
  plan = plan_lib.make(e, prompts.builtin())
  assert {i.id for i in plan.test}.isdisjoint(i.id for i in plan.calibration)


# What random models of another size need; the rest is the path.
SIZES = {
  *('target.source', 'draft.source', 'eagle.source'),
  *('decode.gammas', 'decode.max_new_tokens', 'bench.repeats', 'bench.small'),
  *('bench.prompts_per_category', 'bench.prompt_tokens'),
}


@pytest.mark.parametrize('name', NAMES)
def test_tiny_is_the_same_path(name):
  flat = lambda size: {
    f'{section}.{key}': value
    for section, keys in config(name, size).items()
    for key, value in keys.items()
  }
  full, tiny = flat('full'), flat('tiny')
  assert full.keys() == tiny.keys()
  differing = {key for key in full if full[key] != tiny[key]}
  assert differing <= SIZES
  for key in differing:
    if key.endswith('.source'):
      assert tiny[key].startswith('random'), key
      assert full[key] or name == 'pair', key


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_tiny_runs(name):
  # A minute is refused where compiling is guessed to take longer: t5's here
  # takes 53 s of two busy cores, and its guess is 66.
  done = programs.run(
    'scripts/bench.py', f'--config=configs/{name}.py:tiny', '--minutes=0'
  ).check()
  methods = config(name).decode.methods
  assert {x['drafter'] for x in done.document['rows'][1:]} == set(methods)


@pytest.mark.slow
def test_a_reference_is_measured_beside_the_benchmark():
  done = programs.run(
    'scripts/bench.py',
    '--config=configs/pair.py:tiny',
    "--config.decode.methods=('lookup',)",
    '--config.bench.prompts_per_category=1',
    '--config.decode.max_new_tokens=8',
    '--minutes=0',
    '--reference=random:tiny:3',
  ).check()
  away = done.document['distance']
  assert away['dtype'] == 'float32' and away['total_variation'] > 0.1
  # All prompts, of 64 tokens at most, and not only those that are judged.
  assert 7 * 32 < away['tokens'] <= 14 * 63
  assert 'exact as it is stored. From tiny' in ' '.join(done.out.split())


def test_a_draft_with_another_padding_has_the_targets_width():
  target, draft = (build.load(f'random:tiny{x}') for x in ('', ':1'))
  size = draft.config.vocab
  padded = dataclasses.replace(draft.config, vocab=size + 64)
  draft = dataclasses.replace(draft, lm_config=padded)
  assert draft.draft_model(target).vocab == size


@pytest.mark.parametrize('name', NAMES)
def test_full_settings_are_valid(name):
  c = config(name, 'full')
  if name == 'pair':
    with pytest.raises(ValueError, match='target.source'):
      settings.settings(c)
    c.target.source = c.draft.source = 'hf:org/name'
  settings.settings(c)


@pytest.mark.parametrize('name', TRAINING)
@pytest.mark.parametrize('size', ('full', 'tiny'))
def test_settings_of_training_are_valid(name, size):
  TRAINING[name].settings(config(name, size))
  with pytest.raises(ValueError, match="'huge': allowed are full, tiny"):
    config(name, 'huge')


def test_unknown_size_and_key():
  with pytest.raises(ValueError, match='allowed are full, tiny'):
    config('pair', 'small')
  c = config('pair').unlock()
  c.decode.extra = 1
  with pytest.raises(ValueError, match='extra'):
    settings.settings(c)


@pytest.mark.parametrize(
  'section, key, value, said',
  [
    ('decode', 'methods', ('lm', 'hydra'), "methods='hydra': allowed are"),
    ('decode', 'methods', ('no.py:make',), 'importing no.py failed: FileNot'),
    # What --config.decode.methods=lm,lookup is read as.
    (
      'decode',
      'methods',
      ('lm,lookup',),
      r"""methods=\('lm,lookup',\): must be a tuple .*"\('one', 'two'\)" """,
    ),
    ('target', 'source', '', 'target.source'),
    (
      'decode',
      'methods',
      ('ngram',),
      "has 'ngram', but ngram.source is empty: .*ngram.py",
    ),
  ],
)
def test_bad_value_is_named(section, key, value, said):
  c = config('pair')
  c[section][key] = value
  with pytest.raises(ValueError, match=said):
    settings.settings(c)


def test_a_single_value_on_the_command_line_is_a_tuple_of_one(monkeypatch):
  argv = ['', '--config.decode.methods=lookup', '--config.decode.gammas=5']
  monkeypatch.setattr(sys, 'argv', argv)
  values = flags.FlagValues()
  config_flags.DEFINE_config_dict('config', config('pair'), flag_values=values)
  values(argv)
  decode = settings.settings(values.config).decode
  assert (decode.methods, decode.gammas) == (('lookup',), (5,))


def test_a_conversation_is_measured_as_it_is_answered():
  e = settings.load(settings.settings(config('smollm2')))
  chat = [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'Hi'},
  ]
  plan = plan_lib.make(e, [prompts.Prompt('talk', messages=tuple(chat))])
  (item,) = plan.test + plan.calibration
  want = e.target.tokenizer.encode_chat(chat)
  assert item.tokens == want[-e.settings.bench.prompt_tokens :]
