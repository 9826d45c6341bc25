"""Every promise holds of this library, and fails of what is made wrong."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, decode, types
from specdec_jax.certify import (
  base,
  certificate,
  counted,
  enumerate_window,
  enumerated,
  identity,
  invariance,
  load,
  table_model,
)
from specdec_jax.drafters import branch, medusa
from specdec_jax.verify import chain, reject
from tests import own_rules

RULES = list(build.lossless_rules().values())
PROMISES = {promise.name: promise for promise in certificate.PROMISES}
LM = {'lm': load.RECIPES['lm']}
REJECT = [reject.RULE]


def check(name, rules=None, drafters=None, amount=None, supplied=()):
  """One promise as the program checks it, at its quick amount or another."""
  promise = PROMISES[name]._replace(quick=amount or PROMISES[name].quick)
  subject = base.Subject(
    rules or RULES, drafters or load.RECIPES, supplied=supplied
  )
  # NaN checks recompile every program without its fusions; the debug tests and
  # the rule tests run under them.
  with jax.debug_nans(False):
    return certificate.check(promise, subject, full=False)


SLOW = [pytest.mark.slow]
# An amount far below the program's quick tier, words of what was tried, and how
# long it takes: a test below has the smallest cases of windows.
HOLDS = {
  'machine': (40, ['40 tokens of float32 reject lm'], SLOW),
  'null-check': (64, ['joint-distribution-tables p', 'invariance 0 of'], SLOW),
  'long-rows': (
    12,
    ['rows to 157 tokens', 'coupled lm', 'reject eagle 8'],
    SLOW,
  ),
  'joint-distribution-tables': (2**14, ['block lm 8', 'reject lookup 8'], SLOW),
  'greedy-identity': (1, ['36 programs', 'identical', 'adversarial'], SLOW),
  'windows-enumerated': (
    2,
    ['reject eagle 2', 'reject adaptive tree 8', 'block lm 8', 'script'],
    SLOW,
  ),
  'invariance': (9, ['coupled lm', 'on 1 and 8 devices'], SLOW),
  'pool': (9, ['reject lm (transformer)', 'coupled lm', 'mid-flight'], SLOW),
  'window-distribution': (
    60,
    ['trees 4 distinct', 'traversal on trees', 'coupled: it'],
    [],
  ),
  'joint-distribution-transformer': (2**14, ['reject lm, block lm'], SLOW),
  'audited-identity': (400, ['gamma 4'], SLOW),
  'kernel-identity': (1, ['bfloat16 and stored weights (of 3 kinds'], SLOW),
  'accounting': (2_000, ['EOS'], []),
  'encoder-decoder': (1, ['lm; windows-enum', 'accounting 0 of'], SLOW),
}


@pytest.mark.more
@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=x[2]) for name, x in HOLDS.items()]
)
def test_promise_holds(name, request, monkeypatch):
  if name.startswith('joint'):  # counts for longer than it compiles
    request.getfixturevalue('optimised')
  assert HOLDS.keys() == PROMISES.keys()
  amount, words, marks = HOLDS[name]
  # Of the one that checks the others.
  few = [x._replace(quick=HOLDS[x.name][0]) for x in certificate.PROMISES]
  monkeypatch.setattr(certificate, 'PROMISES', few)
  drafters = load.RECIPES
  if not marks:
    # verify/window_test has every shape, the slow promises every drafter.
    monkeypatch.setattr(enumerated, 'SHAPES', enumerated.SHAPES[:1])
    drafters = {x: load.RECIPES[x] for x in ('lm', 'adaptive')}
  row = check(name, drafters=drafters, amount=amount)
  assert row.passed, row.case
  for word in words:
    assert word in row.size, row.size


def medusa_tree(world, gamma):
  model, params = medusa.random_heads(world, 2)
  return medusa.make(model, gamma=gamma, levels=(2, 2)), params


ALONE = {
  'scripted': enumerated.script,
  'medusa tree': medusa_tree,
} | load.RECIPES
OFTEN = 'scripted', base.TREE


@pytest.mark.parametrize(
  'name',
  [pytest.param(x, marks=[pytest.mark.more] * (x not in OFTEN)) for x in ALONE],
)
def test_windows_of_a_drafter_hold(name, monkeypatch):
  """Of one alone, under the first rule: the cheapest cases of the promise."""
  monkeypatch.setattr(enumerated, 'LONG_GAMMAS', (4,))
  monkeypatch.setattr(enumerated, 'STEPS', {4: 3 if 'medusa' in name else 5})
  drafter = {base.TREE if 'tree' in name else name: ALONE[name]}
  row = check('windows-enumerated', REJECT, drafter, 3, supplied=('drafter',))
  assert row.passed, row.case


@pytest.mark.more
def test_a_source_that_is_not_read_breaks_a_promise(monkeypatch):
  """The oracle knows of no source; the models read one."""
  monkeypatch.setattr(table_model, 'given', lambda p_RVV, source: p_RVV)
  row = check('encoder-decoder', REJECT, {'x': enumerated.script}, 1)
  wrong = r'windows-enumerated: reject with scripted, .* instead of .*; off by'
  assert re.match(wrong, row.case), row


@pytest.mark.more
def test_nan_in_place_of_texts_breaks_a_promise():
  """All texts are empty then, and equal."""
  world = base.tables(3)
  nan = jax.tree.map(lambda x: np.full_like(x, np.nan), world.weights)
  world = world._replace(weights=nan)
  with jax.debug_nans(False):
    with pytest.raises(base.Broken, match='logits are not finite'):
      base.plain(world, base.make_request(world, [[1]], 2))
    with pytest.raises(base.Broken, match='logits are not finite'):
      invariance._same_in_a_pool(world, base.PLAIN, 1, 0, batch=False)


def test_counts_are_not_judged_by_nan():
  one = counted.Test(np.array([60, 40]), np.full(2, np.nan))
  assert counted.chi_square(*one) == 0
  with pytest.raises(base.Broken, match='60 seen, nan expected'):
    counted.judge({'x': one}, '')


# --- rules --------------------------------------------------------------------


def named(name):
  return [load.rule(f'tests.own_rules:{name}')]


def accepts_what_was_not_proposed(noise, draft, p_BNV):
  verdict = reject.verify(noise, draft, p_BNV)
  return verdict._replace(accepted_B=draft.count_B + 1)


def accepts_at_zero(noise, draft, p_BNV):
  """u <= p / q instead of u < p / q: no distribution shows it."""
  u_BK = jnp.where(noise.accept_BK == 0, -1.0, noise.accept_BK)
  return reject.verify(noise._replace(accept_BK=u_BK), draft, p_BNV)


@pytest.mark.parametrize(
  'verify, case',
  [
    (
      own_rules.hotter,
      r'much, sampled drafts: wrong in \d+ of 12 families of \(p, q\); the '
      r"plainest, 'sigma 1': gamma 1, V 2; p of the first token .* emitted .* "
      r'instead of .*; off by .*, allowed 1e-06',
    ),
    (accepts_what_was_not_proposed, 'much: it accepts 2 of 1 proposed tokens'),
    (accepts_at_zero, 'much, .*: at u = 0 it accepts 1 of the drafts'),
  ],
)
def test_a_biased_rule_is_refused_with_its_plainest_case(verify, case):
  rules = [types.Rule('much', verify)]
  row = check('window-distribution', rules, amount=400)
  assert row.passed is False and re.match(case, row.case), row.case


def test_the_trees_of_production_steps():
  """Each once: two programs alike would show what one does."""
  subject = base.Subject(RULES, load.RECIPES)
  pairs = [*subject.pairs(), (reject.RULE, enumerated.SIZED)]
  cells = [x for x in enumerated._cells(pairs, 3) if 'tree' in x[1]]
  shapes = []
  for rule, name, x64, gamma, vocab, long in cells:
    make = load.tree if name == base.TREE else load.sized_tree
    drafter, _ = make(base.tables(vocab), gamma)
    assert long and drafter.gamma == gamma <= max(enumerated.LONG_GAMMAS)
    shapes.append((rule.name, name, x64, drafter.tree, vocab))
  assert shapes == [
    ('reject', 'tree', False, (3,), 5),
    ('reject', 'tree', True, (4,), 5),
    ('reject', 'tree', True, (2, 1, 2), 3),
    *(
      (rule, 'tree', *cell)
      for rule in ('coupled', 'traversal')
      for cell in ((False, (3,), 5), (True, (2, 1, 2), 3))
    ),
    ('reject', 'adaptive tree', True, (2, 2), 3),
    ('reject', 'adaptive tree', True, (5, 3, 3, 2, 2), 5),
  ]


@pytest.mark.slow
def test_a_position_keyed_block_rule_is_refused():
  rules = named('block_by_position')
  row = check('joint-distribution-tables', rules, LM, 2**15)
  assert not row.passed and 'block_by_position, lm' in row.case


DISTRIBUTIONS = 'window-distribution', 'windows-enumerated'


@pytest.mark.more
@pytest.mark.parametrize('promise', DISTRIBUTIONS)
@pytest.mark.parametrize(
  'name, why',
  [
    ('spends_twice', 'no step function'),
    ('one_uniform', 'no step function'),
    ('block_by_position', 'draws inside verify'),
  ],
)
def test_a_rule_that_cannot_be_enumerated_is_not_judged(promise, name, why):
  rules = named(name)
  row = check(promise, rules, LM, amount=3, supplied=('rule',))
  assert row.passed is None and why in row.case
  # Beside others that are judged, it is named.
  figure = enumerated._figure({False: 0.0}, '', ['much'], [row.case])
  assert figure.size == f'much; not checked: {row.case}'
  # One of the library's may not drop out.
  row = check(promise, rules, LM, amount=3)
  assert row.passed is False and re.match(f'{name}: .*{why}', row.case), row


@pytest.mark.slow
@pytest.mark.parametrize('promise', DISTRIBUTIONS)
@pytest.mark.parametrize(
  'name, case',
  [
    ('reversed_uniforms', ''),
    ('block_by_count', 'block_by_count.* instead of'),
  ],
)
def test_tests_may_be_decided_by_any_uniforms(promise, name, case, monkeypatch):
  monkeypatch.setattr(enumerated, 'LONG_GAMMAS', (4,))
  amount = 3 if promise == 'windows-enumerated' else 60
  row = check(promise, named(name), LM, amount, supplied=('rule',))
  assert row.passed is (not case) and 'not checked' not in row.size, row
  assert not case or re.match(case, row.case), row


@pytest.mark.parametrize('promise', DISTRIBUTIONS)
def test_a_rule_counts_when_all_that_was_to_run_ran(promise, monkeypatch):
  """It may turn out not to be enumerable in a later run."""
  met = []

  def error(*_):
    met.append(1)
    if len(met) > 1:
      raise enumerate_window.NotEnumerable('no step function')
    return 2e-16

  for name in ('window_error', 'windows_error'):
    monkeypatch.setattr(enumerated, name, error)
  row = check(promise, REJECT, LM, supplied=('rule',))
  assert len(met) == 2 and row.passed is None, row
  assert row.case.startswith('reject: no step function'), row


# --- drafters -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, case',
  [
    # Tokens reported as certain are lawful, whatever made them.
    ('certain', None),
    # A q that was not drawn from: steps_test.
    ('peeking', 'the drafter looks at the noise of the accept tests'),
    ('biased', r'after \[1, 0, 1\] emitted \[.*\] instead of \[0.*\]; off by'),
    # A length that depends on the drafts it cuts.
    ('sure', 'instead of .*; off by'),
  ],
)
def test_own_drafters(name, case, monkeypatch):
  monkeypatch.setattr(enumerated, 'LONG_GAMMAS', (4,))
  mine = dict([load.drafter(f'tests.own_rules:{name}')])
  row = check('windows-enumerated', REJECT, mine, 2, supplied=('drafter',))
  assert row.passed is (case is None), row
  if case:
    assert re.search(f'reject with .*, gamma 2, V 2, .*: .*{case}', row.case)


def unlikely(which, draft):
  """Drawn nodes that are unlikely are left out."""
  drop_BK = which(draft) & (chain.q_of_tokens(draft) < 0.3)
  return draft._replace(proposed_BK=draft.proposed_BK & ~drop_BK)


def impossible(draft):
  """Children for which no draw was left are proposed."""
  return draft._replace(proposed_BK=draft.proposed_BK | True)


def looking(draft):
  """Nothing is proposed where the first node that was drawn is unlikely."""
  likely_B = chain.q_of_tokens(draft)[:, 0] >= 0.5
  return draft._replace(count_B=draft.count_B * likely_B)


def drawn(monkeypatch):
  """Nodes are drawn, and the likeliest of them proposed with their q."""
  grow, best = branch.grow, branch._best

  def best_drawn(whole, count):
    order_BK = jax.lax.top_k(branch._worth(whole), count)[1]
    q_BKV = jnp.take_along_axis(whole.q_BXV, order_BK[..., None], 1)
    found, shape = best(whole._replace(q_BXV=None), count)
    return found._replace(q_BXV=q_BKV), shape

  draws = lambda *args, certain, **sizes: grow(*args, **sizes)
  monkeypatch.setattr(branch, 'grow', draws)
  monkeypatch.setattr(branch, '_best', best_drawn)


@pytest.mark.slow
@pytest.mark.parametrize(
  'tree, gamma, wrong',
  [
    (base.TREE, 4, functools.partial(unlikely, own_rules.third_sibling)),
    (base.TREE, 5, functools.partial(unlikely, own_rules.of_a_third_level)),
    (base.TREE, 3, impossible),
    (enumerated.SIZED, 4, looking),
    (enumerated.SIZED, 8, drawn),
  ],
  ids=['third sibling', 'third level', 'impossible', 'looking', 'drawn'],
)
def test_every_tree_of_production_steps_sees_a_drafter_of_its_own(
  tree, gamma, wrong, monkeypatch
):
  """No other has such nodes, or draws them."""
  right = load.tree if tree == base.TREE else load.sized_tree

  def recipe(world, gamma):
    drafter, params = right(world, gamma)

    def propose(*args):
      draft, *rest = drafter.propose(*args)
      return draft if wrong is drawn else wrong(draft), *rest

    return drafter._replace(propose=propose), params

  if wrong is drawn:
    drawn(monkeypatch)
  cells = enumerated._cells
  monkeypatch.setattr(load, 'sized_tree', recipe)
  monkeypatch.setattr(
    enumerated,
    '_cells',
    lambda *args: (x for x in cells(*args) if x[1] == tree and x[3] == gamma),
  )
  row = check('windows-enumerated', REJECT, {base.TREE: recipe})
  case = f'reject with .*, gamma {gamma}, V .*: after .* (instead of|reports q)'
  assert row.passed is False and re.match(case, row.case), row


@pytest.mark.more
def test_an_impossible_total_is_a_finding(monkeypatch):
  """A distribution with a hole draws nothing in some of its outcomes."""
  normal = enumerate_window.normal
  monkeypatch.setattr(
    enumerate_window, 'normal', lambda weights: 0.9 * normal(weights)
  )
  row = check('windows-enumerated', REJECT, {'x': enumerated.script})
  assert 'all outcomes together have probability 0.' in row.case


# --- what is tried ------------------------------------------------------------


@pytest.mark.parametrize('full', [False, True])
def test_every_rule_meets_every_drafter_and_every_gamma(full):
  subject = base.Subject(RULES, load.RECIPES)
  programs = identity.programs(subject, full=full)
  names = {*load.RECIPES, identity.SCRIPTED}
  # On chains the others are one of these.
  apart = [rule for rule in RULES if not rule.on_chains]
  trees = [rule for rule in RULES if rule.trees]
  assert {(p.rule, p.drafter) for p in programs} == {
    *itertools.product(apart, names - {base.TREE}),
    *itertools.product(trees, [base.TREE]),
  }
  met = {(p.rule, p.gamma) for p in programs}
  wanted = RULES if full else apart
  assert met >= set(itertools.product(wanted, identity.GAMMAS))
  big = {(p.rule, p.drafter) for p in programs if p.world == 'transformer'}
  assert big == set(subject.pairs())


def fixed(world, gamma):
  """A recipe whose gamma is 4 whatever is asked."""
  return load.RECIPES['lm'](world, 4)


def test_a_fixed_gamma_is_counted_after_long_prompts_too(monkeypatch):
  met = []

  def tests(world, pair, name, prompts, *_, **__):
    met.append(prompts)
    return {name: counted.Test(np.array([50, 50]), np.array([0.5, 0.5]))}

  monkeypatch.setattr(counted, '_tests', tests)
  row = check('joint-distribution-tables', REJECT, {'x': fixed})
  assert met == [[table_model.PROMPT[2]], counted.LONG_PROMPTS]
  assert row.size.startswith('2 cells')


def test_a_figure_is_of_what_ran(monkeypatch):
  for module, name in (
    (enumerated, 'window_error'),
    (enumerated, 'long_window_error'),
    (enumerated, 'tree_error'),
  ):
    monkeypatch.setattr(module, name, lambda *_: 2e-16)
  row = check('window-distribution')
  for words in (
    'pairs (p, q): reject 2,000, reject on trees 4 distinct 108, ',
    'traversal on trees 1,1,2 distinct 36',
  ):
    assert words in row.size, row.size
  assert row.bound == '1e-06 in float32, 1e-12 in float64'
  # Short windows of gamma 2 are not this drafter's.
  row = check('windows-enumerated', REJECT, {'x': fixed}, supplied=('drafter',))
  assert (row.reached, row.bound) == ('off by 2.0e-16', '1e-12 in float64')


# --- the null check -----------------------------------------------------------


def test_the_null_check_is_of_plain_decoding(monkeypatch):
  met = []

  def fake(wrong, subject, amount):
    ((rule, name),) = subject.pairs()
    drafter, _ = subject.drafters[name](base.tables(3), 4)
    assert (rule, drafter) == (base.PLAIN_RULE, decode.PLAIN)
    met.append(amount)
    if wrong:
      raise base.Broken('heads 9 of 9')
    return base.Figure('even', '0', '')

  def check_with(wrong, amount):
    few = [
      x._replace(check=functools.partial(fake, wrong == x.name))
      for x in certificate.PROMISES
    ]
    monkeypatch.setattr(certificate, 'PROMISES', few)
    return certificate.null_check(
      base.Subject(RULES, LM, supplied=('rule',)), amount
    )

  figure = check_with('', 4)
  names = certificate.COMPARING
  assert met == [PROMISES[name].quick // 4 for name in names]
  assert figure.size == '; '.join(f'{name} even' for name in names)
  met.clear()
  check_with('', amount=1)
  assert met == [PROMISES[name].full for name in names]
  for name in names:
    with pytest.raises(base.Broken, match=f'{name}: heads 9 of 9'):
      check_with(wrong=name, amount=4)
