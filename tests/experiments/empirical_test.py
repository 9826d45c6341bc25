"""The empirical tables: stored results, refusals, pages, and tiny runs."""

import gzip
import json
import pathlib
import subprocess
import sys
import types
from typing import NamedTuple

import numpy as np
import pytest

from experiments import (
  claims,
  empirical,
  page,
  papers,
  replay,
  report,
  texts,
)
from experiments import rows as rows_lib
from experiments import table as table_lib
from experiments.block_verification_table1 import render as block_table
from experiments.leviathan_table2 import measure as table2_measure
from experiments.leviathan_table2 import render as table2
from experiments.leviathan_table3 import render as table3
from experiments.leviathan_table5 import render as table5
from specdec_jax import machine
from specdec_jax.bench import intervals
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.train import text_metrics
from tests import programs
from tests.experiments import reports

ROWS = rows_lib.all_rows(pathlib.Path('/nowhere'))
ASKED = empirical.Asked(100, 0, 4, 1, (1, 2))
TIMED = {
  'draft': 'unigram',
  'temperature': 0.0,
  'gamma': 2,
  'alpha': 0.31,
  'c': 0.01,
  'v': 1.25,
  'theorem': 1.41,
  'corrected': 1.2,
  'measured': {'value': 1.26, 'low': 1.13, 'high': 1.39},
  'whole': {'value': 1.1, 'low': 1.0, 'high': 1.2},
  'quality': [27.3, 27.3],
  'change': None,
  'texts': 7,
  'differ': 0,
  'bugs': 0,
  'promised': 'tokens',
  'block_efficiency': 1.4764,
}


def traced(**more):
  requests = [[4, 1.0], [4, 3.0]] * 3
  return [
    {'draft': draft.name, 'requests': requests, **more}
    for draft in ROWS['chat'].drafts
    if not draft.optional
  ]


def lenient(cells):
  for x in cells:
    x['requests'] = [[n, a, *[a, n / 8] * 3] for n, a in x['requests']]
  return cells


def block(value):
  return {'value': value, 'low': value - 0.02, 'high': value + 0.02}


GAIN = {'gamma': 8, 'temperature': 1.0, 'tokens': 8, 'draft': 'bigram'}
GAIN |= {'reject': block(2.0), 'block': block(2.2), 'gain': block(0.2)}
TABLES = {
  'leviathan_table2': (table2, [TIMED]),
  'leviathan_table3': (
    table3,
    traced(temperature=0.0) + traced(temperature=1.0),
  ),
  'leviathan_table5': (table5, lenient(traced())),
  'block_verification_table1': (block_table, [GAIN]),
}
TWO, THREE, FIVE, BLOCK = TABLES


def stored(folder, cells, name='chat', commit='c', gate=None, **machine):
  about = reports.MACHINE | {'commit': commit * 40, 'dirty': False} | machine
  doc = {'asked': ASKED._asdict(), 'quick': False, 'machine': about}
  doc['gate'] = gate
  path = folder / f'{name}.json'
  path.write_text(json.dumps(doc | {'cells': cells}))


def rendered(name, folder):
  return empirical.rendered(table_lib.TABLES[name], folder, ROWS).text


@pytest.mark.parametrize('table', TABLES)
def test_a_page_is_of_what_is_stored_by_one_commit(table, tmp_path):
  with pytest.raises(ValueError, match='no results; run without --render'):
    rendered(table, tmp_path)
  cells = TABLES[table][1]
  stored(tmp_path, cells)
  text = rendered(table, tmp_path)
  assert 'Commit cccccccccccc, 2 cores' in text and 'QUICK' not in text
  assert f'* titles: not run; `bash experiments/{table}/' in text
  assert 'train_rows.sh --multi30k=DIR --models=/nowhere`, then' in text
  changed = json.loads(json.dumps(cells))
  if 'requests' in changed[0]:
    changed[0]['requests'][0][1] = 2.0
  else:
    changed[0] |= {'alpha': 0.5} if table == TWO else {'block': block(3.0)}
  stored(tmp_path, changed)
  assert rendered(table, tmp_path) != text
  stored(tmp_path, cells)
  assert rendered(table, tmp_path) == text
  stored(tmp_path, cells, 'titles', commit='d')
  told = 'titles.json of d{12}, chat.json of cccc'
  with pytest.raises(ValueError, match=told):
    rendered(table, tmp_path)
  readme = programs.ROOT / f'experiments/{table}/README.md'
  assert page.filled(readme.read_text(), ['new'])


def test_a_page_says_which_machine_measured_which_rows(tmp_path):
  for name, cpu in (('titles', 'A'), ('chat', 'B'), ('maths', 'A')):
    stored(tmp_path, TABLES[THREE][1], name, cpu=cpu)
  text = rendered(THREE, tmp_path)
  made = 'Commit cccccccccccc, 2 cores'
  assert f'titles, maths: {made}, A' in text and f' chat: {made}, B' in text


def test_quality_where_sampled_has_the_interval_of_its_change(tmp_path):
  """Of resampled prompts; equal texts at T = 0 need none."""
  spread = np.linspace(-1.0, 1.0, 1001)
  values = {'plain': [20.0, *20 + spread], 'mine': [21.0, *21.52 + 2 * spread]}
  found = table2_measure.compared(values, 'plain', 'mine', 100)
  assert found['quality'] == [20.0, 21.0]
  ends = [found['change'][x] for x in ('low', 'high')]
  half = 1.98422 * np.std(spread) * (100 / 99) ** 0.5  # Student's t of 99
  np.testing.assert_allclose(ends, [1.0 - half, 1.0 + half], rtol=1e-4)
  equal = table2_measure.compared({'a': [9.0], 'b': [9.0]}, 'a', 'b', 100)
  assert equal == {'quality': [9.0, 9.0], 'change': None}
  assert table2_measure.compared({}, 'a', 'b', 9)['quality'] == [None, None]
  stored(tmp_path, [TIMED | found])
  assert '| 20.0 | 21.0 | -0.2 to +2.2 | 0 of 7 |' in rendered(TWO, tmp_path)


def test_quality_of_every_arm_is_of_the_same_resampled_prompts(monkeypatch):
  """The metric here is the mean length; the arms' texts differ in one word."""
  said = {'plain': ['a', 'abc', 'ab'] * 2, 'mine': ['ab', 'abcd', 'abc'] * 2}

  class Programs(NamedTuple):
    generate: staticmethod = staticmethod(lambda weights, request: weights)

  class Arm(NamedTuple):
    name: str

    @property
    def engine(self):
      return types.SimpleNamespace(programs=Programs(), weights=self.name)

  group = types.SimpleNamespace(full=None)
  whole = types.SimpleNamespace(test=())
  monkeypatch.setattr(rows_lib, 'plan', lambda *_: whole)
  monkeypatch.setattr(rows_lib.plan_lib, 'groups', lambda *_: [group])
  monkeypatch.setattr(rows_lib.plan_lib, 'capped', lambda arm, request: None)
  texts_of = lambda loaded, groups, outputs: dict(
    zip('xyzuvw', said[outputs[0]], strict=True)
  )
  monkeypatch.setattr(rows_lib, 'answers_of', texts_of)
  lengths = text_metrics.Metric(
    lambda found, wanted: np.array([[1, len(x)] for x in found]),
    lambda sums_K: sums_K[1] / sums_K[0],
  )
  monkeypatch.setattr(text_metrics, 'metric_of', lambda name: lengths)
  wanted = dict.fromkeys('xyzuvw', '')
  loaded = rows_lib.Loaded(ROWS['translation'], None, None, {}, (), wanted, {})  # pyright: ignore
  arms = Arm('plain'), Arm('mine')
  found = rows_lib.qualities(loaded, arms, 1.0, 0)  # pyright: ignore
  assert found['plain'][0] == 2.0 and np.std(found['plain']) > 0.1
  np.testing.assert_allclose(found['mine'] - found['plain'], 1.0)


def test_the_commit_is_the_last_that_changed_code(tmp_path, monkeypatch):
  monkeypatch.setattr(machine, '__file__', str(tmp_path / 'a/b/machine.py'))

  def git(*args):
    name = ['-c', 'user.name=a', '-c', 'user.email=a']
    subprocess.run(['git', '-C', tmp_path, *name, *args], check=True)

  git('init', '-q')
  heads = []
  for path in 'code.py', 'README.md', 'tests/x_test.py', 'more.py':
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(path)
    git('add', '.')
    git('commit', '-qm', path)
    heads.append((machine.commit(), machine.commit(*page.WRITTEN)))
  (code, _), (readme, _), (test, _), (more, _) = [x for x, _ in heads]
  assert len({code, readme, test, more}) == 4
  assert [x for _, (x, _) in heads] == [code, code, code, more]
  (tmp_path / 'README.md').write_text('changed')
  assert machine.commit(*page.WRITTEN) == (more, False)
  assert machine.commit() == (more, True)


def test_ours_stand_beside_theirs(tmp_path):
  for name, (_, cells) in TABLES.items():
    (tmp_path / name).mkdir()
    stored(tmp_path / name, cells)
  text = rendered(TWO, tmp_path / TWO)
  theirs = '| EnDe, T5-XXL | T5-small | 0 | 7 | 0.75 | 0.02 | - | 3.2x | - |'
  assert f'{theirs} **3.4x** |' in text
  assert (
    '| chat | unigram | 0 | 2 | 0.31 | 0.01 | 1.25 | 1.41x | 1.20x | **1.26x** '
    '| 1.13 to 1.39 | 1.10x | 1.05 = 1.05 x 1.00 | 27.3 | 27.3 | - | 0 of 7 |'
  ) in text
  text = rendered(THREE, tmp_path / THREE)
  assert '| T5-XXL (EnDe) | T5-large | 0.82 | 0.71 | not run | - | - |' in text
  half = '0.50 (0.21 to 0.79)'
  lamda = '| LaMDA (137B) | LaMDA (100M) | 0.61 | 0.57 | chat, eagle |'
  assert f'{lamda} {half} | {half} |' in text
  assert f'|  |  |  |  | chat, bigram | {half} | {half} |' in text
  assert 'at T = 0 and at T = 1: chat 24 and 24.' in text
  text = rendered(FIVE, tmp_path / FIVE)
  assert '| T5-XXL (EnDe) | T5-small | 0.62 | 0.71 | 0.76 | 0.84 |' in text
  lossy = f'{half}, TV 0.12'
  assert f'| chat | bigram | {half} | {" | ".join([lossy] * 3)} |' in text
  text = rendered(BLOCK, tmp_path / BLOCK)
  assert '| PaLM-2-S | LM1B | 8 | 3.21 | 3.49 | +8.7% | the paper |' in text
  ours = '| chat | bigram | 8 | 2.00 | 2.20 | +10.0% (+9.0% to +11.0%) | ours |'
  assert ours in text
  assert '| 2 | 10/9 | 11/9 | 12/9 |' in text and '| T = 0.2 |' not in text
  cooler = [GAIN | {'temperature': t} for t in (0.2, 0.6)]
  cooler[0] |= {'gain': block(0.4)}
  stored(tmp_path / BLOCK, [GAIN, *cooler])
  text = rendered(BLOCK, tmp_path / BLOCK)
  assert '| gain by temperature | draft | T = 0.2 | T = 0.6 | T = 1 |' in text
  assert '| chat | bigram | +20.0% (+19.0% to +21.0%) | +10.0%' in text
  assert text.count(ours) == 1
  assert '9 of 9 are equal to the print' in text
  assert len(papers.TABLE3) == 16 and len(papers.TABLE4) == 12


def test_alpha_and_total_variation_of_each_lenience_keep_their_places(tmp_path):
  """0.1, 0.3, 0.5 and 0.7 of the tokens; 0.02, 0.04 and 0.06 away from p."""
  alphas, away = (0.1, 0.3, 0.5, 0.7), (0.02, 0.04, 0.06)
  lossy = [x for pair in zip(alphas[1:], away, strict=True) for x in pair]
  request = [50, *(50 * x for x in (alphas[0], *lossy))]
  drafts = {x.theirs: x.name for x in ROWS['translation'].drafts}
  cells = [{'draft': x, 'requests': [request] * 6} for x in drafts.values()]
  claimed = [
    x
    for x in table5.claims({'translation': cells}, ROWS)
    if x.cell.startswith('Bigram')
  ]
  assert [x.ours.value for x in claimed] == pytest.approx(alphas)
  assert [x.apart.value for x in claimed] == pytest.approx([0, 0.2, 0.4, 0.6])
  assert [x.sign for x in claimed] == [0, 1, 1, 1]
  assert [x.prints for x in claimed] == ['0.19', '0.23', '0.25', '0.32']
  stored(tmp_path, cells, 'translation')
  shown = [
    f'{a:.2f} ({a:.2f} to {a:.2f}), TV {tv:.2g}'
    for a, tv in zip(alphas[1:], away, strict=True)
  ]
  row = (
    f'| {drafts["Bigram"]} | 0.10 (0.10 to 0.10) | {" | ".join(shown)} | ours |'
  )
  assert row in rendered(FIVE, tmp_path)


def test_two_seeds_of_an_alpha_are_compared_by_the_limit_of_the_table(tmp_path):
  near, far = [[4, 2.0], [4, 2.2]] * 50, [[4, 2.0], [4, 2.6]] * 50
  cells = traced(temperature=1.0, again=near) + traced(temperature=0.0)
  for x in cells:
    x['requests'] = near
  told = table3.seeds({'chat': cells})
  assert told.startswith('Two seeds at T = 1: 0 of 5 alphas differ')
  assert '(Bonferroni: 3.1 standard errors); the largest' in told
  cells[0]['again'] = far
  assert '1: 1 of 5 alphas differ' in table3.seeds({'chat': cells})
  assert 'No alpha has two seeds' in table3.seeds({'chat': cells[5:]})


def claim(low, high, ours, **more):
  interval = intervals.Interval(*ours)
  return claims.Claim('cell', '2', 'row', low, high, interval, **more)


def apart(sign, low, high):
  return {'sign': sign, 'apart': intervals.Interval(1, low, high)}


@pytest.mark.parametrize(
  'wanted, x',
  [
    ('reproduced', claim(0.745, 0.755, (0.7, 0.65, 0.75))),
    ('not', claim(0.745, 0.755, (0.7, 0.65, 0.74))),
    ('reproduced', claim(0.1, 0.45, (0.5, 0.44, 0.6))),
    ('no interval', claim(0.745, 0.755, (0.75,))),
    ('same direction', claim(2, 3, (1.5, 1.4, 1.6), **apart(1, 0.1, 2))),
    ('not', claim(2, 3, (1.5, 1.4, 1.6), **apart(1, -1, 2))),
    ('same direction', claim(2, 3, (4, 3.5, 5), **apart(-1, -2, -0.1))),
    ('not', claim(2, 3, (4, 3.5, 5), **apart(-1, 0.1, 2))),
  ],
)
def test_an_outcome_is_a_rule_over_the_cells(wanted, x):
  assert claims.outcome(x) == wanted


def test_the_report_has_every_table_and_is_of_one_commit(tmp_path):
  tables = [table_lib.TABLES[name] for name in (THREE, FIVE, BLOCK)]
  folders = [tmp_path / x.home.name for x in tables]
  for folder in folders:
    folder.mkdir()
  make = lambda: report.sections(tables, folders, [ROWS] * 3)
  with pytest.raises(ValueError, match='no results of any table; run one'):
    make()
  alphas = zip((0.3, 2, 3, 3.2, 3.3), ROWS['translation'].drafts, strict=True)
  translated = [
    {'draft': x.name, 'temperature': t, 'requests': [[4, a], [4, a + 0.1]] * 3}
    for a, x in alphas
    for t in (0.0, 1.0)
  ]
  stored(folders[0], translated, 'translation')
  worse = GAIN | {'draft': 'unigram', 'reject': block(1.5)}
  stored(folders[2], [worse, GAIN])
  found = make()
  text, page_text = report.markdown(found), report.html(found)
  assert text.split('\n')[2].startswith('Commit cccccccccccc, 2 cores')
  assert 'Not run: `bash experiments/leviathan_table5/run.sh`' in text
  assert 'T5-XXL (EnDe), T5-small, T = 0 | 0.75 | translation, w128 |' in text
  small = [x for x in text.split('\n') if 'T5-small, T = 0' in x]
  assert '0.76 (0.75 to 0.78) | reproduced |' in small[0]
  assert '0.51 (0.50 to 0.53) | same direction | above by 0.2' in text
  assert 'is above Unigram' in text
  brief = report.brief(found)
  assert 'T5-XXL (EnDe), T5-small | translation, w128 | 0.75 / 0.76 |' in brief
  assert '| the paper | ours | gamma = 8 |' in brief
  # Of each target the draft with the most tokens a window; its interval pays
  # for the choice of one of two.
  assert 'chat, bigram' in brief and 'chat, unigram' not in brief
  assert '| +8.5% | chat, bigram | +10.0% (+8.9% to +11.1%) | same dir' in text
  assert page_text.count('<h2>') == 3 and 'src="data:image/png' in page_text
  assert 'src="http' not in page_text and '<link' not in page_text
  translated[4]['requests'][0][1] = 1.0
  stored(folders[0], translated, 'translation')
  assert report.html(make()) != page_text != text
  stored(folders[2], TABLES[BLOCK][1], commit='d')
  with pytest.raises(
    ValueError, match='several commits, leviathan_table3 of c'
  ):
    make()


def test_a_target_that_fails_its_gate_is_a_toy(tmp_path):
  for metric, value, distinct, name in (
    ('bleu', 25.0, 0.95, 'chat'),
    ('bleu', 24.9, 1.0, 'toy chat'),
    ('bleu', 40.0, 0.9, 'toy chat'),
    ('rouge', 25.0, 0.9, 'chat'),  # functions share summaries
    ('rouge', 24.9, 1.0, 'toy chat'),
  ):
    gate = rows_lib.Gate(metric, value, 25.0, distinct, 9)._asdict()
    stored(tmp_path, TABLES[FIVE][1], gate=gate)
    text = rendered(FIVE, tmp_path)
    assert f'| {name} | eagle |' in text
    told = f'* chat: the target has {metric.upper()} {value} on 9 texts'
    assert told in text
    assert ('(a toy below 25.0 and 95%)' in text) == (metric == 'bleu')


def test_a_summary_has_to_say_more_than_the_functions_name(monkeypatch):
  """And its metric is asked for before anything is loaded."""
  row = ROWS['code']
  codes = 'def spread_out(x):', 'def total(x):'
  asked = tuple(
    prompts_lib.Prompt(str(i), turns=(x,)) for i, x in enumerate(codes)
  )
  wanted = {'0': 'spread out', '1': 'Adds.'}
  loaded = rows_lib.Loaded(row, None, None, {}, asked, wanted, {})  # pyright: ignore
  equal = lambda found, wanted: 50.0 * sum(map(str.__eq__, found, wanted))
  monkeypatch.setattr(text_metrics, 'metric_of', lambda name: equal)
  assert rows_lib.least_of(loaded) == 50.0
  translated = loaded._replace(row=ROWS['translation'])
  assert rows_lib.least_of(translated) == rows_lib.BLEU
  monkeypatch.undo()
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  with pytest.raises(ValueError, match='needs rouge-score'):
    rows_lib.load(row, (1,), 1)
  assert rows_lib.quick(row).metric == 'bleu'


def test_rows_without_training_take_the_drafts_that_are_trained(tmp_path):
  rows = rows_lib.all_rows(tmp_path)
  assert not rows['chat'].missing() and not rows['titles'].missing()
  assert rows['translation'].missing()  # whose training makes all of them
  row = rows['chat']._replace(target='random:tiny', prompts='built in')
  (student,) = (x for x in row.drafts if x.name == 'student')
  loaded = lambda x: rows_lib.load(row._replace(drafts=(x,)), (1,), 1).engines
  assert not loaded(student)
  with pytest.raises(ValueError, match='no such file'):
    loaded(student._replace(optional=False))


def test_a_page_shows_the_drafts_that_were_measured_without_their_models(
  tmp_path,
):
  small = '| T5-XXL (CNNDM) | T5-small | 0.65 | 0.53 | '
  requests = [[4, 2.0], [4, 3.0]]
  cells = [
    {'draft': x.name, 'temperature': warm, 'requests': requests}
    | ({'again': requests} if warm else {})
    for x in ROWS['titles'].drafts
    for warm in (0.0, 1.0)
  ]
  stored(tmp_path, cells, 'titles')
  assert f'{small}titles, w128 | 0.6' in rendered(THREE, tmp_path)
  kept = [x for x in cells if x['draft'] != 'w128']
  stored(tmp_path, kept, 'titles')
  assert f'{small}not run |' in rendered(THREE, tmp_path)


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
  done = []

  def measure(loaded, asked):
    if loaded.row.name == 'titles' and len(done) == 1:
      raise KeyboardInterrupt
    done.append(loaded.row.name)
    return TABLES[FIVE][1]

  def load(row, *_):
    opened.append(row.name)
    return types.SimpleNamespace(row=row)

  opened = []
  table = empirical.Table(tmp_path, measure, table5.markdown, table5.claims)
  every = {name: ROWS[name] for name in ('chat', 'titles')}
  monkeypatch.setattr(machine, 'commit', lambda *_: ('a' * 40, False))
  monkeypatch.setattr(rows_lib, 'load', load)
  monkeypatch.setattr(rows_lib, 'gate', lambda row: None)
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
  monkeypatch.setattr(machine, 'commit', lambda *_: ('b' * 40, False))
  del every['titles']
  stored(tmp_path, [], 'gpt')
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
  monkeypatch.setattr(rows_lib, 'plan', lambda *_: Plan())
  loaded = rows_lib.Loaded(ROWS['chat'], None, None, {'a': None}, (), {}, {})  # pyright: ignore
  of = lambda warm, tokens: rows_lib.traces(loaded, warm, tokens, seed=0)
  assert of(1.0, 3) is of(1.0, 3)
  first, second = recorded
  assert first[0] + second[0] == tuple(range(128)) and len(of(1.0, 3)['a']) == 2
  assert first[1] == ['lenient:0.5', 'lenient:0.3', 'lenient:0.1']
  of(0.0, 1)
  assert recorded[2:] == [(first[0], [])]


def captions(folder, name, en, de):
  for language, lines in (('en', en), ('de', de)):
    text = '\n'.join(lines) + '\n'
    path = folder / f'{name}.{language}.gz'
    path.write_bytes(gzip.compress(text.encode()))


def test_captions_are_pairs_and_no_caption_is_in_both_parts(tmp_path):
  captions(tmp_path, 'test_2016_flickr', ['a', 'b'], ['A', 'B'])
  captions(tmp_path, 'train', ['c', 'a', 'd'], ['C', 'X', 'B'])
  names = texts.TEST, texts.TRAIN
  test, train = (texts.pairs(str(tmp_path), x) for x in names)
  assert test[1] == {'en': 'b', 'de': 'B'}
  assert texts.apart(train, test) == [{'en': 'c', 'de': 'C'}]
  captions(tmp_path, 'train', ['c', 'a', 'd'], ['C', 'X'])
  with pytest.raises(ValueError, match='train has 3 lines of English and 2 of'):
    texts.pairs(str(tmp_path), 'train')
  with pytest.raises(ValueError, match='--multi30k=/nowhere: train.en.gz'):
    texts.pairs('/nowhere', 'train')


def test_sentences_of_docstrings_are_texts(tmp_path):
  long = 'Returns what it was given, ' * 4 + '\n  and nothing else.'
  source = f'def f():\n  """Short.\n\n  {long}\n\n  {long[:-1]}\n  """\n'
  for name in ('one.py', 'tests/two.py', 'three.txt'):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
  (tmp_path / 'four.py').write_text('def (')
  found = [*texts.docstrings(tmp_path)]
  assert found == [' '.join(long.split())]
  manual = [x.turns[0] for x in prompts_lib.manual()]
  assert 1000 < len(manual) == len(set(manual))
  kept = texts.apart(
    [{'text': manual[0]}, {'text': 'a'}], [{'text': manual[0]}]
  )
  assert kept == [{'text': 'a'}]


FUNCTION = """
def spread_out(x):
  \'\'\'Says how far apart the values are.

  More of it.
  \'\'\'
  return max(x) - min(x)
"""


def test_functions_are_summed_up_by_the_first_line_of_their_docstring(tmp_path):
  more = 'def a():\n  """Too short."""\n  return 1\n'
  more += 'def b():\n  """Returns nothing whatever it is given."""\n'
  (tmp_path / 'one.py').write_text(FUNCTION + more)
  (tmp_path / 'two').mkdir()
  (tmp_path / 'two/x.py').write_text(FUNCTION.replace('max', 'abs'))
  code = 'def spread_out(x):\n  return max(x) - min(x)'
  summary = 'Says how far apart the values are.'
  first, second = texts.functions(tmp_path)
  assert first == ('one', {'code': code, 'summary': summary})
  assert second[0] == 'two'
  assert texts.name_of(code) == 'spread out'


def test_no_package_function_or_line_is_in_both_parts():
  rows = [
    (f'package{i}', {'code': f'{i} {j}', 'summary': f'{i if j else ""}'})
    for i in range(200)
    for j in range(2)
  ]
  parts = texts.split(rows)
  test, train = parts[texts.HELD], parts[texts.TRAIN]
  seen = lambda part, key: {x[key] for x in part}
  packages = lambda part: {x.split()[0] for x in seen(part, 'code')}
  assert 0 < len(packages(test)) < 30 < len(packages(train))
  assert not packages(test) & packages(train)
  assert not seen(test, 'summary') & seen(train, 'summary')


def refused(message, *arguments):
  run = programs.run('experiments/table.py', THREE, *arguments)
  run.check_refused(message)


def test_a_model_that_is_not_there_is_named_with_its_flag(tmp_path):
  refused(
    '--models=/nowhere: row translation needs /nowhere/translation/model',
    '--rows=translation',
    '--models=/nowhere',
    f'--results={tmp_path}',
  )
  assert not list(tmp_path.iterdir())


@pytest.mark.more
@pytest.mark.parametrize(
  'arguments, message',
  [
    (['--rows=x'], '--rows=x: no such row; allowed are gpt, translation'),
    (['--target=/no', '--draft=/no'], '--target=/no: no such file'),
    (['--target=random:tiny'], '--draft: empty; a pair is'),
    (['--prompts=x'], '--prompts: of --target and --draft'),
    (['--tokens=0'], '--tokens=0: want 1 or more'),
    (['--render'], 'no results; run without --render'),
  ],
)
def test_bad_input_is_one_sentence(arguments, message, tmp_path):
  refused(message, f'--results={tmp_path}', *arguments)


@pytest.mark.slow
@pytest.mark.parametrize('table', TABLES)
def test_tiny_models(table, tmp_path):
  """Measured, then rendered again from what was stored."""
  program = 'experiments/table.py', table
  where = f'--results={tmp_path}'
  done = programs.run(*program, '--quick', '--rows=translation', where).check()
  assert done.out.startswith('QUICK: tiny random models')
  assert '| toy translation' in done.out
  assert '* translation: the target has BLEU' in done.out
  again = programs.run(*program, '--quick', '--render', where).check()
  assert again.out == done.out
