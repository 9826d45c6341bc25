"""Pages of the empirical tables: what is stored, beside what papers print."""

import dataclasses
import json
import pathlib
import re

import pytest
from absl.testing import flagsaver

from experiments import claims, loaded, page, papers, report
from experiments import rows as rows_lib
from experiments import table as table_lib
from experiments.leviathan_table3 import render as table3
from experiments.leviathan_table5 import render as table5
from specdec_jax.bench import intervals
from tests import programs

ROWS = rows_lib.all_rows(pathlib.Path('/nowhere'))
RESULTS = programs.ROOT / 'experiments/leviathan_table2/results'
STORED = json.loads((RESULTS / 'chat.json').read_text())


def traced(requests=((4, 1.0), (4, 3.0)), row='chat', **more):
  return [
    {'draft': draft.name, 'requests': list(requests) * 3, **more}
    for draft in ROWS[row].drafts
    if not draft.optional
  ]


def alphas(row='chat', **more):
  return [x for t in (0.0, 1.0) for x in traced(row=row, temperature=t, **more)]


def block(value):
  return {'value': value, 'low': value - 0.02, 'high': value + 0.02}


GAIN = {'gamma': 8, 'temperature': 1.0, 'tokens': 8, 'draft': 'bigram'}
GAIN |= {'reject': block(2.0), 'block': block(2.2), 'gain': block(0.2)}
CELLS = {
  'leviathan_table2': STORED['cells'],
  'leviathan_table3': alphas(),
  'leviathan_table5': traced([(4, x, *[x, 0.5] * 3) for x in (1.0, 3.0)]),
  'block_verification_table1': [GAIN],
}
TWO, THREE, FIVE, BLOCK = CELLS


def stored(
  folder, cells, name='chat', commit='c', gate=None, quick=False, **machine
):
  about = STORED['machine'] | {'commit': commit * 40, 'cores': 2} | machine
  doc = {'quick': quick, 'machine': about, 'gate': gate, 'cells': cells}
  folder.mkdir(exist_ok=True)
  (folder / f'{name}.json').write_text(json.dumps(doc))


def rendered(name, folder):
  found = report.rendered(table_lib.TABLES[name], folder, ROWS)
  return '\n'.join([found.outcome, found.text]).lstrip()


@pytest.mark.parametrize('table', CELLS)
def test_a_page_is_of_what_is_stored_by_one_commit(table, tmp_path):
  run = f'bash experiments/{table}/run.sh'
  assert rendered(table, tmp_path) == f'Not run: `{run}`.'
  cells = CELLS[table]
  stored(tmp_path, cells)
  text = rendered(table, tmp_path)
  assert '\nCommit cccccccccccc, 2 cores' in text
  assert f'* titles: not run; `{run} --rows=titles`' in text
  assert 'train_rows.sh --multi30k=DIR --models=/nowhere`, then' in text
  stored(tmp_path, cells, 'titles', commit='d')
  with pytest.raises(ValueError, match='titles.json of d{12}, chat.json of cc'):
    rendered(table, tmp_path)


def test_a_page_says_which_machine_measured_which_rows(tmp_path):
  for name, cpu in (('titles', 'A'), ('chat', 'B'), ('maths', 'A')):
    stored(tmp_path, CELLS[THREE], name, cpu=cpu)
  text = rendered(THREE, tmp_path)
  made = 'Commit cccccccccccc, 2 cores'
  assert f'titles, maths: {made}, A' in text and f' chat: {made}, B' in text


def test_one_row_of_tiny_models_is_warned_of(tmp_path):
  stored(tmp_path, CELLS[THREE], 'chat')
  assert 'QUICK' not in rendered(THREE, tmp_path)
  stored(tmp_path, CELLS[THREE], 'maths', quick=True)
  assert rendered(THREE, tmp_path).startswith('QUICK: tiny random models')


def test_alpha_and_total_variation_of_each_lenience_keep_their_places(tmp_path):
  """0.1, 0.3, 0.5 and 0.7 of the tokens; 0.02, 0.04 and 0.06 away from p."""
  values = [0.1, 0.3, 0.5, 0.7]
  request = [50, *(50 * x for x in (0.1, 0.3, 0.02, 0.5, 0.04, 0.7, 0.06))]
  cells = traced([request, request], 'translation')
  every = table5.claims({'translation': cells}, ROWS)
  found = [x for x in every if x.cell.startswith('Bigram')]
  assert [x.ours.value for x in found] == pytest.approx(values)
  assert not any(x.sign for x in found)  # a theorem
  assert [x.prints for x in found] == ['0.19', '0.23', '0.25', '0.32']
  stored(tmp_path, cells, 'translation')
  text = rendered(FIVE, tmp_path)
  assert '0.10 (0.10 to 0.10) | 0.30 (0.30 to 0.30), TV 0.02 | 0.50' in text


def test_two_seeds_of_an_alpha_are_compared_by_the_limit_of_the_table():
  near, far = [[4, 2.0], [4, 2.2]] * 50, [[4, 2.0], [4, 2.6]] * 50
  cells = traced(near, temperature=1.0, again=near) + traced(near)
  for x in cells:
    x['requests'] = near
  told = table3.seeds({'chat': cells})
  assert told.startswith('Two seeds at T = 1: 0 of 5 alphas differ')
  assert '(Bonferroni: 3.1 standard errors); the largest' in told
  cells[0]['again'] = far
  assert '1: 1 of 5 alphas differ' in table3.seeds({'chat': cells})
  assert 'No alpha has two seeds' in table3.seeds({'chat': cells[5:]})


def claim(low, high, ours, sign=0, apart=(None, None), none=0.0):
  return claims.Claim(
    *('cell', '2', 'row', low, high, intervals.Interval(*ours)),
    none=none,
    sign=sign,
    apart=intervals.Interval(1, *apart),
  )


@pytest.mark.parametrize(
  'wanted, x',
  [
    ('reproduced', claim(0.745, 0.755, (0.7, 0.65, 0.75))),
    ('not', claim(0.745, 0.755, (0.7, 0.65, 0.74))),
    ('reproduced', claim(0.1, 0.45, (0.46, 0.44, 0.48))),
    ('cannot tell', claim(0.1, 0.45, (0.5, 0.44, 0.6))),
    ('same direction', claim(0.1, 0.45, (0.5, 0.44, 0.6), 1, (0.44, 0.6))),
    # A speed's effect is what is above 1.
    ('reproduced', claim(1.915, 1.925, (1.9, 1.7, 2.1), none=1.0)),
    ('cannot tell', claim(1.915, 1.925, (1.9, 1.6, 2.1), none=1.0)),
    ('same direction', claim(1.9, 1.9, (1.9, 1.6, 2.1), 1, (0.6, 1.1), 1.0)),
    # A number that may be that of no effect cannot be met.
    ('cannot tell', claim(-0.002, 0, (0, 0, 0))),
    ('no interval', claim(0.745, 0.755, (0.75,))),
    ('same direction', claim(2, 3, (1.5, 1.4, 1.6), 1, (0.1, 2))),
    ('not', claim(2, 3, (1.5, 1.4, 1.6), 1, (-1, 2))),
    ('same direction', claim(2, 3, (4, 3.5, 5), -1, (-2, -0.1))),
    ('not', claim(2, 3, (4, 3.5, 5), -1, (0.1, 2))),
  ],
)
def test_an_outcome_is_a_rule_over_the_cells(wanted, x):
  assert claims.outcome(x) == wanted


def test_each_thing_that_claims_are_of_is_counted_apart():
  met = claim(0.745, 0.755, (0.75, 0.74, 0.76))
  wide = claim(0.1, 0.45, (0.5, 0.3, 0.7))
  every = [met, wide._replace(of='quality'), met._replace(of='quality'), wide]
  counts = lambda *x: dict(zip(claims.OUTCOMES[:4], x, strict=True))
  assert claims.counts([met, *every[1:3]]) == {
    'speed': counts(1, 0, 0, 0),
    'quality': counts(1, 0, 0, 1),
  }
  told = '1 reproduced, 0 same direction, 0 not, 1 cannot tell'
  assert claims.told(every) == f'**Of speed: {told}; quality: {told}.**'
  reasons = [x.rpartition(' | ')[2] for x in claims.lines(every)[2:6]]
  assert reasons == [' |', 'meets it, but is too wide |'] * 2


def test_the_report_has_every_table_and_is_of_one_commit(tmp_path):
  names = THREE, FIVE, BLOCK
  tables = [table_lib.TABLES[name] for name in names]
  folders = [tmp_path / name for name in names]
  make = lambda: report.pages(tables, folders, [ROWS] * 3)
  with pytest.raises(ValueError, match='no results of any table; run one'):
    make()
  stored(folders[0], CELLS[THREE])
  worse = GAIN | {'draft': 'unigram', 'reject': block(1.5)}
  stored(folders[2], [worse, GAIN])
  found = make()
  text = report.markdown(found)
  assert 'Not run: `bash experiments/leviathan_table5/run.sh`' in text
  # Of each target the draft with the most tokens a window; its interval pays
  # for the choice of one of two.
  best = 'average, gamma = 8 | +8.5% | +10.0% (+8.9% to +11.1%) | chat, bigram'
  assert f'| not | {best} | 2.00 tokens a window' in text
  assert '| chat, unigram | ' not in text.partition('## Block')[2]
  summary = report.summary(found).split('\n')
  assert len(summary) == 2 + len(names) and '(commit ccccccc)' in summary[0]
  assert summary[3].endswith(' | - | - | - | - | - | not run |')
  assert ' | tokens a window | 0 | 0 | 1 | 0 | ' in summary[4]
  stored(folders[2], CELLS[BLOCK], commit='d')
  with pytest.raises(
    ValueError, match='several commits, leviathan_table3 of c'
  ):
    make()


@pytest.mark.more
@pytest.mark.parametrize('name', [*table_lib.TABLES, *table_lib.PAGES])
def test_a_readme_shows_what_is_stored(name):
  """Every page whole, from real results: what no other test repeats."""
  home, outcome = programs.ROOT / 'experiments' / name, ''
  if name in table_lib.PAGES:
    doc = json.loads((home / f'results/{name}.json').read_text())
    text = table_lib.PAGES[name].markdown(doc)
  else:
    table = table_lib.TABLES[name]
    rows = table.rows or (lambda models, *_: rows_lib.all_rows(models))
    every = rows(rows_lib.ROOT / 'results/rows', '', '')
    found = report.rendered(table, home / 'results', every)
    text, outcome = found.text, found.outcome
  readme = (home / 'README.md').read_text()
  assert readme == page.filled(readme, text.split('\n'))
  if outcome:
    assert readme == page.filled(readme, outcome.split('\n'), 'outcome')
  for picture in re.findall(r'\]\((results/.*?\.png)\)', text + outcome):
    assert (home / picture).exists()


@pytest.mark.parametrize(
  'metric, value, distinct, toy',
  [
    ('bleu', 25.0, 0.95, False),
    ('bleu', 24.9, 1.0, True),
    ('bleu', 40.0, 0.9, True),
    ('rouge', 25.0, 0.9, False),  # functions share summaries
    ('rouge', 24.9, 1.0, True),
  ],
)
def test_a_target_that_fails_its_gate_is_a_toy(
  metric, value, distinct, toy, tmp_path
):
  gate = loaded.Gate(metric, value, 25.0, distinct, 9)._asdict()
  stored(tmp_path, CELLS[FIVE], gate=gate)
  text = rendered(FIVE, tmp_path)
  assert f'| {"toy " * toy}chat | eagle |' in text
  assert f'* chat: the target has {metric.upper()} {value} on 9 texts' in text


def test_the_rows_are_read_with_the_models_of_a_folder():
  """And the papers' tables have as many rows as in print."""
  assert len(papers.TABLE3) == 16 and len(papers.TABLE4) == 12
  gpt, maths = ROWS['gpt'], ROWS['maths']
  assert gpt.target == gpt.missing()[0] == '/nowhere/gpt/model'
  chat = dataclasses.replace(ROWS['chat'], name='maths', theirs='')
  assert maths == dataclasses.replace(chat, prompts='questions:maths')
  inside = rows_lib.all_rows(rows_lib.ROOT / 'results/rows')
  assert inside['gpt'].command.endswith('--models=results/rows')


@pytest.mark.parametrize(
  'given, message',
  [
    (dict(rows=['x']), '--rows=x: no such row; allowed are gpt, translation'),
    (
      dict(rows=['translation'], models='/nowhere'),
      '--models=/nowhere: row translation needs /nowhere/translation/model',
    ),
    (dict(target='/no', draft='/no'), '--target=/no: no such file'),
    (dict(target='random:tiny'), '--draft: empty; a pair is'),
    (dict(prompts='x'), '--prompts: of --target and --draft'),
    (dict(tokens=0), '--tokens=0: want 1 or more'),
    (dict(render=True), 'no results; run without --render'),
  ],
)
def test_bad_input_is_one_sentence(given, message, tmp_path):
  with flagsaver.flagsaver(**dict(results=str(tmp_path)) | given):
    with pytest.raises(ValueError, match=re.escape(message)):
      table_lib.run([THREE])
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize('table', CELLS)
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
