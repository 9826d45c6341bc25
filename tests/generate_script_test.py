"""scripts/generate.py as a user runs it, with random weights."""

import json
import re

import pytest

from tests import programs

# With 8 new tokens and gamma 2 all share a buffer of 64, later turns too: one
# program for a batch size.
ROWS = (
  {'prompt': 'abcabca'},
  {'turns': ['one two', '3'], 'id': 'a/b'},
  {'tokens': [9, 8, 7, 9, 8, 7, 9, 8], 'id': 12},
  {'prompt': 'what now'},
)
SETTINGS = (
  *programs.TINY,
  '--config.target.dtype=float64',
  '--config.decode.rule=coupled',
  '--config.sampling.temperature=0.8',
)


def generate(folder, *arguments, output='out.jsonl'):
  files = f'--prompts={folder / "in.jsonl"}', f'--output={folder / output}'
  return programs.run(
    'scripts/generate.py', *SETTINGS, *files, *arguments, JAX_ENABLE_X64='1'
  )


def write(folder, rows):
  (folder / 'in.jsonl').write_text('\n'.join(map(json.dumps, rows)))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A complete run in batches of 3."""
  folder = tmp_path_factory.mktemp('generate')
  write(folder, ROWS)
  done = generate(folder, '--config.bench.batch_size=3').check()
  assert '4 answers' in done.err  # The progress bar.
  summary = done.document
  assert (summary['prompts'], summary['answers']) == (4, 5)
  assert summary['lossless'] and 'LOSSY' not in done.out
  return folder


@pytest.mark.more
def test_lines_and_another_seed(folder):
  before = (folder / 'out.jsonl').read_bytes()
  rows = [json.loads(x) for x in before.splitlines()]
  *rows, last = rows  # two turns last longer
  assert {row['id'] for row in rows} == {'0', '12', '3'}
  assert last['id'] == 'a/b' and [len(x) for x in last['tokens']] == [8, 8]
  for row in rows:
    assert row['metrics']['emitted_tokens'] == len(row['tokens']) == 8
    assert row['finish_reason'] == 'length'
  done = generate(folder, '--config.sampling.seed=1').check(2)
  assert 'out.jsonl:1: was answered with another' in done.err
  assert (folder / 'out.jsonl').read_bytes() == before


@pytest.mark.more
def test_goes_on_to_the_same_lines_and_shows_a_page(folder):
  """Neither where it stopped, nor the batch, nor a page changes a token."""
  before = (folder / 'out.jsonl').read_bytes()
  first = before.index(b'\n') + 1
  (folder / 'again.jsonl').write_bytes(before[: first + 30])
  page = folder / 'page.html'
  done = generate(folder, f'--html={page}', output='again.jsonl').check()
  assert done.document['answers'] == 4
  after = (folder / 'again.jsonl').read_bytes()
  assert sorted(after.splitlines()) == sorted(before.splitlines())
  (text,) = re.findall('id="record">(.*)</script>', page.read_text('utf-8'))
  record = json.loads(text)
  titles = [x['title'] for x in record['answers']]
  assert titles == ['12', '3', 'a/b', 'a/b, turn 2']
  counts = [x['counts']['emitted_tokens'] for x in record['answers']]
  assert counts == [8] * 4
  assert '--config.decode.rule=coupled' in record['setting']['command']


def test_a_lossy_rule_is_called_lossy(tmp_path):
  write(tmp_path, [ROWS[0] | dict(max_new_tokens=3)])  # its own setting
  done = generate(tmp_path, '--config.decode.rule=lenient:0.5').check()
  assert done.document['tokens'] == 3
  assert 'The rule lenient:0.5 is LOSSY' in done.out
  assert not done.document['lossless']
