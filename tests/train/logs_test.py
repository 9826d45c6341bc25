"""Logs of a run that goes on, and what they hold."""

import json
import pathlib

import numpy as np
import pytest

from specdec_jax.train import logs as logs_lib


def written(workdir, first, steps):
  logs = logs_lib.Logs(workdir, first)
  for step in steps:
    figures = {'loss': step / 10, 'alpha_at': [0.5, None, 0.25]}
    logs.write('metrics', step, figures)
    logs.write('clocks', step, {'tokens_per_second': 7.0})
  logs.close()


def read(workdir, name):
  text = (workdir / f'{name}.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_what_a_step_says(tmp_path):
  written(tmp_path, 0, [1, 2])
  assert read(tmp_path, 'metrics') == [
    {'step': 1, 'loss': 0.1, 'alpha_at': [0.5, None, 0.25]},
    {'step': 2, 'loss': 0.2, 'alpha_at': [0.5, None, 0.25]},
  ]
  assert read(tmp_path, 'clocks')[0] == {'step': 1, 'tokens_per_second': 7.0}


def test_going_on_drops_what_was_said_of_later_steps(tmp_path):
  written(tmp_path, 0, [1, 2, 3, 4])
  for name in ('metrics', 'clocks'):
    with open(tmp_path / f'{name}.jsonl', 'a') as file:
      file.write('{"step": 5, "lo')  # a kill amid a line
  written(tmp_path, 2, [3])
  other = tmp_path / 'other'
  other.mkdir()
  written(other, 0, [1, 2, 3])
  for name in ('metrics', 'clocks'):
    assert [x['step'] for x in read(tmp_path, name)] == [1, 2, 3]
  same = [(x / 'metrics.jsonl').read_bytes() for x in (tmp_path, other)]
  assert same[0] == same[1]


def test_tensorboard_gets_numbers_and_each_of_a_list(tmp_path):
  written(tmp_path, 4, [5, 6])
  (path,) = (tmp_path / 'tb').iterdir()
  version, start, *said = events(path)
  assert version.file_version and start.session_log.status == 1
  assert start.step == 5  # what an earlier start said of it is void
  tags = [
    (x.step, v.tag, v.simple_value) for x in said for v in x.summary.value
  ]
  # What was not measured is no number.
  want = [
    (step, *x)
    for step in (5, 6)
    for x in (
      ('loss', step / 10),
      ('alpha_at/0', 0.5),
      ('alpha_at/2', 0.25),
      ('tokens_per_second', 7.0),
    )
  ]
  assert [x[:2] for x in tags] == [x[:2] for x in want]
  assert [x[2] for x in tags] == pytest.approx([x[2] for x in want])


def events(path: pathlib.Path):
  """TFRecord: length, its checksum, the event, its checksum."""
  data, at = path.read_bytes(), 0
  while at < len(data):
    size = int.from_bytes(data[at : at + 8], 'little')
    yield logs_lib.event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
    at += 16 + size


def test_plain_figures_are_numbers_or_nothing():
  found = logs_lib.plain(
    {
      'loss': np.float32('nan'),
      'alpha_at': np.array([0.25, np.inf]),
      'count': np.int32(3),
      'none': None,
    }
  )
  assert found == {
    'loss': None,
    'alpha_at': [0.25, None],
    'count': 3,
    'none': None,
  }
  json.dumps(found, allow_nan=False)


def test_a_folder_that_is_gone_is_one_sentence(tmp_path):
  with pytest.raises(ValueError, match='cannot be written.*goes on from'):
    logs_lib.Logs(tmp_path / 'nowhere', 0)
