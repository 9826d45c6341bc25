"""Logs of a run that goes on, and what they hold."""

import json

import numpy as np

from specdec_jax.train import logs as logs_lib


def written(workdir, first, steps):
  logs = logs_lib.Logs(workdir, first)
  for step in steps:
    figures = {'loss': step / 10, 'alpha_at': [0.5, None, 0.25]}
    logs.write('metrics', step, figures)
    logs.write('clocks', step, {'tokens_per_second': 7.0})
  logs.close()


def test_a_run_that_goes_on_has_the_log_of_one_that_was_not_killed(tmp_path):
  killed, whole = tmp_path / 'killed', tmp_path / 'whole'
  for folder in (killed, whole):
    folder.mkdir()
  written(killed, 0, [1, 2, 3, 4])
  for name in ('metrics', 'clocks'):
    with open(killed / f'{name}.jsonl', 'a') as file:
      file.write('{"step": 5, "lo')  # a kill amid a line
  with open(killed / 'clocks.jsonl', 'ab') as file:
    file.write(b'\n' + bytes(8))  # what a power cut may leave
  written(killed, 2, [3])
  written(whole, 0, [1, 2, 3])
  for name, figures in (
    ('metrics', {'loss': 0.3, 'alpha_at': [0.5, None, 0.25]}),
    ('clocks', {'tokens_per_second': 7.0}),
  ):
    lines = (killed / f'{name}.jsonl').read_text().splitlines()
    assert [json.loads(x)['step'] for x in lines] == [1, 2, 3]
    assert json.loads(lines[2]) == {'step': 3} | figures
    same = (whole / f'{name}.jsonl').read_bytes()
    assert (killed / f'{name}.jsonl').read_bytes() == same


def test_a_line_is_there_as_soon_as_it_was_written(tmp_path):
  """A kill after a checkpoint must not lose a line of a step before it."""
  logs = logs_lib.Logs(tmp_path, 0)
  logs.write('metrics', 1, {'loss': 2.0})
  line = (tmp_path / 'metrics.jsonl').read_text()
  assert line == '{"step": 1, "loss": 2.0}\n'
  logs.close()


def test_plain_figures_are_numbers_or_nothing():
  alphas = np.array([0.25, np.inf])
  given = dict(loss=np.float32('nan'), alpha_at=alphas, count=np.int32(3))
  found = logs_lib.plain(given | {'none': None})
  assert found == dict(loss=None, alpha_at=[0.25, None], count=3, none=None)
  json.dumps(found, allow_nan=False)
