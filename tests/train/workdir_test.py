"""What a folder tells of the run that was begun in it."""

import json

import pytest

from specdec_jax.io import files
from specdec_jax.train import workdir

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
  assert not workdir.open_run(folder, CONFIG)
  assert not workdir.open_run(folder, config(run__steps=4))  # nothing done yet
  workdir.write_config(folder, CONFIG)
  assert workdir.open_run(folder, CONFIG)
  assert files.read_json(folder / 'config.json')['data']['taps'] == [1, 2]


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(run__steps=4), 'other values of run.steps; .* by --changed'),
    (dict(data__keep=2), 'other values of data.keep; .* by --changed'),
    (dict(run__seed=1), 'other values of run.seed, which cannot change'),
    (
      dict(model__size='x', run__steps=4, run__seed=1),
      'other values of model.size, run.seed, which cannot change',
    ),
  ],
)
def test_other_settings_are_refused_by_their_keys(tmp_path, changes, message):
  workdir.write_config(tmp_path, CONFIG)
  other = config(**changes)
  free = 'by --changed' in message
  for changed in (False,) if free else (False, True):
    with pytest.raises(ValueError, match=message):
      workdir.open_run(tmp_path, other, changed=changed, fixed=FIXED)
  if free:
    assert workdir.open_run(tmp_path, other, changed=True, fixed=FIXED)


def test_a_run_of_a_version_without_a_key_says_so_and_goes_on(tmp_path):
  workdir.write_config(tmp_path, CONFIG)
  newer = config(model__dropout=0.1)
  message = 'begun by a version without model.dropout; .* by --changed'
  with pytest.raises(ValueError, match=message):
    workdir.open_run(tmp_path, newer, fixed=FIXED)
  assert workdir.open_run(tmp_path, newer, changed=True, fixed=FIXED)


def test_how_much_is_kept_and_logged_may_change(tmp_path):
  workdir.write_config(tmp_path, CONFIG)
  assert workdir.open_run(tmp_path, config(run__keep=2, run__log_every=3))


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='workdir .*file: cannot be written'):
    workdir.open_run(tmp_path / 'file', CONFIG)


def test_a_finished_run_is_known_by_its_config_and_its_result(tmp_path):
  assert workdir.finished(tmp_path, CONFIG) is None
  workdir.finish(tmp_path, CONFIG, 'model', {'loss': 0.1})
  assert workdir.finished(tmp_path, CONFIG) is None
  (tmp_path / 'model').mkdir()
  found = workdir.finished(tmp_path, config(run__keep=2))
  assert found['figures'] == {'loss': 0.1}
  assert found['config'] == json.loads(json.dumps(CONFIG))
  assert workdir.finished(tmp_path, config(run__steps=4)) is None
