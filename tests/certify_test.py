"""The quick tier of the certificate, and what it refuses."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from specdec_jax import build, types, user_code
from specdec_jax.eval import certificate
from specdec_jax.eval.promises import base
from specdec_jax.verify import reject

ROOT = pathlib.Path(__file__).parent.parent
QUICK = {promise.name: promise for promise in certificate.PROMISES}


def check(name, rules=build.RULES, drafters=build.RECIPES, amount=None):
  """One promise as the program checks it, at its quick amount or another."""
  promise = QUICK[name]._replace(quick=amount or QUICK[name].quick)
  # NaN checks recompile every program without its fusions; the debug tests and
  # the rule tests run under them.
  with jax.debug_nans(False):
    return certificate.check(promise, base.Subject(rules, drafters), full=False)


# The heaviest first, so that two workers end together.
@pytest.mark.parametrize(
  'name',
  sorted(QUICK, key=lambda n: n not in ('greedy-identity', 'one-draw')),
)
def test_promise_holds(name):
  row = check(name)
  assert row['held'], row['case']


def own(name):
  path = f'tests.own_rules:{name}'
  rule = user_code.rule(path)
  return {rule.name: rule}


def test_a_biased_rule_is_refused_with_its_smallest_case():
  row = check('window-law', own('hotter'))
  assert not row['held']
  assert re.match(
    r"hotter, sampled drafts, family '[^']+': gamma 1, V 2; p of .* instead of",
    row['case'],
  )
  assert not check('joint-law-tables', own('hotter'), amount=2**18)['held']


def test_a_position_keyed_block_rule_is_refused():
  row = check('joint-law-tables', own('block_by_position'), amount=2**18)
  assert not row['held'] and 'block_by_position, lm' in row['case']
  # It draws for itself, which the enumeration says instead of guessing.
  row = check('window-law', own('block_by_position'), amount=60)
  assert row['held'] and 'draws inside verify' in row['size']


@pytest.mark.parametrize(
  'name, amount',
  [
    ('window-law', None),
    ('windows-enumerated', None),
    ('joint-law-tables', 2**18),
    ('accounting', 1000),
  ],
)
def test_block_verification_passes(name, amount):
  recipes = {'lm': build.RECIPES['lm']}
  row = check(name, own('block'), recipes, amount=amount)
  assert row['held'], row['case']


def test_a_rule_that_accepts_too_much_is_refused():
  every = lambda noise, draft, p: types.Verdict(
    draft.count_B + 1, reject.verify(noise, draft, p).weights_BV
  )
  rule = types.Rule('every', every)
  row = check('window-law', {'every': rule}, amount=60)
  assert not row['held'] and 'accepts more tokens than' in row['case']


def test_own_drafters():
  good = {'careful': user_code.drafter('tests.own_rules:careful')}
  bad = {'forgetful': user_code.drafter('tests.own_rules:forgetful')}
  rules = {'reject': reject.RULE}
  assert check('joint-law-tables', rules, good, 2**16)['held']
  row = check('joint-law-tables', rules, bad, 2**18)
  assert not row['held'] and 'reject, forgetful, gamma' in row['case']


@pytest.mark.parametrize(
  'what, path, message',
  [
    ('rule', 'tests.own_rules', 'want package.module:function'),
    ('rule', 'no.such.module:f', 'importing no.such.module failed'),
    ('rule', 'tests.own_rules:absent', 'tests.own_rules has no absent'),
    ('rule', 'tests.own_rules:wrong_arguments', 'takes (noise, draft); want'),
    ('rule', 'tests.own_rules:no_verdict', 'want types.Verdict(accepted_B'),
    ('rule', 'specdec_jax.types:ORIGINS', 'is not callable; want'),
    ('drafter', 'tests.own_rules:needs_more', 'takes (model, corpus'),
    ('drafter', 'specdec_jax.types:PROMPT', 'is not callable; want make('),
  ],
)
def test_what_does_not_fit_is_one_sentence(what, path, message):
  with pytest.raises(ValueError) as error:
    getattr(user_code, what)(path)
  assert str(error.value).startswith(f'{what}={path}') or what in str(error)
  assert message in str(error.value)


def run(*arguments):
  return subprocess.run(
    [sys.executable, 'scripts/certify.py', *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


def test_the_program_ends_in_json_and_writes_both_files(tmp_path):
  done = run('--only=coupled-identity', f'--workdir={tmp_path}')
  assert done.returncode == 0, done.stderr
  doc = json.loads(done.stdout.splitlines()[-1])
  assert doc['held'] and doc['promises'][0]['name'] == 'coupled-identity'
  assert json.loads((tmp_path / 'certificate.json').read_text()) == doc
  page = (tmp_path / 'certificate.md').read_text()
  assert '| 0 differ | 0 | coupled: ' in page


def test_the_program_fails_with_a_biased_rule():
  done = run('--only=window-law', '--rule=tests.own_rules:hotter')
  assert done.returncode == 1, done.stderr
  row = json.loads(done.stdout.splitlines()[-1])['promises'][0]
  assert not row['held'] and 'gamma 1, V 2' in row['case']
  assert 'FAILS' in done.stdout


@pytest.mark.parametrize(
  'argument, message',
  [
    ('--only=window-laws', "only='window-laws': allowed are window-law,"),
    ('--rule=tests.own_rules:absent', 'tests.own_rules has no absent'),
    ('--workdir=/proc/nowhere', 'workdir /proc/nowhere: cannot be written'),
  ],
)
def test_bad_input_is_one_sentence(argument, message):
  done = run(argument)
  assert done.returncode == 2 and message in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1 and not done.stdout
