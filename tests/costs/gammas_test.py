"""The file of best gammas: what is picked, and what is refused."""

import json

import pytest

from specdec_jax.costs import gammas

HERE = dict(cpu='A', cores=2, platform='cpu', device='cpu', devices=1)


def entry(batch, buffer, gamma, drafter='lookup'):
  return gammas.Entry(drafter, batch, buffer, gamma)


def pick(path, machine=HERE, model='m', drafter='lookup', batch=1, buffer=64):
  return gammas.pick(path, machine, model, drafter, batch=batch, buffer=buffer)


@pytest.fixture(name='path')
def _path(tmp_path):
  path = tmp_path / 'gammas.json'
  found = [entry(1, 64, 8), entry(16, 64, 2), entry(1, 1024, 4)]
  gammas.write(path, HERE | {'jax': '9'}, 'm', found, {'step': 0.1})
  return path


def test_the_nearest_entry_is_taken(path):
  assert pick(path) == 8 and pick(path, batch=3, buffer=100) == 8
  assert pick(path, batch=5) == 2 and pick(path, batch=99) == 2
  assert pick(path, buffer=512) == 4


def test_a_second_run_adds_to_the_file(path):
  more = [entry(1, 64, 0), entry(1, 64, 3, 'lm')]
  gammas.write(path, HERE, 'm', more, {})
  assert (pick(path), pick(path, batch=16), pick(path, drafter='lm')) == (
    *(0, 2, 3),
  )
  # Another model's figures would be wrong beside these.
  gammas.write(path, HERE, 'other', more[:1], {})
  assert len(json.loads(path.read_text())['entries']) == 1


@pytest.mark.parametrize(
  'change, said',
  [
    (dict(machine=HERE | {'cores': 8}), 'measured on cores 2, .* has 8: meas'),
    (dict(model='x'), 'measured on another model'),
    (dict(drafter='lm'), r"has \['lookup'\], not 'lm'"),
    (dict(path='nowhere.json'), 'cannot be read'),
    (dict(path=__file__), 'cannot be read'),
  ],
)
def test_refusals_are_one_sentence(path, change, said):
  with pytest.raises(ValueError, match=said) as error:
    pick(**dict(path=path) | change)
  assert '\n' not in str(error.value)


def test_another_format_is_refused(path):
  path.write_text('{}')
  with pytest.raises(ValueError, match='no file of bench.py'):
    pick(path)
