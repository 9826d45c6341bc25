"""What a folder tells of the run that was begun in it."""

import dataclasses

import pytest

from specdec_jax.io import files
from specdec_jax.train import logs, runner

CONFIG = {
  'model': {'size': 'tiny'},
  'data': {'keep': 1, 'taps': (1, 2)},
  'run': {'steps': 3, 'keep': 1, 'seed': 0},
}
FIXED = ('model', 'run.seed')


def config(**changes):
  """CONFIG with section__key=value changed."""
  out = {name: dict(section) for name, section in CONFIG.items()}
  for name, value in changes.items():
    section, _, key = name.partition('__')
    out[section][key] = value
  return out


def test_a_run_is_begun_once(tmp_path):
  folder = tmp_path / 'new' / 'run'
  assert not runner.open_run(folder, CONFIG)
  assert not runner.open_run(folder, config(run__steps=4))  # nothing done yet
  logs.write_json(folder / 'config.json', CONFIG)
  assert runner.open_run(folder, CONFIG)
  assert files.read_json(folder / 'config.json')['data']['taps'] == [1, 2]


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(run__steps=4, data__keep=2), 'of data.keep, run.steps; .*--changed'),
    (dict(run__seed=1), 'other values of run.seed, which cannot change'),
    (
      dict(model__size='x', run__steps=4, run__seed=1),
      'other values of model.size, run.seed, which cannot change',
    ),
  ],
)
def test_other_settings_are_refused_by_their_keys(tmp_path, changes, message):
  logs.write_json(tmp_path / 'config.json', CONFIG)
  again = lambda changed: runner.open_run(
    tmp_path, config(**changes), changed=changed, fixed=FIXED
  )
  for changed in (False, True):
    if changed and '--changed' in message:
      assert again(changed)
      continue
    with pytest.raises(ValueError, match=message):
      again(changed)


@dataclasses.dataclass(frozen=True)
class Settings:
  run: dict
  optimiser: dict


def test_an_end_without_its_result_is_made_again(tmp_path):
  """And one with its result is not."""
  s = Settings(dict(steps=3), {})
  config = dataclasses.asdict(s) | {'read': {}}
  ended = dict(made='draft', figures={'alpha': 0.5}, config=config)
  logs.write_json(tmp_path / runner.ENDED, ended)

  class Begins(Exception):
    pass

  def prepare(begun):
    raise Begins

  how = dict(result='draft', changed=False, fixed=(), read={})
  with pytest.raises(Begins):
    runner.run(s, tmp_path, prepare, **how)
  (tmp_path / 'draft').write_text('')
  found = runner.run(s, tmp_path, prepare, **how)
  assert found == {'alpha': 0.5, 'draft': str(tmp_path / 'draft')}


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='workdir .*file: cannot be written'):
    runner.open_run(tmp_path / 'file', CONFIG)
