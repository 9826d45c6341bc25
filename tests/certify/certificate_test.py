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
    ('rule', 'tests.own_rules', 'allowed are block, coupled, lenient'),
    ('rule', 'no.such.module:f', 'importing no.such.module failed: ModuleNot'),
    ('rule', 'tests.own_rules:absent', 'tests.own_rules has no absent'),
    ('rule', 'tests.own_rules:wrong_arguments', 'takes (noise, draft); want'),
    ('rule', 'tests.own_rules:no_verdict', 'want types.Verdict(accepted_B'),
    ('rule', 'tests.own_rules:no_empty_window', 'called with 0 sampled drafts'),
    ('rule', 'specdec_jax.types:ORIGINS', 'is not callable; want'),
    ('rule', 'tests.own_rules:LOSSY', 'lossless=False, so there is nothing'),
    ('rule', 'lenient:0.5', 'lossless=False, so there is nothing to certify'),
    ('rule', 'lenient', 'needs a number, as in lenient:0.5'),
    ('rule', 'tests.own_rules:hotter_by', 'takes (heat); want'),
    ('rule', 'tests.own_rules:hotter_by:0', 'it raised ZeroDivisionError'),
    ('drafter', 'tests.own_rules:says_much', 'it raised ValueError: no'),
    # Made of the model itself, not of what is loaded: its name is lm.
    ('drafter', 'specdec_jax.drafters.lm:make', "'LanguageModel' object has"),
    ('drafter', 'specdec_jax.types:PROMPT', 'drafter=0: allowed are'),
    ('model', 'tests.own_rules:absent', 'tests.own_rules has no absent'),
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
  rules = [x.name for x in subject.rules]
  drafters = [x for x in subject.drafters if x != base.TREE]
  ours = dict(rule=['reject', 'coupled'], drafter=['lm', 'lookup'])
  assert (rules, drafters) == tuple((ours | {what: [name]}).values())
  assert subject.supplied == (what,)


@pytest.mark.parametrize(
  'path, model, trees',
  [
    ('traversal', '', True),
    ('specdec_jax.verify.reject:RULE', '', True),
    ('block', '', False),
    ('traversal', 'x:make', False),  # EAGLE need not read a user's model
  ],
)
def test_a_rule_that_takes_trees_meets_them(path, model, trees, monkeypatch):
  monkeypatch.setattr(load, 'model', lambda path: None)
  subject = load.subject(path, '', model, seed=0)
  names = ['lm', 'lookup'] + [base.TREE] * trees
  assert subject.pairs() == [(subject.rules[0], name) for name in names]


def test_promises_by_name_and_about_what_was_brought():
  (one,) = certificate.choose(['pool'], ('rule',))
  assert one.name == 'pool'
  with pytest.raises(ValueError, match="only='law': allowed are machine"):
    certificate.choose(['pool', 'law'], ())
  chosen = lambda *supplied: {x.name for x in certificate.choose([], supplied)}
  assert chosen() == {x.name for x in certificate.PROMISES}
  assert chosen('rule') - chosen('drafter') == {'window-distribution'}
  assert chosen('drafter') - chosen('rule') == {'kernel-identity'}
  assert chosen('rule', 'drafter') == chosen('rule') | chosen('drafter')


def test_encoders_are_said_to_meet_the_rules_that_they_meet(monkeypatch):
  """Without trees, two rules are others of the list."""
  subject = base.Subject([reject.RULE], {'eagle': None})
  with pytest.raises(base.NotChecked, match='eagle drafts for decoders alone'):
    certificate.encoder_decoder(subject, 1)
  monkeypatch.setattr(certificate, '_check_all', lambda *_, **__: [''])
  found = certificate.encoder_decoder(load.subject('', '', '', seed=0), 99)
  assert found.size.startswith('rules reject, block, coupled; drafters lm, ')
  assert 'eagle' not in found.size and base.TREE not in found.size


@pytest.mark.more
def test_the_program_fails_with_a_planted_fault(tmp_path):
  done = programs.run(
    'scripts/certify.py',
    '--inject-fault=wrong-residual',
    '--only=window-distribution,accounting',
    f'--workdir={tmp_path}',
    # A folder that is set hides what keep_programs touches at the start.
    JAX_COMPILATION_CACHE_DIR='',
  )
  done.check(1)
  head = r'Subject +rules reject \(wrong-residual\); .*\nTakes .* min .*: 2 of'
  assert re.search(head, done.out)
  doc = done.document
  assert not doc['passed'] and doc['rules'] == ['reject (wrong-residual)']
  assert json.loads((tmp_path / 'certificate.json').read_text()) == doc
  fails, holds = doc['promises']
  assert fails['case'].startswith(
    'reject (wrong-residual), sampled drafts: wro'
  )
  assert holds['passed'] and 'requests miscounted' in holds['reached']
  for text in (done.out, (tmp_path / 'certificate.md').read_text()):
    assert 'FAILS  window-distribution' in text and 'holds  acc' in text
    assert '1 of 2 promises hold (' in text


@pytest.mark.parametrize(
  'ends, holds, verdict',
  [
    ((None, base.NotChecked), True, '1 of 2 promises hold, 1 not checked ('),
    ((base.NotChecked,), False, '0 of 1 promises hold, 1 not checked ('),
    ((None, base.Broken), False, '1 of 2 promises hold ('),
    ((ZeroDivisionError,), False, '0 of 1 promises hold ('),
  ],
)
def test_all_that_is_checked_must_hold_and_something(
  ends, holds, verdict, tmp_path, capsys
):
  def promise(end):
    def check(subject, amount):
      if end:
        raise end('7 of 9')
      return base.Figure('0 of 9', '0', 'nine')

    return base.Promise('name', 'text', check, 1, 1, 3)

  subject = base.Subject([reject.RULE], {'lm': None})
  chosen = [promise(end) for end in ends]
  run = certificate.run(subject, chosen, full=False, folder=tmp_path)
  said = capsys.readouterr().out
  page = (tmp_path / 'certificate.md').read_text()
  doc = json.loads((tmp_path / 'certificate.json').read_text())
  assert run is doc['passed'] is holds and doc == json.loads(
    said.split('\n')[-2]
  )
  assert all(verdict in text for text in (said, page, *doc['verdict']))
  for row, end in zip(doc['promises'], ends, strict=True):
    words = '0 of 9  (bound 0)' if end is None else row['case']
    assert words in said and (end is None or '7 of 9' in words)
