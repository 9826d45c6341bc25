"""The README's results: what a row says, and what is stored."""

import json

import pytest

from experiments.headline import table


def row(drafter, value, low, high, explained=None, predicted=None):
  return {
    'name': f'{drafter} g=4',
    'drafter': drafter,
    'improvement': {'value': value, 'low': low, 'high': high},
    'explained': explained and {'improvement': explained},
    'predicted': predicted
    and dict(zip(('improvement', 'low', 'high'), predicted, strict=True)),
  }


PLAIN = {'tok_s': 266.6, 'improvement': {'value': 1.0, 'low': 1.0, 'high': 1.0}}


def told(*rows, **more):
  """What a page says of each method: its name, gain and prediction."""
  found = table.speeds({'rows': [PLAIN, *rows]} | more)
  shown = [table._figure(x) for x in found]
  foretold = lambda x: x['predicted'] and x['predicted'].value
  return [(x['method'], x['times'], x['ends'], foretold(x)) for x in shown]


def test_each_drafter_stands_once_the_best_first_with_its_prediction():
  rows = [
    row('lookup', 1.1, 0.9, 1.3, 1.1, (1.2, 1.0, 1.4)),
    row('lookup', 0.9, 0.8, 1.0, 0.9, (1.0, 0.9, 1.1)),
    row('eagle', 1.5, 1.2, 1.8, 1.2, (1.3, 1.1, 1.5)),
    row('lm', 0.8, None, None),
  ]
  assert told(*rows, left_out={'lm g=8': 'why', 'self g=4': 'why'}) == [
    ('eagle', '1.50x [parts: 1.20x]', '1.20 to 1.80', 1.3),
    ('lookup', '~1.10x', '0.90 to 1.30', 1.2),
    ('lm', '~0.80x', '', None),
    ('self, left out by its prediction', '-', '', None),
  ]
  # Its best is the verdict's: one that is faster before one that may be.
  sure, more = row('lm', 1.25, 1.1, 1.4, 1.2), row('lm', 1.3, 0.95, 1.65, 1.3)
  assert told(more, sure) == [('lm', '1.25x', '1.10 to 1.40', None)]


PROGRAM = """
import pathlib, sys
runs = pathlib.Path({runs!r})
ran = len(runs.read_text()) if runs.exists() else 0
runs.write_text('x' * (ran + 1))
print('a line')
print({documents!r}[ran])
sys.exit({status})
"""


@pytest.fixture(name='measured')
def _measured(tmp_path, monkeypatch):
  """Runs a command that prints these documents in turn: (stored, how often)."""

  def run(*gains, status=0):
    documents = [
      json.dumps({'rows': [PLAIN, row('lm', x, 1, 2, 1.0)]}) for x in gains
    ]
    runs, program = tmp_path / 'runs', tmp_path / 'program.py'
    program.write_text(
      PROGRAM.format(runs=str(runs), documents=documents, status=status)
    )
    one = table.Headline('a row', str(program), table.speeds)
    monkeypatch.setattr(table, 'HEADLINES', {'one': one})
    monkeypatch.setattr(table, 'path', lambda name: tmp_path / f'{name}.json')
    table.measure('one')
    stored = json.loads((tmp_path / 'one.json').read_text())
    return stored, len(runs.read_text())

  return run


def test_a_result_that_its_parts_contradict_is_measured_once_more(measured):
  stored, runs = measured(1.1)
  assert runs == 1 and stored['command'].endswith('program.py')
  assert {'cpu', 'commit', 'dirty'} <= set(stored['machine'])


def test_and_the_second_is_stored_whatever_it_is(measured):
  stored, runs = measured(1.3, 1.4)
  assert runs == 2 and stored['rows'][1]['improvement']['value'] == 1.4
  assert table.speeds(stored)[0].note == ' [parts: 1.00x]'


def test_a_failed_command_stores_nothing(measured, tmp_path):
  with pytest.raises(ValueError, match='status 3; nothing is stored'):
    measured(1.1, status=3)
  assert not (tmp_path / 'one.json').exists()


def test_what_is_not_measured_yet_is_no_row(monkeypatch, tmp_path):
  whole = table.rows()
  stored = table.path('stored')
  monkeypatch.setattr(
    table, 'path', lambda x: stored if x == 'stored' else tmp_path / x
  )
  assert table.rows() == [*whole[:3], ''] and 'Q4_1' in whole[2]


def test_the_readmes_table_is_one_that_one_reads():
  """At most 12 rows, the paper's case among them, no cell of many words."""
  rows = [x for x in table.rows() if x.startswith('| ')][2:]
  assert len(rows) <= 12 and any('T5 that translates' in x for x in rows)
  cells = [y for x in rows for y in x.strip('| ').split(' | ')]
  assert max(len(x.split()) for x in cells) <= 12
