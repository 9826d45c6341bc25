"""scripts/audit.py as a user runs it, with random weights."""

import json

import pytest

from tests import programs

SCRIPT = 'scripts/audit.py'
SETTINGS = (
  *programs.TINY,
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
sys.path.insert(0, '.')
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


def audit(folder, *arguments, program=SCRIPT):
  prompts = f'--config.bench.prompts={folder / "in.jsonl"}'
  return programs.run(program, *SETTINGS, prompts, *arguments)


@pytest.mark.slow
def test_texts_are_identical(folder):
  out = folder / 'out'
  done = audit(folder, f'--workdir={out}').check()
  assert max(map(len, done.out.splitlines()[:-1])) <= 120
  doc = done.document
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
  assert sentence in done.out


@pytest.mark.more
def test_a_planted_bug_is_found(folder):
  planted = folder / 'planted.py'
  planted.write_text(PLANTED)
  done = audit(folder, program=str(planted)).check(1)
  findings = done.document['rows'][0]['audit']['findings']
  assert done.document['total']['bugs'] == len(findings) > 0
  found = findings[0]
  assert found['id'] == 'a[b]' and found['verdict'] == 'BUG'
  assert found['plain'] != found['other']
  assert found['gap'] > 4 * found['noise']
  assert ' a[b] ' in done.out and 'more than 4 times' in done.out
