"""Words and files of the report; the tables are run by bench_test."""

import json

import pytest

from specdec_jax import runtime
from specdec_jax.bench import metrics, report, tables, verdict


def gain(median, low, high):
  return {
    'median': median,
    'min': low,
    'max': high,
    'iqr': 0.0,
    'too_short': 0,
  }


TOO_SHORT = metrics.spread([None, None])


def row(name, improvement, gamma=4, audit=None, **changes):
  return {
    'name': f'{name} g={gamma}',
    'drafter': name,
    'gamma': gamma,
    'improvement': improvement,
    'proposal_rate': 0.1,
    'draft_acceptance_rate': 0.3,
    'block_efficiency': 1.1,
    'cost_coefficient': 0.0,
    'predicted': {'improvement': 1.0, 'best_gamma': 0},
    'explained': model(),
    'audit': audit
    or {'promised': 'tokens', 'requests': 9, 'ties': 1, 'bugs': 0},
    'broken': [],
  } | changes


def model(tokens=1.1, window_cost=1.2, **changes):
  return {
    'tokens': tokens,
    'window_cost': window_cost,
    'improvement': tokens / window_cost,
    'by_gamma': {},
    'best_gamma': 0,
  } | changes


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


def said(*rows, categories=()):
  """(what was found, what to change), each as one text."""
  lines = verdict.sentences(document(rows, categories))
  at = lines.index('What to change:')
  return '\n'.join(lines[:at]), '\n'.join(lines[at + 1 :])


def test_a_loss_says_do_not_speculate_and_why():
  text, change = said(
    row('lookup', gain(0.7, 0.68, 0.73), gamma=2),
    row('lookup', gain(0.8, 0.78, 0.83)),
  )
  assert 'slower at every gamma tried; best at gamma 4, 0.80x' in text
  assert 'a window emits 1.10 tokens in the time of 1.20 plain steps' in text
  assert 'something is proposed in 10% of windows' in text
  assert '30% of the proposed tokens are accepted' in text
  assert 'That makes 0.92x and measured is 0.80x: together' in text
  assert '2 part at a tie' in text and '0 unexplained' in text
  assert change.startswith('  lookup: do not speculate here. ')
  # 1 + 0.1 (E - 1) = 1.2 is E = 3: a + a^2 + a^3 + a^4 = 2.
  assert 'an alpha of 0.74 while proposing in 10% of windows' in change
  # It costs nothing to look up, and half as many tokens would not pay either.
  assert 'plain steps a token' not in change and 'no draft' not in change


def test_break_even_of_a_draft_model():
  lm = lambda tokens, window, c: said(
    row(
      'lm',
      gain(0.8, 0.7, 0.9),
      gamma=2,
      proposal_rate=1.0,
      cost_coefficient=c,
      explained=model(tokens, window),
    )
  )[1]
  change = lm(1.39, 1.56, 0.2)
  # a + a^2 = 0.56, and 0.39.
  assert 'needs an alpha of 0.40 (here 0.30)' in change
  assert 'drafts of 0.115 plain steps a token (here 0.200)' in change
  assert 'while proposing' not in change
  assert 'no draft is cheap enough' in lm(1.1, 1.56, 0.2)
  assert 'Even alpha 1 would not break even' in lm(1.39, 3.1, 0.2)
  # The parts say that it should win.
  assert 'time is lost elsewhere' in lm(1.6, 1.5, 0.2)


def test_a_gamma_to_try():
  better = model(by_gamma={1: 1.2, 4: 0.92}, best_gamma=1)
  one = lambda gamma: row(
    'lm', gain(0.9, 0.8, 0.95), gamma=gamma, explained=better
  )
  assert 'Try gamma 1: by the cost model 1.20x' in said(one(4))[1]
  assert 'Try gamma' not in said(one(4), one(1))[1]


def cell(category, improvement, **changes):
  return {
    'category': category,
    'name': 'lookup g=4',
    'improvement': improvement,
    'proposal_rate': 0.5,
    'draft_acceptance_rate': 0.8,
    'block_efficiency': 1.5,
    'window_cost': 1.7,
    'explained': 0.89,
  } | changes


def test_losing_categories_are_one_line_beside_an_overall_win():
  text, change = said(
    row('lookup', gain(1.5, 1.4, 1.6)),
    categories=[
      cell('code', gain(1.9, 1.8, 2.0)),
      cell('chat', gain(0.85, 0.8, 0.95), block_efficiency=1.4),
      cell('creative', gain(0.9, 0.8, 0.95)),
      cell('maths', gain(1.0, 0.9, 1.1)),
      cell('short', TOO_SHORT),
    ],
  )
  assert 'lookup: faster; best at gamma 4, 1.50x' in text
  assert 'wins on: code 1.90x.' in text
  assert 'loses on: creative 0.90x, chat 0.85x.\n  Why: ' in text
  assert text.count('Why') == 1
  assert 'emits 1.40 to 1.50 tokens in the time of 1.70 plain' in text
  assert 'proposed in' not in text and 'That makes' not in text
  assert 'no clear difference on: maths 1.00x.' in text
  assert 'too short to measure on: short.' in text
  assert change == '  lookup: use gamma 4, but not for creative, chat.'


def test_too_short_to_measure_is_said_and_is_null(capsys):
  doc = document([row('lookup', TOO_SHORT), row('lm', gain(1.5, 1.4, 1.6))])
  assert report.finish(doc)
  printed = capsys.readouterr().out
  assert 'lookup: too short to measure' in printed
  assert 'lookup: generate more tokens, with a larger decode.max' in printed
  found = json.loads(printed.splitlines()[-1])['rows'][0]['improvement']
  assert found['median'] is None and found['too_short'] == 2


def test_too_short_in_the_tables():
  assert tables._range(TOO_SHORT, 2) == 'too short'
  assert tables._gain(TOO_SHORT) == '[default]too short[/]'
  assert tables._over(None, 2.0) is tables._over(2.0, None) is None


def test_a_lossy_rule_has_its_distance_beside_every_number(capsys):
  audit = {'promised': 'nothing', 'requests': 9}
  alpha = {'alpha': 0.5, 'total_variation': 0.125}
  some = row('lm', gain(1.5, 1.4, 1.6), audit=audit, alpha=alpha)
  plain = dict(
    some, name='autoregressive', tok_s=gain(9.0, 8.0, 9.5), audit=None
  )
  doc = document([plain, some]) | {'setting': {'lossless': False}}
  assert tables.identity([some]) == 'LOSSY, TV 0.12'
  wide = {x['name']: x | {'alpha': None} for x in doc['rows']}
  doc['crossover'] = [{'batch_size': 8, 'rows': wide, 'best_gamma': {}}]
  tables.crossover(doc, runtime.console())
  printed = capsys.readouterr().out
  assert 'LOSSY' in printed and 'TV 0.12' in printed
  doc['setting']['lossless'] = True
  tables.crossover(doc, runtime.console())
  assert 'TV 0.12' not in capsys.readouterr().out


def test_a_bug_is_shouted_and_fails(capsys):
  audit = {'promised': 'tokens', 'requests': 9, 'ties': 0, 'bugs': 1}
  doc = document([row('lookup', gain(1.5, 1.4, 1.6), audit=audit)])
  assert not report.finish(doc)
  printed = capsys.readouterr().out
  assert 'BUG: 1 of 9' in printed
  assert 'Nothing before the bug or the failure is found' in printed
  assert 'use gamma' not in printed


def test_last_line_is_one_json_document(capsys):
  doc = document([row('lookup', gain(1.5, 1.4, 1.6))])
  doc['odd'] = {'nan': float('nan'), 'inf': float('inf'), 1: (1.23456789,)}
  assert report.finish(doc)
  last = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert last['odd'] == {'nan': None, 'inf': None, '1': [1.23457]}
  assert last['verdict']


def test_workdir(tmp_path):
  assert runtime.open_workdir('') is None
  folder = runtime.open_workdir(str(tmp_path / 'a' / 'b'))
  report.save(folder, {'machine': {'cpu': 'x'}, 'rows': []}, '{"k": 1}')
  files = {str(p.relative_to(folder)) for p in folder.rglob('*.json')}
  assert files == {'config.json', 'env.json', 'results/bench.json'}
  assert len(list(folder.rglob('*'))) == 4  # nothing half-written is left
  assert json.loads((folder / 'env.json').read_text()) == {'cpu': 'x'}
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='cannot be written'):
    runtime.open_workdir(str(tmp_path / 'file' / 'below'))
