"""scripts/audit.py as a user runs it, with random weights."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = 'scripts/audit.py'
SETTINGS = (
  '--config=configs/pair.py:tiny',
  "--config.decode.methods=('lookup',)",
  '--config.decode.gammas=(2,)',
  '--config.decode.max_new_tokens=8',
  '--config.bench.batch_size=2',
  '--config.bench.prompts_per_category=0',
)
ROWS = (
  {'tokens': [9, 8, 7, 9, 8, 7, 9, 8], 'id': 'a[b]'},
  {'prompt': 'abcabca'},
  {'prompt': 'what now'},
)
# The script under a rule that accepts whatever is proposed.
PLANTED = f"""
import runpy, sys
from specdec_jax import build
from specdec_jax.verify import chain, reject

def verify(noise, draft, p_BNV):
  found = reject.RULE.verify(noise, draft, p_BNV)
  last = chain.row(p_BNV, draft.count_B)
  return found._replace(accepted_B=draft.count_B, weights_BV=last)

build.RULES['reject'] = reject.RULE._replace(verify=verify, certain=False)
sys.argv[0] = {SCRIPT!r}
runpy.run_path({SCRIPT!r}, run_name='__main__')
"""


@pytest.fixture(scope='module', name='folder')
def _folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('audit')
  text = '\n'.join(json.dumps(row) for row in ROWS)
  (folder / 'in.jsonl').write_text(text + '\n')
  return folder


def audit(folder, *arguments, program=(SCRIPT,)):
  """One process; returns (status, stdout, stderr)."""
  env = dict(os.environ, JAX_PLATFORMS='cpu')
  env['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
  # The same program again is not compiled again.
  env['JAX_COMPILATION_CACHE_DIR'] = str(folder / 'cache')
  env['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  prompts = f'--prompts={folder / "in.jsonl"}'
  done = subprocess.run(
    [sys.executable, *program, *SETTINGS, prompts, *arguments],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stdout, done.stderr


def test_texts_are_identical(folder):
  out = folder / 'out'
  status, printed, err = audit(folder, f'--workdir={out}')
  assert status == 0, err
  assert max(map(len, printed.splitlines()[:-1])) <= 120
  doc = json.loads(printed.splitlines()[-1])
  assert doc == json.loads((out / 'audit.json').read_text())
  t = doc['total']
  assert (t['texts'], t['identical'], t['ties'], t['bugs']) == (4, 4, 0, 0)
  # The second batch is filled with the first prompt: no new positions.
  assert (t['tokens'], t['positions']) == (32, 24)
  assert doc['rows'][0]['audit']['compared'] == [8, 8, 8, 8]
  # 1 - 0.05 ** (1 / 24).
  assert t['bugs_at_most'] == pytest.approx(117.3, abs=0.1)
  assert doc['rows'][0]['counts']['accepted_tokens'] > 0
  sentence = '4 texts, 32 tokens compared: 4 identical, 0 ties, 0 BUG'
  assert sentence in printed


@pytest.mark.more
def test_a_planted_bug_is_found(folder):
  out = folder / 'bug'
  status, printed, err = audit(
    folder, f'--workdir={out}', program=('-c', PLANTED)
  )
  assert status == 1, err
  doc = json.loads(printed.splitlines()[-1])
  findings = doc['rows'][0]['audit']['findings']
  assert doc['total']['bugs'] == len(findings) > 0
  found = findings[0]
  assert found['id'] == 'a[b]' and found['verdict'] == 'BUG'
  assert found['plain'] != found['other']
  assert found['gap'] > 4 * found['noise']
  assert ' a[b] ' in printed and 'more than 4 times' in printed


@pytest.mark.parametrize(
  'argument, expected',
  [
    ('--config.sampling.temperature=0.8', 'config.decode.rule=coupled'),
    ('--workdir=/dev/null/below', 'workdir /dev/null/below: cannot be'),
    pytest.param(
      '--config.target.sorce=x',
      "unknown config key 'sorce'",
      marks=pytest.mark.more,
    ),
  ],
)
def test_refusals(folder, argument, expected):
  status, out, err = audit(folder, argument)
  assert status == 2 and err.startswith('audit.py: ') and expected in err
  assert len(err.strip().splitlines()) == 1 and not out


@pytest.mark.more
def test_a_config_that_is_not_there():
  command = [sys.executable, SCRIPT, '--config=nope.py']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 2 and not done.stdout
  assert done.stderr == 'audit.py: config nope.py: no such file\n'
