"""scripts/certify.py: what it prints and refuses, and a user's own parts."""

import json
import re

import pytest

from specdec_jax.certify import base, certificate, load
from specdec_jax.verify import reject
from tests import programs


@pytest.mark.parametrize(
  'what, path, message',
  [
    ('rule', 'tests.own_rules', 'allowed are block, coupled, lenient:NUMBER'),
    ('rule', 'no.such.module:f', 'importing no.such.module failed: ModuleNot'),
    ('rule', 'tests.own_rules:absent', 'tests.own_rules has no absent'),
    ('rule', 'tests.own_rules:wrong_arguments', 'takes (noise, draft); want'),
    ('rule', 'tests.own_rules:no_verdict', 'want types.Verdict(accepted_B'),
    ('rule', 'specdec_jax.types:ORIGINS', 'is not callable; want'),
    ('rule', 'tests.own_rules:LOSSY', 'lossless=False, so there is nothing'),
    ('rule', 'lenient:0.5', 'lossless=False, so there is nothing to certify'),
    ('rule', 'typical:0.1', 'lossless=False, so there is nothing to certify'),
    ('rule', 'lenient', 'needs a number, as in lenient:0.5'),
    ('rule', 'tests.own_rules:no_empty_window', 'called with 0 sampled drafts'),
    ('rule', 'tests.own_rules:hotter_by', 'takes (heat); want'),
    ('rule', 'tests.own_rules:hotter_by:0', 'it raised ZeroDivisionError'),
    ('drafter', 'tests.own_rules:says_much', 'it raised ValueError: no'),
    ('drafter', 'tests.own_rules:makes_nothing', 'it made None; want a types'),
    ('drafter', 'tests.own_rules:needs_more', 'takes (target, corpus'),
    ('drafter', 'specdec_jax.types:PROMPT', 'drafter=0: allowed are'),
  ],
)
def test_what_does_not_fit_is_one_sentence(what, path, message):
  with pytest.raises(ValueError) as error:
    getattr(load, what)(path)
  assert str(error.value).startswith(f'{what}=') and message in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  'what, path, name',
  [
    ('rule', 'block', 'block'),
    ('rule', 'specdec_jax.verify.reject:RULE', 'reject'),
    ('rule', 'specdec_jax.verify.reject:verify', 'verify'),
    ('rule', 'tests.own_rules:hotter_by:1.02', 'hotter by 1.02'),
    ('drafter', 'lookup', 'lookup'),
    ('drafter', 'tests.own_rules:uniform_q', 'uniform'),
  ],
)
def test_a_part_is_called_by_its_own_name(what, path, name):
  paths = {'rule': '', 'drafter': '', 'model': ''} | {what: path}
  subject = load.subject(*paths.values(), seed=0)
  rules, drafters = [x.name for x in subject.rules], list(subject.drafters)
  ours = dict(rule=['reject', 'coupled'], drafter=['lm', 'lookup'])
  assert (rules, drafters) == tuple((ours | {what: [name]}).values())
  assert subject.supplied == (what,)


def test_promises_about_what_was_brought():
  chosen = lambda *supplied: {x.name for x in certificate.choose([], supplied)}
  assert chosen() == {x.name for x in certificate.PROMISES}
  assert chosen() - chosen('rule') == {
    'audited-identity',
    'kernel-identity',
    'encoder-decoder',
  }
  assert chosen('rule') - chosen('drafter') == {'window-distribution'}
  assert chosen('drafter') - chosen('model') == {
    'windows-enumerated',
    'long-rows',
    'joint-distribution-tables',
    'kernel-identity',
    'accounting',
  }


def test_encoders_are_not_promised_for_what_has_none():
  subject = base.Subject([reject.RULE], {'eagle': None})
  for other, why in (
    (subject, 'eagle drafts for decoders alone'),
    (subject._replace(model=lambda V, dtype: None), 'certified without sourc'),
  ):
    with pytest.raises(base.NotChecked, match=why):
      certificate.encoder_decoder(other, 1)


def run(*arguments):
  # A folder that is set hides what keep_programs touches at the start.
  return programs.run(
    'scripts/certify.py', *arguments, JAX_COMPILATION_CACHE_DIR=''
  )


def test_the_program_certifies_a_biased_rule(tmp_path):
  done = run(
    '--only=window-distribution,accounting',
    '--rule=tests.own_rules:hotter',
    f'--workdir={tmp_path}',
  )
  done.check(1)
  head = r'Subject +rules hotter; .*\nTakes .* min on two cores: 2 of \d+ prom'
  assert re.search(head, done.out)
  doc = done.document
  assert not doc['passed'] and doc['rules'] == ['hotter']
  assert json.loads((tmp_path / 'certificate.json').read_text()) == doc
  fails, holds = doc['promises']
  assert not fails['passed'] and 'gamma 1, V 2' in fails['case']
  assert holds['passed'] and 'requests miscounted' in holds['reached']
  for text in (done.out, (tmp_path / 'certificate.md').read_text()):
    assert 'FAILS  window-distribution' in text and 'holds  acc' in text
    assert '1 of 2 promises hold (' in text


@pytest.mark.more
def test_the_program_fails_with_a_planted_fault():
  done = run('--inject-fault=one-more', '--only=window-distribution')
  done.check(1)
  (row,) = done.document['promises']
  assert row['case'].startswith('reject (one-more), sampled drafts: at u')
  assert 'FAILS  window-distribution' in done.out


@pytest.mark.more
@pytest.mark.parametrize(
  'argument, message',
  [
    ('--only=window-law', "only='window-law': allowed are null-check"),
    ('--model=tests.own_rules:absent', 'tests.own_rules has no absent'),
  ],
)
def test_bad_input_is_one_sentence(argument, message):
  run(argument).check_refused(message)
