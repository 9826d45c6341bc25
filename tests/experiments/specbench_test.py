"""Questions are read or refused, and the tables hold the document's figures."""

import json

import pytest

from experiments.specbench import questions, render
from specdec_jax.bench import prompts
from tests import programs
from tests.experiments import reports


def line(id, category, *turns, **more):
  turns = list(turns) or ['What?']
  return dict(question_id=id, category=category, turns=turns) | more


def written(folder, *rows):
  path = folder / 'question.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
  return str(path)


def test_the_first_of_each_category_in_the_files_order(tmp_path):
  rows = [line(81, 'writing', 'a', 'b', reference=['x'])]
  more = (82, 'qa'), (83, 'writing'), (84, 'qa'), (85, 'qa')
  path = written(tmp_path, *rows, *(line(*x) for x in more))
  ids = lambda limit: [q.id for q in questions.read(path, limit)]
  assert ids(0) == ['81', '82', '83', '84', '85']
  assert ids(2) == ['81', '82', '83', '84']
  assert ids(1) == ['81', '82']
  about = questions.describe(path, questions.read(path, 1))
  assert (about['questions'], about['turns_left_out']) == (2, 1)
  assert about['file'] == 'question.jsonl' and len(about['sha256']) == 64


def test_mt_bench_is_one_column_beside_others_and_eight_alone():
  make = lambda *names: [prompts.Prompt(x, x, ('?',)) for x in names]
  columns = lambda found: [q.category for q in questions.grouped(found)]
  assert columns(make('writing', 'qa', 'math', 'math_reasoning')) == [
    *('multi-turn', 'qa', 'multi-turn', 'math_reasoning')
  ]
  assert columns(make(*questions.MT_BENCH)) == list(questions.MT_BENCH)


@pytest.mark.parametrize(
  'rows, message',
  [
    ([line(1, 'qa'), {'turns': ['x'], 'question_id': 2}], ':2: has no categ'),
    ([line(1, 'qa', 5)], r':1: turns\[0\] is 5'),
  ],
)
def test_another_format_is_refused_by_its_line(tmp_path, rows, message):
  with pytest.raises(ValueError, match=message):
    questions.read(written(tmp_path, *rows))
  with pytest.raises(ValueError, match='--questions is missing'):
    questions.read('')


def row(improvement, efficiency, **more):
  counts = dict(block_efficiency=efficiency)
  gain = reports.gain(improvement)
  return dict(name='lookup', improvement=gain, counts=counts) | more


def markdown(promised, *findings, alpha=None):
  """The page of two categories and one method."""
  doc = reports.stored('specbench')
  doc['setting'] |= dict(lossless=promised != 'nothing')
  own = dict(gamma=4, audit=reports.audit(promised, *findings), alpha=alpha)
  doc['rows'][1:] = [row(1.375, 1.4375, **own)]
  doc['categories'] = [
    row(1.0625, 1.25, category='qa'),
    row(0.5, 2.0, category='rag'),
  ]
  return render.markdown(doc)


def test_what_is_lossy_or_differs_is_said():
  text = markdown('tokens', 'tie')
  # Of the row, not a mean of the columns.
  assert (
    '| lookup | ~1.06x | 0.50x | 1.44 | 1.38x (1.24 to 1.51) | 1 of 7: 1 tie |'
    in text
  )
  assert '| same distribution |' in markdown('distribution')
  lossy = markdown('nothing', alpha=dict(total_variation=0.125))
  assert lossy.count('| lookup (LOSSY, TV 0.12) |') == 2
  assert '| LOSSY |' in lossy
  assert 'lookup (LOSSY, TV unknown) |' in markdown('nothing')


@pytest.mark.slow
def test_a_run_with_random_models(tmp_path):
  rows = [line(i, 'ab'[i % 2], f'tell me {i}', 'more') for i in range(6)]
  done = programs.run(
    'experiments/specbench/table.py',
    f'--questions={written(tmp_path, *rows)}',
    f'--results={tmp_path}/results',
    '--config=configs/pair.py:tiny',
    "--config.decode.methods=('lookup',)",
    '--config.decode.max_new_tokens=6',
  ).check()
  doc = done.document
  saved = (tmp_path / 'results/specbench.json').read_text()
  assert json.loads(saved) == doc
  assert (tmp_path / 'results/specbench.md').read_text() in done.out
  # The tiny config takes two of a category.
  assert doc['questions']['questions'] == 4
  assert [c['category'] for c in doc['categories']] == ['a', 'b']
  assert doc['rows'][1]['audit']['findings'] == []
