"""The quick tier of the certificate, and what it refuses."""

import itertools
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from specdec_jax import build, types
from specdec_jax.certify import (
  base,
  certificate,
  counted,
  enumerated,
  identity,
  load,
  pairs,
  recipes,
)
from specdec_jax.verify import reject

ROOT = pathlib.Path(__file__).parent.parent
RULES = build.lossless_rules()
LM = {'lm': recipes.RECIPES['lm']}
QUICK = {promise.name: promise for promise in certificate.PROMISES}


def check(
  name,
  rules=RULES,
  drafters=recipes.RECIPES,
  amount=None,
  own=(),
):
  """One promise as the program checks it, at its quick amount or another."""
  promise = QUICK[name]._replace(quick=amount or QUICK[name].quick)
  # NaN checks recompile every program without its fusions; the debug tests and
  # the rule tests run under them.
  with jax.debug_nans(False):
    subject = base.Subject(rules, drafters, own=own)
    return certificate.check(promise, subject, full=False)


NAMED = {
  'window-law': ['reject, block: 2000 pairs'],
  'coupled-identity': ['coupled'],
  'windows-enumerated': [
    'reject lm',
    'block lm',
    'reject ragged lookup',
    'reject early_exit',
    'reject ngram',
    'reject eagle',
    'scripted',
  ],
  'joint-law-tables': [
    'reject lm',
    'block lm',
    'coupled lm',
    'reject lookup',
    'reject early_exit',
    'reject ngram',
    'reject eagle',
  ],
  'kernel-law': ['reject, block, coupled'],
  'invariance': ['reject on 1, 2, 4, 8 devices'],
}


# Most of their time is compiling. The program itself checks them optimised.
COMPILED_IN_LESS_TIME = (
  'window-law',
  'windows-enumerated',
  'greedy-identity',
  'audited-identity',
  'self-draft',
  'invariance',
  'accounting',
)


HEAVY = ('joint-law-tables', 'greedy-identity', 'one-draw', 'invariance')
# Fewer draws than the program's quick tier, where drawing is what takes long.
FEWER = {'joint-law-tables': 8, 'one-draw': 4}


# The heaviest first, so that two workers end together.
@pytest.mark.parametrize(
  'name',
  sorted(QUICK, key=lambda n: n not in HEAVY),
)
def test_promise_holds(name, request):
  if name in COMPILED_IN_LESS_TIME:
    request.getfixturevalue('compile_in_less_time')
  row = check(name, amount=QUICK[name].quick // FEWER.get(name, 1))
  assert row['held'], row['case']
  # All were checked that the promise is about.
  for word in NAMED.get(name, ()):
    assert word in row['size'], row['size']
  if name == 'invariance':
    # 100 requests, of which 34 are greedy. The first rule: 6 arrangements and 3
    # meshes; two others: 3 arrangements. Against plain decoding: the coupled
    # rule with every drafter, and the greedy rows of the others.
    tried = 100 * (9 + 2 * 3 + len(recipes.RECIPES)) + 34 * 2
    assert f'of {tried:,} texts' in row['reached'], row['reached']


def named(name):
  path = f'tests.own_rules:{name}'
  rule = load.rule(path)
  return {rule.name: rule}


def test_a_biased_rule_is_refused_with_its_smallest_case():
  row = check('window-law', named('hotter'))
  assert not row['held']
  assert re.match(
    r"hotter, sampled drafts, family '[^']+': gamma 1, V 2; p of .* instead of",
    row['case'],
  )


def test_a_real_vocabulary_is_judged_too(monkeypatch):
  """What the full tier alone does, on one family of two."""
  name = 'sigma 3'
  monkeypatch.setattr(pairs, 'FAMILIES', {name: pairs.FAMILIES[name]})
  with jax.debug_nans(False):
    off = enumerated._law_of_a_real_vocabulary(reject.RULE, 0)
    assert 0 < off < enumerated.BOUNDS[False]
    with pytest.raises(base.Broken, match=f'hotter, V 50257.*{name}.*off by'):
      enumerated._law_of_a_real_vocabulary(named('hotter')['hotter'], 0)


def test_a_position_keyed_block_rule_is_refused():
  row = check('joint-law-tables', named('block_by_position'), LM, 2**15)
  assert not row['held'] and 'block_by_position, lm' in row['case']
  # It draws for itself, which the enumeration says instead of guessing.
  row = check('window-law', named('block_by_position'), amount=60)
  assert row['held'] is None and 'draws inside verify' in row['case']


def test_a_rule_that_accepts_too_much_is_refused():
  every = lambda noise, draft, p: types.Verdict(
    draft.count_B + 1, reject.verify(noise, draft, p).weights_BV
  )
  rule = types.Rule('every', every)
  row = check('window-law', {'every': rule}, amount=60)
  assert not row['held'] and 'it accepts 2 of 1 proposed' in row['case']


def test_the_cover_is_small_and_has_every_pair():
  subject = base.Subject(RULES, recipes.RECIPES)
  programs = identity.programs(subject)
  assert len(programs) <= 24
  big = [p for p in programs if p.world == 'transformer']
  assert {p.rule for p in big} == set(RULES)
  assert {p.drafter for p in big} == {*recipes.RECIPES, identity.SCRIPTED}
  assert {p.gamma for p in big} == set(identity.GAMMAS)
  assert {p.batch for p in big} == set(identity.BATCHES)
  of = lambda p: set(itertools.combinations(enumerate(p[:4]), 2))
  drafted = [p for p in programs if p.drafter != identity.SCRIPTED]
  met = set().union(*map(of, drafted))
  levels = [tuple({p[i] for p in drafted}) for i in range(4)]
  assert met == set().union(*map(of, itertools.product(*levels)))
  scripts = [p for p in programs if p.drafter == identity.SCRIPTED]
  assert {p.rule for p in scripts} == set(RULES)


def test_a_rule_that_draws_for_itself_passes_where_it_can_be_judged():
  """README's rule: strict equality, lossless, under any drafter."""
  rule, drafter = readme_example()
  recipes = {'repeat': lambda world, gamma: (drafter, ())}
  both = dict(rules={'agree': rule}, drafters=recipes, own=('rule', 'drafter'))
  assert check('windows-enumerated', **both)['held'] is None
  assert check('self-draft', **both)['held'] is None
  for name, amount in (('joint-law-tables', 2**14), ('accounting', 500)):
    row = check(name, amount=amount, **both)
    assert row['held'], row['case']


def readme_example():
  text = (ROOT / 'README.md').read_text()
  blocks = re.findall(r'```python\n(.*?)```', text, re.S)
  code = next(b for b in blocks if "types.Rule('agree'" in b)
  names = {}
  exec(compile(code.split('target =')[0], 'README.md', 'exec'), names)
  return names['agree'], names['repeat']


def test_own_drafters():
  rules = {'reject': reject.RULE}
  for name, held in (('careful', True), ('forgetful', False)):
    recipe = load.drafter(f'tests.own_rules:{name}')
    row = check('windows-enumerated', rules, {name: recipe})
    assert row['held'] is held
  # The shortest text that shows it, with what it should be.
  assert re.fullmatch(
    r'reject with forgetful: the joint law of three windows, gamma 2, V 3, .*: '
    r'after \[1, 2, 0\] tokens [012]( [012])? come 0\.\d+ instead of 0\.\d+; '
    r'off by .*, allowed 1e-12',
    row['case'],
  ), row['case']


def test_a_rule_that_spends_a_uniform_twice_is_not_judged_by_walks():
  rules = named('spends_twice')
  row = check('windows-enumerated', rules, LM)
  assert row['held'] is None and 'no step function' in row['case']
  # Beside others that are judged, it is named.
  figure = enumerated._off_by({False: 0.0, True: 0.0}, 'much', [row['case']])
  assert figure.size == f'much; not checked: {row["case"]}'


def test_the_full_tier_meets_every_gamma_under_every_rule():
  subject = base.Subject(RULES, recipes.RECIPES)
  drafted = identity.programs(subject, identity.EVERY_GAMMA)
  met = {(p.rule, p.gamma) for p in drafted}
  assert met == set(itertools.product(RULES, (1, 2, 3, 4, 8)))
  assert 3 in {p.gamma for p in identity.programs(subject)}
  cells = [
    (rule.name, *x)
    for rule, (name, _), *x in counted._cells(subject, whole=True)
    if name == 'lm'
  ]
  assert sorted(cells) == sorted(itertools.product(RULES, (2, 3), (3, 4)))


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
    ('rule', 'tests.own_rules:no_empty_window', 'called with 0 sampled drafts'),
    ('rule', 'tests.own_rules:says_nothing', 'it raised AssertionError'),
    ('drafter', 'tests.own_rules:says_much', 'it raised ValueError: no'),
    ('drafter', 'tests.own_rules:makes_nothing', 'it made None; want'),
    ('drafter', 'tests.own_rules:needs_more', 'takes (model, corpus'),
    ('drafter', 'specdec_jax.types:PROMPT', 'is not callable; want make('),
  ],
)
def test_what_does_not_fit_is_one_sentence(what, path, message):
  with pytest.raises(ValueError) as error:
    getattr(load, what)(path)
  assert str(error.value).startswith(f'{what}={path}') or what in str(error)
  assert message in str(error.value) and '\n' not in str(error.value)


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
  assert (
    '| 0 of 10,020 windows differ (95 %: under 3.0e-04) | 0 | coupled' in page
  )


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
    ('--model=tests.own_rules:absent', 'tests.own_rules has no absent'),
    ('--workdir=/proc/nowhere', 'workdir /proc/nowhere: cannot be written'),
  ],
)
def test_bad_input_is_one_sentence(argument, message):
  done = run(argument)
  assert done.returncode == 2 and message in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1 and not done.stdout
