"""Words and cells of what is printed; bench_test runs whole tables."""

import json
import types

import pytest

from specdec_jax import metrics, printing
from specdec_jax.bench import intervals, records, tables, verdict

gain = intervals.Interval
NONE = gain()
WON, LOST, OPEN = gain(1.5, 1.4, 1.6), gain(0.8, 0.78, 0.83), gain(1, 0.9, 1.1)
AUDIT = records.Audit('tokens', 9, (), (records.Finding('tie'),))
BUG = records.Audit('tokens', 9, (), (records.Finding('BUG'),))
WHAT = dict(lossless=True, judged_prompts=14, batch_size=1, codes='')
WHAT |= dict(max_new_tokens=64, repeats=5, categories=1)
NO_COUNTS = metrics.Summary(**dict.fromkeys(metrics.Summary._fields))


def model(tokens=1.1, window_cost=1.2, **by_size):
  value = tokens / window_cost
  return records.Prediction(tokens, window_cost, value, None, None, by_size)


def row(name, improvement, gamma=4, **changes):
  found = records.Row(
    *(f'{name} g={gamma}', name, gamma),
    NO_COUNTS._replace(block_efficiency=1.1),
    tok_s=5.0,
    improvement=improvement,
    whole=gain(1.25, 1.2, 1.3),
    predicted=records.Prediction(1, 1, 1.0, 0.8, 1.2),
    explained=model(),
    audit=AUDIT,
  )
  return found._replace(**changes)


def part(category, improvement, efficiency=1.5):
  return row(
    'lookup',
    improvement,
    counts=NO_COUNTS._replace(block_efficiency=efficiency),
    category=category,
    explained=model(0.89 * 1.7, 1.7),
  )


def document(rows, categories=(), setting=(), **changes):
  what = types.SimpleNamespace(**WHAT | dict(setting))
  doc = records.Document({}, None, what, None, rows=rows, categories=categories)
  return doc._replace(measured=120.0, repeated_8grams=0.0)._replace(**changes)


def batch(size, *gains, audits=(None, None, None), **changes):
  """A Batch of plain decoding and gammas of lm."""
  rows = [
    records.Row('lm', 'lm', gamma, NO_COUNTS, improvement=x, audit=audit)
    for gamma, (x, audit) in enumerate(
      zip([gain(1, 1, 1), *gains], audits, strict=False)
    )
  ]
  return records.Batch(size, rows, [])._replace(**changes)


VAGUE = records.Prediction(1, 1, 1.0, 0.4, 2.6)
SHARP = records.Prediction(1, 1, 1.0, 0.5, 2.0)
LOSS = [row('lookup', gain(0.7, 0.68, 0.73), gamma=2), row('lookup', LOST)]
SMALLER = model(**{'2': 1.1, '2,1': 1.2, '2,2': 1.0})
BETTER = model(**{'1': 1.2, '4': 0.92})
OF_A_TREE = NO_COUNTS._replace(accepted_by_width=[[1, 2]])
LARGEST = model(**{'2': 1.1, '2,1': 1.2, '2,2': 1.3})
PARTS = [
  part('one', gain(3.0)),
  part('code', gain(1.9, 1.8, 2.0)),
  part('chat', gain(0.85, 0.8, 0.95), efficiency=1.4),
  part('creative', gain(0.9, 0.8, 0.95)),
  part('maths', gain(1.0, 0.9, 1.1)),
]
PLAIN = row('plain', gain(1), 0, tok_s=3.4)
ALPHA = records.Alpha(0.5, 0.125)
LOSSY = dict(audit=records.Audit('nothing', 9), alpha=ALPHA)
UNKNOWN = LOSSY | dict(alpha=records.Alpha(None, None))


# A benchmark; what is said of it, in this order; what is not.
@pytest.mark.parametrize(
  'doc, said, unsaid',
  [
    (
      document(LOSS),
      [
        'slower at every gamma tried; best at gamma 4, 0.80x (95 %: 0.78 to ',
        'whole requests 1.25x (95 %: 1.20 to 1.30, +-4%).',
        'a window emits 1.10 tokens in the time of 1.20 plain steps',
        'Predicted before the run: 1.00x (90 %: 0.80 to 1.20).',
        '2 part at a tie within rounding noise, 0 unexplained',
        'What to change:\n  lookup: do not speculate here.',
      ],
      'use gamma',
    ),
    (
      document([row('lookup', WON, predicted=VAGUE)]),
      ['  Not predicted: the interval is 0.40 to 2.60.'],
      'Predicted before',
    ),
    (
      document(
        [
          row('eagle', WON, explained=LARGEST, counts=OF_A_TREE),
          row('mtp', LOST, explained=SMALLER, counts=OF_A_TREE),
          row('lm', LOST, explained=BETTER),
          *(row('lookup', LOST, x, explained=BETTER) for x in (1, 4)),
        ],
        repeated_8grams=0.5,
        left_out={'lm g=1': '0.80x to 0.90x'},
        setting={'codes': 'stored, int8 rows'},
      ),
      [
        '0 unexplained.\nOf 14 test prompts, 64 new tokens at most, 5 times',
        'to test the others on more prompts: lm g=1 (0.80x to 0.90x).',
        '50% of the 8-grams in the text are repeats',
        'exact as it is stored (stored, int8 rows): --reference=float32',
        'What to change:',
        '  eagle: use it as it is, with its tree of 4 nodes.\n',
        "  mtp: do not speculate here. Try the tree '2,1': by the cost ",
        '  lm: do not speculate here. Try gamma 1: by the cost model 1.20x, ',
        'this one 0.92x.\n  lookup: do not speculate here.',
      ],
      'use gamma',
    ),
    (
      document([PLAIN, row('lookup', WON)], PARTS),
      [
        'lookup: faster; best at gamma 4, 1.50x',
        'plain decoding (5 against 3.4 tok/s), whole requests',
        'wins on: code 1.90x.',
        'loses on: creative 0.90x, chat 0.85x.\n  Why: ',
        'emits 1.40 to 1.50 tokens in the time of 1.70 plain',
        'not told from plain decoding on: maths 1.00x.',
        'fewer than 6 prompts, no interval, of: one 3.00x.',
        '  lookup: use gamma 4, but not for creative, chat.',
      ],
      'proposed in',
    ),
    (
      document([row('lookup', gain(1.1, 0.9, 1.3))]),
      [
        'lookup: cannot tell; best at gamma 4, 1.10x',
        '  Some 56 prompts would, if the value stays (14 took 2 min 00 s)',
        'or measure more prompts',
      ],
      'faster',
    ),
    (
      document([row('lookup', OPEN)]),
      ['Whichever is faster, 1400 prompts would not tell.'],
      'Some',
    ),
    (
      document([row('lookup', WON, audit=BUG)]),
      [
        'BUG[/red]: 1 of 9 texts',
        'What to change:\n  Nothing before the bug or the failure is found.',
      ],
      'use gamma',
    ),
    (
      document([row('lm', WON, **LOSSY), row('lookup', WON, **UNKNOWN)]),
      ['This rule is LOSSY', 'variation of 0.12 (lm), unknown (lookup).'],
      'Checked',
    ),
    (
      document([row('autoregressive', gain(1.0), gamma=0)]),
      ['Plain decoding only: nothing to compare it with.'],
      'What to change',
    ),
    (
      document(
        [row('lm', WON)],
        crossover=[
          *(batch(1, LOST, WON), batch(2, WON, OPEN), batch(4, LOST, LOST)),
          *(batch(8, LOST, OPEN), batch(16, gain(3.0), gain(2.0))),
        ],
      ),
      [
        'lm, by batch size: faster at 1, 2; slower at 4; cannot tell at 8, 16.',
      ],
      'BUG',
    ),
  ],
)  # fmt: skip
def test_what_is_said(doc, said, unsaid):
  text, at = '\n'.join(verdict.sentences(doc)), 0
  for words in said:
    assert words in text[at:], words
    at = text.index(words, at)
  assert unsaid not in text


REPEAT = 'a repeat of the calibration over explained is '


# What is measured, the least and the most by repeats of the calibration, what
# contradicts the model of 0.92x, by which another gamma would be named.
@pytest.mark.parametrize(
  'measured, ends, off',
  [
    (0.77, (None, None), 'measured over explained is 0.84'),
    (0.78, (None, None), ''),
    (1.10, (None, None), ''),
    (1.12, (None, None), 'measured over explained is 1.22'),
    (0.9, (0.8, 1.1), ''),
    (0.9, (0.7, 1.0), f'{REPEAT}0.76'),
    (0.9, (0.9, 1.2), f'{REPEAT}1.31'),
  ],
)
def test_a_run_that_refutes_its_model_says_so_and_advises_nothing_by_it(
  measured, ends, off
):
  x = gain(measured, measured - 0.02, measured + 0.02)
  explained = BETTER._replace(low=ends[0], high=ends[1])
  doc = document([row('lm', x, explained=explained)])
  *text, change = verdict.sentences(doc)
  told = f'{off}, outside 0.85 to 1.2.'
  of_result = f'  Its parts contradict this result: {told} Run it again.'
  found = [x for x in text if 'contradict' in x]
  assert found == [of_result] * off.startswith('measured')
  advice = ' Try gamma 1: by the cost model 1.20x, this one 0.92x.'
  assert change.endswith(f' No other size is named: {told}' if off else advice)


def test_too_few_prompts_or_one_batch_tell_nothing():
  few = {'judged_prompts': 5, 'batch_size': 4}
  doc = document([row('lookup', gain(9.0))], setting=few)
  text = '\n'.join(verdict.sentences(doc))
  assert 'lookup: cannot tell; best at gamma 4, 9.00x plain' in text
  assert 'No interval: 5 prompts ran, 4 in a batch; it needs 6' in text
  assert '  lookup: measure again: more prompts' in text
  assert 'speculate' not in text


@pytest.mark.parametrize(
  'gains, head',
  [
    # A smaller gamma whose interval holds 1 may be faster.
    ({4: gain(0.9, 0.85, 0.95), 2: gain(0.8, 0.5, 1.1)}, 'cannot tell'),
    ({4: gain(0.9, 0.85, 0.95), 2: gain(0.8, 0.7, 0.9)}, 'slower at every'),
    # One that surely wins leads before one that seems to win more.
    ({4: gain(1.2, 1.1, 1.3), 2: gain(2, 0.9, 3)}, 'faster; best at gamma 4'),
  ],
)
def test_slower_is_said_only_if_every_gamma_is(gains, head):
  rows = [row('lm', x, gamma) for gamma, x in gains.items()]
  assert verdict.sentences(document(rows))[0].startswith(f'lm: {head}')


@pytest.mark.parametrize(
  'cell, text',
  [
    (tables.gain_cell(WON), '[green]1.50 (1.40-1.60)[/]'),
    (tables.gain_cell(gain(1.5)), '[default]1.50[/]'),
    (tables.gain_cell(gain(1.0, 1.0, 1.0)), '1'),
    (tables.identity([None, AUDIT]), '1 of 9: 1 tie'),
    (tables.identity([None, BUG], '', 2), '1 of 9: 1 BUG 2 FAILED'),
    (tables.identity([LOSSY['audit']], ALPHA.away), 'LOSSY, TV 0.'),
    # What the rule does not say is not 0.
    (UNKNOWN['alpha'].away, 'unknown'),
    (tables.show(None), '-'),
  ],
)
def test_cells(cell, text):
  assert cell.startswith(text)


def test_a_table_follows_a_path_to_a_value_or_to_nothing(capsys):
  columns = tables.columns(
    'method=name, gain=improvement.value:.1f, alpha=alpha.alpha:.2f, '
    'first=by_position.0:.0%'
  )
  positions = NO_COUNTS._replace(acceptance_per_position=[0.5, 0.25])
  rows = [row('lm', WON, counts=positions, alpha=ALPHA)]
  rows += [row('lookup', NONE, counts=positions)]
  printing.console().print(tables.table('Title', rows, columns))
  lines = [x.split() for x in capsys.readouterr().out.splitlines()]
  assert ['lm', 'g=4', '1.5', '0.50', '50%'] in lines
  assert ['lookup', 'g=4', '-', '-', '50%'] in lines
  assert tables.show(0.0, '{:.0%}') == '0%'  # known
  # Of JSON, in Markdown: an interval's ends repeat no unit.
  rows = [{'a': [1, None], 'b': {'value': 2.0, 'low': 1.0, 'high': 3.0}}]
  assert tables.markdown(rows, tables.columns('a.0, none=a.1, T=b:.1fx')) == [
    *(
      '| a.0 | none | T |',
      '| --- | --- | --- |',
      '| 1 | - | 2.0x (1.0 to 3.0) |',
    )
  ]


def test_whole_requests_have_a_column_of_their_own(capsys):
  rows = [row('lm', WON), row('lookup', LOST, whole=gain(0.9, 0.85, 0.95))]
  printing.console().print(tables.table('Speed', rows, tables._SPEED))
  lines = [x.split() for x in capsys.readouterr().out.splitlines()]
  lm, lookup = (
    next(x for x in lines if x[:1] == [n]) for n in ('lm', 'lookup')
  )
  cells = lambda x: [y for y in x if y[0].isdigit()][:3]
  assert cells(lm) == ['5.0', '1.50', '1.25']
  assert cells(lookup) == ['5.0', '0.80', '0.90']


@pytest.mark.parametrize(
  'rows, said', [(1, '7 calibration'), (3, '3 batches of calibration')]
)
def test_without_a_prediction_it_is_said_why(rows, said, capsys):
  setting = types.SimpleNamespace(other_prompts=7, batch_size=rows)
  tables.predicted({}, setting, printing.console())
  wanted = f'Not predicted: {said} prompts, 4 are needed.\n'
  assert capsys.readouterr().out == wanted


@pytest.mark.parametrize(
  'categories, rows, said',
  [
    (0, 1, ''),
    (1, 1, ''),
    (2, 1, 'Intervals are for other prompts of these 2 categories.'),
    (5, 1, 'Intervals are for other prompts of these 5 categories.'),
    (6, 1, 'Intervals are over the 6 categories.'),
    # A batch is of several.
    (7, 4, 'Intervals are for other prompts of these 7 categories.'),
  ],
)
def test_what_intervals_are_of_is_said(categories, rows, said):
  of = {'categories': categories, 'batch_size': rows}
  text = verdict.sentences(document([row('lm', WON)], setting=of))
  assert [x for x in text if x.startswith('Intervals')] == [said] * bool(said)
  # More prompts of the same categories would not tell.
  doc = document([row('lm', gain(1.1, 0.9, 1.3))], setting=of)
  more = [x for x in verdict.sentences(doc) if 'if the value stays' in x]
  assert len(more) == (said != 'Intervals are over the 6 categories.')


def test_a_lossy_rule_has_its_distance_beside_every_number(capsys):
  rows = [row('lm', WON, gamma, **LOSSY) for gamma in (0, 1)]
  rows = [x._replace(name='lm') for x in rows]
  at = batch(8, WON, audits=[LOSSY['audit']] * 2)
  for lossless in (True, False):
    doc = document(rows, setting={'lossless': lossless}, crossover=[at])
    tables.crossover(doc, printing.console())
    out = capsys.readouterr().out
    assert 'LOSSY' in out and ('TV 0.12' in out) != lossless


def test_differences_and_failures_of_the_crossover_count():
  assert verdict.sound(
    document([], crossover=[batch(4, WON, audits=[None, AUDIT])])
  )
  assert not verdict.sound(
    document([], crossover=[batch(4, WON, audits=[None, BUG])])
  )
  broken = [records.Failure('plain', x, 2) for x in 'abcdefg']
  doc = document([], crossover=[batch(4, failed=broken)])
  assert not verdict.sound(doc)
  text = verdict.failures(verdict.failed(doc))
  assert "'a' after 2 new tokens (plain at batch 4)" in text[0]
  assert len(text) == 6 and text[-1] == 'And 2 more failed so.'


def test_the_last_line_is_json_without_what_json_cannot_hold(capsys):
  doc = {'nan': float('nan'), 'inf': float('inf'), 1: (1.23456789, NONE)}
  tables.close(['a [b]x[/b]'], doc, printing.console())
  *lines, last = capsys.readouterr().out.splitlines()
  assert '  a x' in lines
  found = json.loads(last)
  assert found['nan'] is found['inf'] is None
  assert found['1'] == [1.23457, dict(NONE._asdict())]


def test_what_is_known_to_a_factor_of_two_alone_is_predicted():
  at = [head for head, *_ in tables._SPEED].index('predicted')
  for x, told, ends in (
    (VAGUE, '-', VAGUE.vague),
    (SHARP, '1.00x', '0.50-2.00'),
  ):
    method = row('lookup', WON, predicted=x)
    assert tables.cells(method, tables._SPEED)[at] == told
    assert tables.cells(('lookup', x), tables._PREDICTED)[-2:] == [told, ends]


def test_the_longest_phase_of_a_run_comes_first():
  told = tables.phases({'compiling': 12.4, 'timing': 50.0, 'audit of lm': 0.4})
  assert told == '63 s, of which timing 50, compiling 12'
