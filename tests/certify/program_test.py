"""scripts/certify.py: what it prints and refuses, and a user's own parts."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from specdec_jax.certify import base, load, program

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
  'what, path, message',
  [
    ('rule', 'tests.own_rules', 'want package.module:function'),
    ('rule', 'no.such.module:f', 'importing no.such.module failed'),
    ('rule', 'tests.own_rules:absent', 'tests.own_rules has no absent'),
    ('rule', 'tests.own_rules:wrong_arguments', 'takes (noise, draft); want'),
    ('rule', 'tests.own_rules:no_verdict', 'want types.Verdict(accepted_B'),
    ('rule', 'specdec_jax.types:ORIGINS', 'is not callable; want'),
    ('rule', 'tests.own_rules:LOSSY', 'lossless=False, so there is nothing'),
    ('rule', 'lenient:0.5', 'lossless=False, so there is nothing to certify'),
    ('rule', 'lenient', 'lenient'),
    ('rule', 'tests.own_rules:no_empty_window', 'called with 0 sampled drafts'),
    ('rule', 'tests.own_rules:says_nothing', 'it raised AssertionError'),
    ('rule', 'tests.own_rules:hotter_by', 'takes (heat); want'),
    ('rule', 'tests.own_rules:hotter_by:0', 'it raised ZeroDivisionError'),
    ('drafter', 'tests.own_rules:says_much', 'it raised ValueError: no'),
    ('drafter', 'tests.own_rules:makes_nothing', 'it made None; want'),
    ('drafter', 'tests.own_rules:needs_more', 'takes (model, corpus'),
    ('drafter', 'specdec_jax.types:PROMPT', 'is not callable; want make('),
  ],
)
def test_what_does_not_fit_is_one_sentence(what, path, message):
  with pytest.raises(ValueError) as error:
    getattr(load, what)(path)
  assert what in str(error.value) and message in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'path, name',
  [
    ('block', 'block'),
    ('specdec_jax.verify.reject:RULE', 'reject'),
    ('specdec_jax.verify.reject:verify', 'verify'),
    ('tests.own_rules:hotter_by:1.02', 'hotter by 1.02'),
  ],
)
def test_a_rule_comes_from_the_table_a_path_or_a_factory(path, name):
  subject = load.subject(path, '', '', seed=0)
  assert list(subject.rules) == [name] and subject.brought == ('rule',)
  assert list(subject.drafters) == ['lm', 'lookup']


@pytest.mark.parametrize(
  'path, name', [('lookup', 'lookup'), ('tests.own_rules:uniform_q', 'uniform')]
)
def test_a_drafter_is_called_by_its_own_name(path, name):
  subject = load.subject('', path, '', seed=0)
  assert list(subject.drafters) == [name] and subject.brought == ('drafter',)


@pytest.mark.more
def test_a_rule_that_draws_for_itself_passes_where_it_can_be_judged():
  """The page's rule: strict equality, lossless, under any drafter."""
  text = (ROOT / 'docs/your_own_drafter.md').read_text()
  blocks = re.findall(r'```python\n(.*?)```', text, re.S)
  code = next(x for x in blocks if "types.Rule('agree'" in x)
  names = {}
  exec(compile(code.split('target =')[0], 'agree', 'exec'), names)
  rule, drafter = names['agree'], names['repeat']
  subject = base.Subject(
    {rule.name: rule},
    {drafter.name: lambda world, gamma: (drafter, ())},
    brought=('rule', 'drafter'),
  )
  wanted = {
    'windows-enumerated': (3, None),
    'joint-distribution-tables': (2**14, True),
    'accounting': (500, True),
  }
  for promise in program.PROMISES:
    if promise.name in wanted:
      amount, held = wanted[promise.name]
      row = program.check(promise._replace(quick=amount), subject, full=False)
      assert row['held'] is held, row


def test_promises_about_what_was_brought():
  chosen = lambda *brought: [x.name for x in program.choose([], brought)]
  assert chosen() == chosen('rule') == [x.name for x in program.PROMISES]
  assert 'window-distribution' not in chosen('drafter')
  assert chosen('model') == [
    'joint-distribution-transformer',
    'greedy-identity',
    'audited-identity',
    'invariance',
  ]


def run(*arguments):
  return subprocess.run(
    [sys.executable, 'scripts/certify.py', *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def test_the_program_prints_its_time_and_ends_in_json(tmp_path):
  done = run('--only=accounting', '--drafter=lookup', f'--workdir={tmp_path}')
  assert done.returncode == 0, done.stderr
  assert re.search(
    r'Takes .* min on two cores: 1 of 8 promises, 3 pairs', done.stdout
  )
  doc = json.loads(done.stdout.splitlines()[-1])
  assert doc['held'] and doc['promises'][0]['name'] == 'accounting'
  assert doc['drafters'] == ['lookup']
  assert json.loads((tmp_path / 'certificate.json').read_text()) == doc
  page = (tmp_path / 'certificate.md').read_text()
  assert '| holds | 0 of ' in page and 'requests miscounted' in page


def test_the_program_fails_with_a_biased_rule():
  done = run('--only=window-distribution', '--rule=tests.own_rules:hotter')
  assert done.returncode == 1, done.stderr
  row = json.loads(done.stdout.splitlines()[-1])['promises'][0]
  assert not row['held'] and 'gamma 1, V 2' in row['case']
  assert 'FAILS' in done.stdout


@pytest.mark.more
@pytest.mark.parametrize(
  'argument, message',
  [
    (
      '--only=window-law',
      "only='window-law': allowed are window-distribution,",
    ),
    ('--model=tests.own_rules:absent', 'tests.own_rules has no absent'),
    ('--workdir=/proc/nowhere', 'workdir /proc/nowhere: cannot be written'),
  ],
)
def test_bad_input_is_one_sentence(argument, message):
  done = run(argument)
  assert done.returncode == 2 and message in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1 and not done.stdout
