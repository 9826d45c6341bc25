"""Rows with their models: measured, scored, and going on when killed."""

import dataclasses
import pathlib
import subprocess
import sys
import types
from typing import NamedTuple

import numpy as np
import pytest

from experiments import empirical, page, replay
from experiments import loaded as loaded_lib
from experiments import rows as rows_lib
from experiments.leviathan_table2 import render as table2
from specdec_jax import machine
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.train import text_metrics

ROWS = rows_lib.all_rows(pathlib.Path('/nowhere'))
ASKED = empirical.Asked(100, 4, 1, (1, 2))


def loaded(row, **changes):
  """A row without models."""
  found = loaded_lib.Loaded(ROWS[row], None, None, {}, (), {}, {})  # pyright: ignore
  return found._replace(**changes)


def test_quality_where_sampled_has_the_interval_of_its_change():
  """Of resampled prompts; equal texts at T = 0 need none."""
  spread = np.linspace(-1.0, 1.0, 1001)
  values = {'plain': [20.0, *20 + spread], 'mine': [21.0, *21.52 + 2 * spread]}
  found = table2.compared(values, 'plain', 'mine', 100)
  assert found['quality'] == [20.0, 21.0]
  ends = [found['change'][x] for x in ('low', 'high')]
  half = 1.98422 * np.std(spread) * (100 / 99) ** 0.5  # Student's t of 99
  np.testing.assert_allclose(ends, [1.0 - half, 1.0 + half], rtol=1e-4)
  equal = table2.compared({'a': [9.0], 'b': [9.0]}, 'a', 'b', 100)
  assert equal == {'quality': [9.0, 9.0], 'change': None}
  assert table2.compared({}, 'a', 'b', 9)['quality'] == [None, None]


def test_quality_of_every_arm_is_of_the_same_resampled_prompts(monkeypatch):
  """The metric here is the mean length; the arms' texts differ in one word."""
  said = {'plain': ['a', 'abc', 'ab'] * 2, 'mine': ['ab', 'abcd', 'abc'] * 2}
  answers = [(k, dict(zip('xyzuvw', x, strict=True))) for k, x in said.items()]
  monkeypatch.setattr(loaded_lib, '_answered', lambda *_: answers)
  lengths = text_metrics.Metric(
    lambda found, wanted: np.array([[1, len(x)] for x in found]),
    lambda sums_K: sums_K[1] / sums_K[0],
  )
  monkeypatch.setattr(text_metrics, 'metric_of', lambda name: lengths)
  row = loaded('translation', references=dict.fromkeys('xyzuvw', ''))
  found = loaded_lib.qualities(row, (), 1.0)
  assert found['plain'][0] == 2.0 and np.std(found['plain']) > 0.1
  np.testing.assert_allclose(found['mine'] - found['plain'], 1.0)


def test_the_commit_is_the_last_that_changed_code(tmp_path, monkeypatch):
  monkeypatch.setattr(machine, '__file__', str(tmp_path / 'a/machine.py'))

  def git(*args):
    name = ['-c', 'user.name=a', '-c', 'user.email=a']
    subprocess.run(['git', '-C', tmp_path, *name, *args], check=True)

  git('init', '-q')
  heads = []
  written = 'README.md', 'tests/x_test.py', 'experiments/a/results/a.json'
  for path in 'code.py', *written, 'experiments/a/table.py':
    (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / path).write_text(path)
    git('add', '.')
    git('commit', '-qm', path)
    heads.append((machine.commit(), machine.commit(*page.WRITTEN)))
  every = [x for (x, _), _ in heads]
  code, more = every[0], every[-1]
  assert len({*every}) == len(every) == 5
  assert [x for _, (x, _) in heads] == [code] * 4 + [more]
  (tmp_path / 'README.md').write_text('changed')
  assert machine.commit(*page.WRITTEN) == (more, False)
  assert machine.commit() == (more, True)


def test_a_summary_has_to_say_more_than_the_functions_name(monkeypatch):
  """And its metric is asked for before anything is loaded."""
  codes = 'def spread_out(x):', 'def total(x):'
  asked = tuple(
    prompts_lib.Prompt(str(i), turns=(x,)) for i, x in enumerate(codes)
  )
  wanted = {'0': 'spread out', '1': 'Adds.'}
  code = loaded('code', prompts=asked, references=wanted)
  equal = lambda found, wanted: 50.0 * sum(map(str.__eq__, found, wanted))
  monkeypatch.setattr(text_metrics, 'metric_of', lambda name: equal)
  assert loaded_lib.least_of(code) == 50.0
  translated = code._replace(row=ROWS['translation'])
  assert loaded_lib.least_of(translated) == loaded_lib.BLEU
  monkeypatch.undo()
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  with pytest.raises(ValueError, match='needs rouge-score'):
    loaded_lib.load(ROWS['code'], (1,), 1)
  assert rows_lib.quick(ROWS['code']).metric == 'bleu'


def test_rows_without_training_take_the_drafts_that_are_trained(tmp_path):
  rows = rows_lib.all_rows(tmp_path)
  assert not rows['chat'].missing() and not rows['titles'].missing()
  assert rows['translation'].missing()  # whose training makes all of them
  row = dataclasses.replace(
    rows['chat'], target='random:tiny', prompts='built in'
  )
  (student,) = (x for x in row.drafts if x.name == 'student')
  with_draft = lambda x: dataclasses.replace(row, drafts=(x,))
  engines = lambda x: loaded_lib.load(with_draft(x), (1,), 1).engines
  assert not engines(student)
  with pytest.raises(ValueError, match='no such file'):
    engines(dataclasses.replace(student, optional=False))


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
  done = []

  def measure(loaded, asked):
    if loaded.row.name == 'titles' and len(done) == 1:
      raise KeyboardInterrupt
    done.append(loaded.row.name)
    return []

  def load(row, *_):
    opened.append(row.name)
    return types.SimpleNamespace(row=row)

  opened = []
  nothing = lambda *_: []
  table = empirical.Table('x', measure, nothing, nothing, '')
  every = {name: ROWS[name] for name in ('chat', 'titles')}
  monkeypatch.setattr(machine, 'commit', lambda *_: ('a' * 40, False))
  monkeypatch.setattr(loaded_lib, 'load', load)
  monkeypatch.setattr(loaded_lib, 'gate', lambda row: None)
  others = tmp_path / 'one', tmp_path / 'two'
  for folder in others:
    folder.mkdir()
  go = lambda *more: empirical.measure(
    [(table, tmp_path, every), *((table, x, every) for x in more)], ASKED
  )
  with pytest.raises(KeyboardInterrupt):
    go()
  assert done == ['chat']
  done.append('killed')
  go()
  assert done == ['chat', 'killed', 'titles']
  go()
  assert len(done) == 3 and opened == ['chat', 'titles', 'titles']
  go(*others)  # each row is opened once for both tables
  assert opened[3:] == ['chat', 'titles']
  assert done[3:] == ['chat', 'chat', 'titles', 'titles']
  # What changed code measured is measured again.
  doc = (tmp_path / 'chat.json').read_text()
  changed = doc.replace('"dirty":false', '"dirty":true')
  (tmp_path / 'chat.json').write_text(changed)
  go()
  assert done[7:] == ['chat'] and changed != doc
  monkeypatch.setattr(machine, 'commit', lambda *_: ('b' * 40, False))
  del every['titles']
  doc = (tmp_path / 'chat.json').read_text().replace('a' * 40, 'c' * 40)
  (tmp_path / 'gpt.json').write_text(doc)
  with pytest.raises(ValueError, match='gpt.json: measured by commit cccc'):
    every['gpt'] = ROWS['gpt']
    go()


def test_texts_are_recorded_once_for_all_tables(monkeypatch):
  recorded = []

  def record(plain, engines, part, *, rules):
    recorded.append((part.test, [x.name for x in rules]))
    text = replay.Text('0', tokens=(1, 2), p=(), q=(), overlap=())
    return [[text] for _ in engines]

  class Plan(NamedTuple):
    test: tuple[int, ...] = tuple(range(200))

  monkeypatch.setattr(replay, 'record', record)
  monkeypatch.setattr(loaded_lib, 'plan', lambda *_: Plan())
  chat = loaded('chat', engines={'a': None})
  of = lambda warm, tokens: loaded_lib.traces(chat, warm, tokens)
  assert of(1.0, 3) is of(1.0, 3)
  first, second = recorded
  assert first[0] + second[0] == tuple(range(128)) and len(of(1.0, 3)['a']) == 2
  assert first[1] == ['lenient:0.5', 'lenient:0.3', 'lenient:0.1']
  of(0.0, 1)
  assert recorded[2:] == [(first[0], [])]
