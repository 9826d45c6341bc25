"""Mistakes of those who call build.engine are one sentence, before any work."""

import json
import pathlib

import pytest

from specdec_jax import build, decode
from specdec_jax.drafters import (
  adaptive,
  eagle,
  early_exit,
  hybrid,
  lm,
  lookup,
  method,
  table,
)
from tests import own_rules


@pytest.fixture(scope='module')
def target():
  return build.load('random:tiny')


TAPPED = lookup.make(gamma=2)._replace(taps=(0, 99))


@pytest.mark.parametrize(
  'draft, gamma, message',
  [
    ('ngram', 2, 'ngram.source is empty: give a file of scripts/ngram.py'),
    ('eagle', 0, 'eagle.source is empty: give a file of scripts/distill.py'),
    (eagle.Settings('/absent'), 2, 'eagle /absent: no such file; give'),
    ('lm', 2, 'draft.source is empty: give a model, such as hf:org/name'),
    ('adaptive', 2, 'eagle.source is empty'),
    (adaptive.Settings('hydra'), 2, "adaptive.drafter='hydra': allowed are"),
    (adaptive.Settings(None), 2, 'adaptive.drafter=None: allowed are lm, look'),
    (adaptive.Settings('adaptive'), 2, "drafter='adaptive': allowed are lm"),
    (hybrid.Settings('early_exit'), 2, 'may not leave the target early'),
    (adaptive.Settings('lookup', costs='/no'), 2, 'adaptive.costs=/no'),
    (early_exit.Settings(2), 2, 'has 2 layers; allowed are 1 to 1'),
    (
      'hydra',
      0,
      "draft='hydra': allowed are lm, lookup, ng",
    ),
    ('dflash', 2, 'dflash.source is empty: give a folder or hf:org/name'),
    (['lookup'], 2, "draft=['lookup']: did you mean lookup? allowed"),
    (lookup.make, 2, 'None; it takes (*, gamma: int'),
    (pathlib.Path('x'), 2, "Path('x'): allowed are lm, lo"),
    ('hf:org/name', 2, 'a source is given to Settings of drafters, as in'),
    ('zoo:name', 2, "eagle.Settings('zoo:name'), or to specdec_jax.load"),
    ('no.such:make', 2, 'draft=no.such:make: importing no.such failed'),
    ('tests.own_rules:needs_more', 2, 'it takes (target, corpus, *, gamma'),
    (lambda target, *, gamma, chunk: 7, 2, 'it made 7; want a types.Drafter'),
    ('lookup', -1, 'gamma=-1: must be a whole number, 0 (plain decoding) or'),
    ('lookup', True, 'gamma=True: must be a whole number'),
    (lookup.make(gamma=2), 8, 'gamma=8: drafter lookup was made for 2; give'),
    (TAPPED, 2, 'lookup: taps=(0, 99): allowed are layers 0 to 1 of tiny (ra'),
  ],
)
def test_a_bad_draft_is_named(target, draft, gamma, message):
  with pytest.raises(ValueError) as error:
    build.engine(target, draft, gamma=gamma)
  assert message in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
  'draft, options, message',
  [
    ('lookup', dict(min_mach=1), 'min_mach=1: no such setting; did you mean m'),
    ('lookup', dict(gamma=3), 'lookup.gamma=3: no such setting; allowed are'),
    ('lookup', dict(min_match=3, max_match=2), 'min_match=3: must be at most'),
    ('lookup', dict(max_match=257), 'at least 1 and at most 256'),
    ('early_exit', dict(exit='1'), "early_exit.exit='1': must be a whole"),
    ('itself', dict(exit=1), 'exit=1: no such setting; allowed are tree'),
    ('itself', dict(min_confidence='x'), "='x': must be a number"),
    ('itself', dict(tree='2,0'), 'tree=2,0: must be the nodes of each level'),
    ('itself', dict(tree='40,30'), '64 at most in all'),
    ('itself', dict(tree='best:-1'), 'must be the nodes of each level'),
    ('itself', dict(tree='best:x'), 'or how many of the likeliest'),
    ('itself', dict(tree='best:3'), 'tree=best:3: the likeliest nodes are'),
    (None, dict(exit=1), 'draft=None has none'),
    ('lookup', 'x', "draft_options='x': must be a dict"),
  ],
)
def test_bad_options_are_named(target, draft, options, message):
  draft = target if draft == 'itself' else draft
  with pytest.raises(ValueError) as error:
    table.with_options(draft, options)
  assert message in str(error.value)


def test_a_tree_has_its_own_gamma(target):
  settings = table.with_options(target, dict(tree='2,1'))
  around = adaptive.Settings(hybrid.Settings(settings))
  for each in settings, around:
    made = build.engine(target, each, measure=False)
    assert (made.drafter.gamma, made.drafter.tree) == (3, (2, 1))
  with pytest.raises(ValueError, match='was made for 3; give gamma=3'):
    build.engine(target, settings, gamma=5)
  with pytest.raises(ValueError, match='rule=block: it takes chains, and lm d'):
    build.engine(target, settings, rule='block')


def test_a_loaded_draft_has_a_dtype(target):
  with pytest.raises(ValueError, match='tiny.* is loaded; give them to spec'):
    lm.Settings(target, dtype='bfloat16')


@pytest.mark.parametrize(
  'rule, message',
  [
    (None, 'None: allowed are block, coupled, lenient:NUMBER, reject, trav'),
    ('rejct', 'rejct: did you mean reject. allowed are block, coup'),
    ('rejct:0.5', 'rejct:0.5: did you mean reject. allowed are block, coup'),
    ('lenient:1.5', 'lenient:1.5: lenience=1.5: must be a number'),
    ('lenient:x', 'lenient:x: could not convert'),
    ('lenient', 'lenient: needs a number, as in lenient:0.5'),
    ('block:2', 'block:2: block takes no number'),
    ('strict', "strict: .*, typical:NUMBER, 'file.py:name', or a types.Rule"),
  ],
)
def test_a_bad_rule_is_named(target, rule, message):
  with pytest.raises(ValueError, match=f'^rule={message}'):
    build.engine(target, rule=rule)


def test_a_rule_of_ones_own_is_found_by_its_path():
  path = f'{pathlib.Path(__file__).parent}/own_rules.py:hotter'
  assert build.rule_of(path) is build.rule_of(path)
  assert build.rule_of(f'{path}_by:1.02').name == 'hotter by 1.02'


@pytest.mark.parametrize('draft', ['lookup', 'itself', lookup.make(gamma=2)])
def test_good_settings_of_plain_decoding_do_nothing(target, draft):
  draft = target if draft == 'itself' else draft
  made = build.engine(target, draft, gamma=0)
  assert made.drafter is decode.PLAIN and made.draft is made.q is None


@pytest.mark.parametrize('by', ['function', 'path', 'inside'])
def test_a_drafter_of_ones_own_has_weights(target, by):
  """Given by what makes it: called once, with what comes after the path."""
  path = f'{pathlib.Path(__file__).parent}/own_rules.py:says'
  draft = own_rules.says if by == 'function' else f'{path}:9'
  draft = hybrid.Settings(draft) if by == 'inside' else draft
  make = lambda: build.engine(target, draft, gamma=2)
  weights = make().weights.draft
  weights = weights[1] if by == 'inside' else weights
  assert weights.tolist() == [7 if by == 'function' else 9]
  assert make().programs is make().programs


def test_a_draft_that_is_made_is_taken_as_it_is(target):
  """With its gamma; else the default is 4, and the same program."""
  made = method.Method(lookup.make(gamma=3), 'weights')
  engine = build.engine(target, made)
  assert engine.drafter is made.drafter and engine.weights.draft == 'weights'
  assert build.engine(target, lookup.make(gamma=2)).drafter.gamma == 2
  one, two = (
    build.engine(target, draft)
    for draft in ('lookup', lookup.Settings(max_match=4, min_match=2))
  )
  assert one.drafter.gamma == 4 and one.programs is two.programs


def test_a_draft_by_its_source_is_loaded_once(target):
  draft = lm.Settings('random:tiny:1')
  one, two = (build.engine(target, draft, gamma=g) for g in (1, 2))
  assert one.draft is two.draft and one.draft.source == 'random:tiny:1'
  assert one.weights.draft is two.weights.draft is not target.params


@pytest.mark.more
def test_costs_are_measured_and_can_be_given(target, tmp_path):
  inner = hybrid.Settings(lm.Settings('random:tiny:1'))
  make = lambda **costs: build.engine(
    target, adaptive.Settings(inner, **costs), gamma=3
  )
  made = make()
  assert set(made.costs) == {'verify', 'lookup', 'lm'}
  for numbers in made.costs.values():
    assert len(numbers) == 4 and numbers == sorted(numbers)
  (tmp_path / 'costs.json').write_text(json.dumps(made.costs))
  again = make(costs=str(tmp_path / 'costs.json'))
  assert again.costs == made.costs and again.programs is made.programs
  other = build.with_costs(made, made.costs | dict(lm=[0, 1, 2, 3]))
  assert other.programs is made.programs
  assert other.weights.draft[1].costs.draft_N.tolist() == [0, 1, 2, 3]
  with pytest.raises(ValueError, match='costs: lm is None; want 4 numbers'):
    build.with_costs(made, dict(verify=[1, 1, 1, 1], lookup=[0, 0, 0, 0]))
