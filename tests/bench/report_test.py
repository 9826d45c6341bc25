"""Words and cells of what is printed; bench_test runs whole tables."""

import json

import pytest

from specdec_jax import metrics, printing, program
from specdec_jax.bench import (
  audit,
  benchmark,
  identity,
  intervals,
  predict,
  tables,
  verdict,
)
from specdec_jax.costs import calibration

TOO_SHORT = intervals.Interval()
AUDIT = identity.Audit('tokens', 9, (), (audit.Finding('tie'),))
BUG = identity.Audit('tokens', 9, (), (audit.Finding('BUG'),))
WHAT = {'lossless': True, 'judged_prompts': 14, 'batch_size': 1}
SETTING = type('Setting', (), WHAT)
NO_COUNTS = metrics.Summary(**dict.fromkeys(metrics.Summary._fields))


gain = intervals.Interval


def model(tokens=1.1, window_cost=1.2, by_gamma=(), best_gamma=0):
  gain = tokens / window_cost
  return predict.Prediction(
    tokens, window_cost, gain, None, None, dict(by_gamma), best_gamma
  )


def counts(rate=0.1, accepted=0.3, efficiency=1.1):
  return NO_COUNTS._replace(
    proposal_rate=rate,
    draft_acceptance_rate=accepted,
    block_efficiency=efficiency,
  )


def row(name, improvement, gamma=4, **changes):
  empty = dict.fromkeys(benchmark.Row._fields)
  return (
    benchmark.Row(**empty)
    ._replace(
      name=f'{name} g={gamma}',
      drafter=name,
      gamma=gamma,
      improvement=improvement,
      whole=gain(1.25, 1.2, 1.3),
      counts=changes.pop('counts', counts()),
      predicted=predict.Prediction(1, 1, 1.0, 0.8, 1.2, {}, 0),
      explained=model(),
      audit=AUDIT,
    )
    ._replace(**changes)
  )


def cell(category, improvement, efficiency=1.5, drafter='lookup', rate=0.5):
  return benchmark.Category(
    category,
    f'{drafter} g=4',
    drafter,
    2,
    improvement,
    None,
    model(0.89 * 1.7, 1.7),
    counts(rate, 0.8, efficiency),
  )


def document(rows, categories=(), **changes):
  doc = benchmark.Document({}, None, SETTING, rows=rows, categories=categories)
  doc = doc._replace(measured=120.0)
  return doc._replace(repeated_8grams=0.0, **changes)


def printed(doc, capsys):
  """(whether it is sound, stdout, the JSON of its last line)."""
  sentences = verdict.sentences(doc)
  tables.close(sentences, doc._replace(setting=None), printing.console())
  out = capsys.readouterr().out
  return verdict.sound(doc), out, json.loads(out.splitlines()[-1])


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
  assert 'slower at every gamma tried; best at gamma 4, 0.80x (95 %: ' in text
  assert 'whole requests 1.25x (95 %: 1.20 to 1.30, +-4%).' in text
  assert 'Predicted before the run: 1.00x (90 %: 0.80 to 1.20).' in text
  assert 'a window emits 1.10 tokens in the time of 1.20 plain steps' in text
  assert 'something is proposed in 10% of windows' in text
  assert '30% of the proposed tokens are accepted' in text
  assert '2 part at a tie' in text and '0 unexplained' in text
  assert change.startswith('  lookup: do not speculate here. ')
  assert 'must emit 1.20 tokens (here 1.10) or cost 1.10 plain steps' in change


def test_a_gamma_to_try():
  better = model(by_gamma={1: 1.2, 4: 0.92}, best_gamma=1)
  one = lambda gamma: row(
    'lm', gain(0.9, 0.8, 0.95), gamma=gamma, explained=better
  )
  assert 'Try gamma 1: by the cost model 1.20x' in said(one(4))[1]
  assert 'Try gamma' not in said(one(4), one(1))[1]


def test_losing_categories_are_one_line_beside_an_overall_win():
  text, change = said(
    row('lookup', gain(1.5, 1.4, 1.6)),
    categories=[
      cell('one', gain(3.0)),
      cell('code', gain(1.9, 1.8, 2.0)),
      cell('chat', gain(0.85, 0.8, 0.95), efficiency=1.4),
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
  assert 'proposed in' not in text
  assert 'not told from plain decoding on: maths 1.00x.' in text
  assert 'fewer than 6 prompts, no interval, of: one 3.00x.' in text
  assert 'too short to measure on: short.' in text
  assert change == '  lookup: use gamma 4, but not for creative, chat.'


def test_what_is_not_told_says_how_many_prompts_would_tell():
  text, change = said(row('lookup', gain(1.1, 0.9, 1.3)))
  assert 'lookup: cannot tell; best at gamma 4, 1.10x' in text
  assert '  Some 56 prompts would, if the value stays (14 took 2 min' in text
  assert 'or measure more prompts' in change
  text, _ = said(row('lookup', gain(1.0, 0.9, 1.1)))
  assert '1400 prompts would not tell' in text


@pytest.mark.parametrize(
  'prompts, batch, why',
  [
    (1, 1, '1 prompt is judged, and at least 6 are needed'),
    (5, 4, '5 prompts are judged, and at least 6 are needed'),
    (8, 8, 'one batch of 8 holds all 8 prompts, and at least two batches'),
  ],
)
def test_too_few_prompts_or_one_batch_tell_nothing(prompts, batch, why, capsys):
  few = type('', (), WHAT | {'judged_prompts': prompts, 'batch_size': batch})
  doc = document([row('lookup', gain(9.0))], setting=few)
  text = '\n'.join(verdict.sentences(doc))
  assert 'lookup: cannot tell; best at gamma 4, 9.00x plain' in text
  assert f'  There is no interval: {why}' in text
  assert '  lookup: measure again: more prompts' in text
  assert 'speculate' not in text
  assert tables._widths([gain(9.0)]).startswith('No intervals: they need 6')


def test_slower_is_said_only_if_every_gamma_is():
  """A smaller gamma whose interval holds 1 may be faster."""
  slow, wide = gain(0.9, 0.85, 0.95), gain(0.8, 0.5, 1.1)
  text, _ = said(row('lm', slow), row('lm', wide, gamma=2))
  assert 'lm: cannot tell; best at gamma 2, 0.80x' in text
  text, _ = said(row('lm', slow), row('lm', gain(0.8, 0.7, 0.9), gamma=2))
  assert 'lm: slower at every gamma tried; best at gamma 4, 0.90x' in text
  # One that surely wins leads before one that seems to win more.
  text, _ = said(row('lm', gain(1.2, 1.1, 1.3)), row('lm', gain(2, 0.9, 3), 2))
  assert 'lm: faster; best at gamma 4, 1.20x' in text


def test_what_is_said_of_batch_sizes():
  """Each by its own intervals; one batch of all prompts tells nothing."""
  at = lambda size, *gains: benchmark.Batch(
    size,
    [
      benchmark.BatchRow('x', 'lm', gamma, 9.0, x, None)
      for gamma, x in enumerate([gain(1, 1, 1), *gains])
    ],
    {'lm': 0},
    [],
    14,
  )
  won, lost, open_ = gain(2, 1.9, 2.1), gain(0.5, 0.4, 0.6), gain(1, 0.9, 1.1)
  doc = document(
    [row('lm', won)],
    crossover=[
      *(at(1, lost, won), at(2, won, open_), at(4, lost, lost)),
      *(at(8, lost, open_), at(16, gain(3.0), gain(2.0))),
    ],
  )
  text = '\n'.join(verdict.sentences(doc))
  assert 'lm, by batch size: faster at 1, 2; slower at 4; cannot tell' in text
  assert 'at 8, 16 (one batch of 16 holds all 14 prompts, and at least' in text


def test_the_best_method_leads_and_one_that_switched_itself_off_is_no_loss():
  text, change = said(
    row('lookup', gain(1.2, 1.1, 1.3)),
    row('adaptive', gain(1.5, 1.4, 1.6)),
    categories=[
      cell('code', gain(1.9, 1.8, 2.0), drafter='adaptive', rate=0.05),
      cell('chat', gain(0.98, 0.97, 0.99), drafter='adaptive', rate=0.05),
      cell('maths', gain(0.9, 0.8, 0.95), drafter='adaptive'),
    ],
  )
  assert text.startswith('adaptive: faster') and 'lookup: faster' in text
  assert "plain decoding here (the program's choice) on: chat 0.98x." in text
  assert 'wins on: code' in text and 'loses on: maths' in text
  assert change.startswith('  adaptive: use gamma 4, but not for maths.')


def test_without_a_method_nothing_is_said_of_one(capsys):
  doc = document([row('autoregressive', gain(1.0), gamma=0)])
  assert verdict.sentences(doc) == [
    'Plain decoding only: nothing to compare it with.'
  ]
  costs = calibration.Calibration(1.0, {1: 1.0}, 1.0, {})
  tables.predicted(doc._replace(calibration=costs), printing.console())
  assert capsys.readouterr().out == 'Plain decoding only.\n'
  costs = costs._replace(propose={'lookup': {4: 0.0}})
  tables.predicted(doc._replace(calibration=costs), printing.console())
  assert 'two prompts or more' in capsys.readouterr().out


def test_too_short_to_measure_is_said_and_is_null(capsys):
  doc = document([row('lookup', TOO_SHORT), row('lm', gain(1.5, 1.4, 1.6))])
  good, text, found = printed(doc, capsys)
  assert good and 'lookup: too short to measure' in text
  assert 'lookup: generate more tokens, with a larger decode.max' in text
  lookup = found['rows'][0]
  assert lookup['improvement'] == dict(value=None, low=None, high=None)
  assert tables.gain_cell(TOO_SHORT) == 'too short'
  assert tables.gain_cell(gain(1.5, 1.4, 1.6)) == '[green]1.50 (1.40-1.60)[/]'
  assert tables.gain_cell(gain(1.5)) == '[default]1.50[/]'


def test_a_lossy_rule_has_its_distance_beside_every_number(capsys):
  lossy = identity.Audit('nothing', 9)
  alpha = predict.Alpha(0.5, 0.5, 0.125, 9)
  rows = [
    row(name, gain(1.5, 1.4, 1.6), gamma, audit=lossy, alpha=alpha)
    for name, gamma in (('autoregressive', 0), ('lm', 4))
  ]
  assert tables.identity([lossy], tables.distance(alpha)) == 'LOSSY, TV 0.12'
  assert 'LOSSY' in said(*rows)[0] and '0.12 (lm)' in said(*rows)[0]
  at = [
    benchmark.BatchRow(x.name, x.drafter, x.gamma, 9.0, x.improvement, lossy)
    for x in rows
  ]
  doc = document(rows, crossover=[benchmark.Batch(8, at, {}, [], 9)])
  tables.crossover(doc, printing.console())
  assert 'TV 0.12' not in capsys.readouterr().out
  lossless = type('Setting', (), {'lossless': False})
  tables.crossover(doc._replace(setting=lossless), printing.console())
  out = capsys.readouterr().out
  assert 'LOSSY' in out and 'TV 0.12' in out
  # What the rule does not say is not 0.
  none = predict.Alpha(None, None, None, 9)
  rows = [x._replace(alpha=none) for x in rows]
  assert tables.identity([lossy], tables.distance(none)) == 'LOSSY, TV unknown'
  assert 'by an unknown distance' in said(*rows)[0]


def test_a_bug_is_shouted_and_fails(capsys):
  doc = document([row('lookup', gain(1.5, 1.4, 1.6), audit=BUG)])
  good, text, found = printed(doc, capsys)
  assert not good and 'BUG: 1 of 9' in text
  assert 'Nothing before the bug or the failure is found' in text
  assert 'use gamma' not in text
  assert found['rows'][0]['audit']['findings'][0]['verdict'] == 'BUG'


def test_differences_and_failures_of_the_crossover_count():
  failure = lambda method, id: identity.Failure(method, id, 2)
  at = lambda *rows, failed=(): document(
    [],
    crossover=[
      benchmark.Batch(
        4,
        [benchmark.BatchRow('x', 'x', 1, None, None, a) for a in rows],
        {},
        failed,
        9,
      )
    ],
  )
  assert verdict.sound(at(None, AUDIT))
  wrong = at(None, BUG)
  assert not verdict.sound(wrong)
  assert 'BUG[/red]: 1 of 9' in verdict._identity_sentence(wrong)
  assert tables.identity([None, BUG]).startswith('1 of 9: ')
  broken = [failure('plain', x) for x in 'abcdefg']
  failed = at(None, failed=broken)
  assert not verdict.sound(failed)
  text = verdict.failures(verdict.failed(failed))
  assert "'a' after 2 new tokens (plain at batch 4)" in text[0]
  assert len(text) == 6 and text[-1] == 'And 2 more failed so.'


def test_compact_is_json_without_what_json_cannot_hold():
  doc = {'nan': float('nan'), 'inf': float('inf'), 1: (1.23456789, TOO_SHORT)}
  found = json.loads(printing.compact(doc))
  assert found['nan'] is found['inf'] is None
  assert found['1'] == [1.23457, dict(TOO_SHORT._asdict())]


def test_workdir(tmp_path):
  assert program.open_workdir('') is None
  folder = program.open_workdir(str(tmp_path / 'a' / 'b'))
  assert folder.is_dir() and not list(folder.iterdir())
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='cannot be written'):
    program.open_workdir(str(tmp_path / 'file' / 'below'))
