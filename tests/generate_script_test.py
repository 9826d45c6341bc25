"""scripts/generate.py as a user runs it, with random weights."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# With 8 new tokens and gamma 2 all share a buffer of 32, later turns too: one
# program for a batch size.
ROWS = (
  {'prompt': 'abcabca'},
  {'turns': ['one two', '3'], 'id': 'a/b'},
  {'tokens': [9, 8, 7, 9, 8, 7, 9, 8], 'id': 12},
  {'prompt': 'what now'},
)
SETTINGS = (
  '--config=configs/pair.py:tiny',
  '--config.target.dtype=float64',
  "--config.decode.methods=('lookup',)",
  '--config.decode.gammas=(2,)',
  '--config.decode.rule=coupled',
  '--config.decode.max_new_tokens=8',
  '--config.sampling.temperature=0.8',
)


def generate(folder, *arguments, output='out.jsonl', cache=None):
  """One process; returns (status, stdout, stderr)."""
  env = dict(os.environ, JAX_ENABLE_X64='1', JAX_PLATFORMS='cpu')
  if cache is not None:
    # The same program again is not compiled again.
    env['JAX_COMPILATION_CACHE_DIR'] = str(cache)
    env['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  done = subprocess.run(
    [
      sys.executable,
      'scripts/generate.py',
      *SETTINGS,
      f'--prompts={folder / "in.jsonl"}',
      f'--output={folder / output}',
      *arguments,
    ],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stdout, done.stderr


def write(folder, rows):
  text = '\n'.join(x if isinstance(x, str) else json.dumps(x) for x in rows)
  (folder / 'in.jsonl').write_text(text + '\n')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A complete run in batches of 3."""
  folder = tmp_path_factory.mktemp('generate')
  write(folder, ROWS)
  (folder / 'cache').mkdir()
  status, out, err = generate(
    folder, '--config.bench.batch_size=3', cache=folder / 'cache'
  )
  assert status == 0, err
  assert 'answers 1 to 4' in err  # The progress bar.
  summary = json.loads(out.splitlines()[-1])
  assert (summary['written'], summary['skipped']) == (4, 0)
  return folder


def test_lines_and_a_second_run(folder):
  rows = [json.loads(x) for x in (folder / 'out.jsonl').open()]
  assert [row['id'] for row in rows] == ['0', 'a/b', '12', '3']
  assert [len(x) for x in rows[1]['tokens']] == [8, 8]
  for row in (rows[0], rows[2], rows[3]):
    assert row['metrics']['emitted_tokens'] == len(row['tokens']) == 8
    assert row['finish_reason'] == 'length'
  before = (folder / 'out.jsonl').read_bytes()
  status, out, _ = generate(folder, '--config.bench.batch_size=3')
  assert status == 0 and 'nothing to do' in out
  assert json.loads(out.splitlines()[-1])['skipped'] == 4
  assert (folder / 'out.jsonl').read_bytes() == before


def test_goes_on_to_the_same_bytes(folder):
  before = (folder / 'out.jsonl').read_bytes()
  # Inside the third line, and so inside the first batch.
  end = [i for i, byte in enumerate(before) if byte == 10][1]
  (folder / 'again.jsonl').write_bytes(before[: end + 30])
  meta = (folder / 'out.jsonl.meta.json').read_bytes()
  (folder / 'again.jsonl.meta.json').write_bytes(meta)
  status, out, err = generate(
    folder,
    '--config.bench.batch_size=3',
    output='again.jsonl',
    cache=folder / 'cache',
  )
  assert status == 0, err
  assert json.loads(out.splitlines()[-1])['skipped'] == 2
  assert (folder / 'again.jsonl').read_bytes() == before


def test_the_batch_changes_no_token_nor_does_a_page(folder):
  page = folder / 'page.html'
  status, _, err = generate(folder, f'--html={page}', output='one.jsonl')
  assert status == 0, err
  assert (folder / 'one.jsonl').read_bytes() == (
    folder / 'out.jsonl'
  ).read_bytes()
  text = page.read_text('utf-8')
  titles = re.findall('<h2>(.*?)</h2>', text)
  assert titles == ['0', 'a/b, turn 1', 'a/b, turn 2', '12', '3']
  assert '<b>40</b> tokens' in text and '--config.decode.rule=coupled' in text
  rows = [json.loads(x) for x in (folder / 'out.jsonl').open()]
  ids = re.findall(r'<tr id="a4t\d+">(?:<td>.*?</td>){2}<td>(\d+)', text)
  assert list(map(int, ids)) == rows[3]['tokens']


def test_a_lossy_rule_is_called_lossy(folder, tmp_path):
  _, out, _ = generate(folder)  # nothing to do
  assert json.loads(out.splitlines()[-1])['lossless'] and 'LOSSY' not in out
  write(tmp_path, ROWS[:1])
  status, out, err = generate(tmp_path, '--config.decode.rule=lenient:0.5')
  assert status == 0, err
  assert 'The rule lenient:0.5 is LOSSY' in out
  assert not json.loads(out.splitlines()[-1])['lossless']


def test_refuses_another_seed(folder):
  before = (folder / 'out.jsonl').read_bytes()
  status, _, err = generate(folder, '--config.sampling.seed=1')
  assert status == 2 and 'sampling.seed was 0, now 1' in err
  assert (folder / 'out.jsonl').read_bytes() == before


@pytest.mark.parametrize(
  'rows, arguments, expected',
  [
    (['{"prompt": '], (), 'in.jsonl:1: not JSON'),
    ([ROWS[0], {'tokens': [300]}], (), "in.jsonl:2: prompt '1': token id 300"),
    (ROWS, ('--config.bench.batchsize=3',), 'unknown config key'),
    (ROWS, ('--config=nope.py',), "config: No such file or directory: 'nope"),
    (ROWS, ('--config=configs/pair.py:small',), "argument 'small': allowed"),
    (ROWS, ('--config.bench.batch_size=0',), 'bench.batch_size=0'),
    (ROWS, ('--output=/nowhere/at/all.jsonl',), 'no folder /nowhere/at'),
    (ROWS, ('--html=/nowhere/page.html',), 'html /nowhere/page.html: there is'),
  ],
)
def test_mistakes_leave_no_file(tmp_path, rows, arguments, expected):
  write(tmp_path, rows)
  status, out, err = generate(tmp_path, *arguments)
  assert status == 2 and expected in err and not out
  assert len(err.strip().splitlines()) == 1 and 'Traceback' not in err
  assert [p.name for p in tmp_path.iterdir()] == ['in.jsonl']
