"""scripts/ngram.py as a user runs it."""

import json
import pathlib
import subprocess
import sys

import pytest

from specdec_jax import build
from specdec_jax.io import ngrams

ROOT = pathlib.Path(__file__).parents[1]


def script(*arguments):
  command = [sys.executable, str(ROOT / 'scripts/ngram.py'), *arguments]
  return subprocess.run(command, capture_output=True, text=True)


def test_counts_a_text(tmp_path):
  corpus, output = tmp_path / 'a.txt', tmp_path / 'a.ngram'
  corpus.write_text('to be or not to be')
  done = script(
    '--target=random:tiny', f'--output={output}', f'--corpus={corpus}'
  )
  assert done.returncode == 0, done.stderr
  said = json.loads(done.stdout.splitlines()[-1])
  assert said['order'] == '4' and said['tokens'] == '18'
  assert said['bytes'] == output.stat().st_size
  own = build.load('random:tiny').tokenizer
  assert said['tokenizer'] == own.fingerprint()
  order, counts = ngrams.read(str(output), own)
  assert order == 4 and len(counts.token_J) == said['ngrams'] > 10


@pytest.mark.parametrize(
  'arguments, message',
  [
    ([], '--target=SOURCE and --output=FILE'),
    (['--target=random:tiny', '--output={}/a', '--corpus={}/none'], 'not read'),
    (['--target=random:tiny', '--output={}/a', '--corpus={}/short'], 'order'),
    # Before anything is read: counting takes minutes.
    (
      ['--target=random:tiny', '--output={}/no/a', '--corpus={}/none'],
      'ngram.py: output {0}/no/a: there is no folder {0}/no: make it first',
    ),
    (['--target=random:tiny', '--output={}', '--corpus={}/none'], 'not a file'),
  ],
)
def test_bad_input_is_one_sentence(arguments, message, tmp_path):
  (tmp_path / 'short').write_text('ab')
  before = sorted(tmp_path.iterdir())
  done = script(*(x.format(tmp_path) for x in arguments))
  assert done.returncode == 2
  (line,) = done.stderr.strip().splitlines()
  assert line.startswith('ngram.py: ')
  assert message.format(tmp_path) in line
  assert sorted(tmp_path.iterdir()) == before
