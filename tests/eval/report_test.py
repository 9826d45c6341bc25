"""Words and files of the report; the tables are run by bench_test."""

import json

import pytest

from specdec_jax.eval import metrics, report, verdict


def gain(median, low, high):
  return {'median': median, 'min': low, 'max': high, 'iqr': 0.0}


def row(name, improvement, gamma=4, audit=None):
  return {
    'name': f'{name} g={gamma}',
    'drafter': name,
    'gamma': gamma,
    'improvement': improvement,
    'proposal_rate': 0.1,
    'draft_acceptance_rate': 0.3,
    'block_efficiency': 1.1,
    'predicted': {'improvement': 1.0, 'best_gamma': 0},
    'explained': {'improvement': 1.0, 'window_cost': 1.2},
    'audit': audit
    or {'promised': 'tokens', 'requests': 9, 'ties': 1, 'bugs': 0},
  }


def document(rows, categories=()):
  return {
    'rows': rows,
    'categories': list(categories),
    'repeated_8grams': 0.0,
    'crossover': [],
  }


def test_outcomes():
  assert metrics.outcome(gain(1.3, 1.2, 1.4)) == 'win'
  assert metrics.outcome(gain(0.8, 0.7, 0.9)) == 'loss'
  assert metrics.outcome(gain(1.3, 0.9, 1.4)) == 'draw'
  assert metrics.outcome(gain(1.01, 1.005, 1.02)) == 'draw'


def test_a_loss_says_do_not_speculate_and_why():
  text = '\n'.join(
    verdict.sentences(document([row('lookup', gain(0.9, 0.88, 0.93))]))
  )
  assert 'best gamma 0, do not speculate' in text
  assert 'proposes in only 10% of windows' in text
  assert '30% of what it proposes is accepted' in text
  assert 'costs 1.20 plain steps' in text
  assert '1 part at a tie' in text and '0 unexplained' in text


def test_a_losing_category_is_named_beside_an_overall_win():
  cell = lambda category, improvement: {
    'category': category,
    'name': 'lookup g=4',
    'improvement': improvement,
    'proposal_rate': 0.5,
    'draft_acceptance_rate': 0.8,
    'block_efficiency': 1.5,
    'window_cost': 1.7,
    'explained': 0.89,
  }
  doc = document(
    [row('lookup', gain(1.5, 1.4, 1.6))],
    [
      cell('code', gain(1.9, 1.8, 2.0)),
      cell('chat', gain(0.9, 0.8, 0.95)),
      cell('maths', gain(1.0, 0.9, 1.1)),
    ],
  )
  text = '\n'.join(verdict.sentences(doc))
  assert 'lookup: best gamma 4, 1.50x' in text
  assert 'wins on: code 1.90x' in text
  assert 'loses on chat (0.90x)' in text and 'costs 1.70 plain' in text
  assert 'No clear difference on: maths' in text


def test_a_bug_is_shouted_and_fails(capsys):
  audit = {'promised': 'tokens', 'requests': 9, 'ties': 0, 'bugs': 1}
  doc = document([row('lookup', gain(1.5, 1.4, 1.6), audit=audit)])
  assert not report.finish(doc)
  assert 'BUG: 1 of 9' in capsys.readouterr().out


def test_last_line_is_one_json_document(capsys):
  doc = document([row('lookup', gain(1.5, 1.4, 1.6))])
  doc['odd'] = {'nan': float('nan'), 'inf': float('inf'), 1: (1.23456789,)}
  assert report.finish(doc)
  last = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert last['odd'] == {'nan': None, 'inf': None, '1': [1.23457]}
  assert last['verdict']


def test_workdir(tmp_path):
  assert report.open_workdir('') is None
  folder = report.open_workdir(str(tmp_path / 'a' / 'b'))
  report.save(folder, {'machine': {'cpu': 'x'}, 'rows': []}, '{"k": 1}')
  files = {str(p.relative_to(folder)) for p in folder.rglob('*.json')}
  assert files == {'config.json', 'env.json', 'results/bench.json'}
  assert len(list(folder.rglob('*'))) == 4  # nothing half-written is left
  assert json.loads((folder / 'env.json').read_text()) == {'cpu': 'x'}
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='cannot be written'):
    report.open_workdir(str(tmp_path / 'file' / 'below'))
