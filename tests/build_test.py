"""Mistakes of those who call build.engine are one sentence, before any work."""

import json

import pytest

from specdec_jax import build, decode
from specdec_jax.drafters import lookup


@pytest.fixture(scope='module')
def target():
  return build.load('random:tiny')


@pytest.mark.parametrize(
  'draft, gamma, settings, message',
  [
    ('ngram', 2, {}, 'ngram.path is empty: give a file of scripts/ngram.py'),
    ('ngram', 0, dict(min_confidence=0.1), 'ngram.path is empty: give a file'),
    ('eagle', 2, {}, 'eagle.path is empty: give a file of scripts/distill.py'),
    ('eagle', 2, dict(path='/absent'), 'eagle /absent: no such file; give'),
    ('lm', 2, {}, 'lm.source is empty: give a model, such as hf:org/name'),
    (
      'lookup',
      2,
      dict(min_mach=1),
      'lookup.min_mach=1: no such setting; allowed are min_match, max_match',
    ),
    (
      'adaptive',
      2,
      dict(drafter='lookup', lookup=dict(min_mach=1)),
      'lookup.min_mach=1: no such setting',
    ),
    (
      'adaptive',
      2,
      dict(drafter='lookup', eagle=dict(path='x')),
      "lookup.eagle={'path': 'x'}: no such setting",
    ),
    ('adaptive', 2, {}, 'eagle.path is empty'),
    ('adaptive', 2, dict(drafter='medusa'), "adaptive.drafter='medusa': a"),
    (
      'adaptive',
      2,
      dict(drafter='lookup', costs='/absent'),
      'adaptive.costs=/',
    ),
    ('hybrid', 2, dict(drafter='lookup'), "hybrid.drafter='lookup': allowed"),
    ('lookup', 0, dict(min_mach=1), 'lookup.min_mach=1: no such setting'),
    ('lookup', 2, dict(chunk=1), 'lookup.chunk=1: no such setting'),
    ('lookup', 2, dict(min_match=3, max_match=2), 'min_match=3: must be at mo'),
    (None, 2, dict(exit=1), 'draft=None has no settings; given are exit'),
    (lookup.make(gamma=2), 2, dict(exit=1), 'drafter lookup has no settings'),
    ('itself', 2, dict(exit=1), 'exit=1: no such setting; allowed are min_c'),
    ('itself', 2, dict(min_confidence='x'), "='x': must be a number"),
    ('early_exit', 0, dict(exit='1'), "early_exit.exit='1': must be a whole"),
    ('early_exit', 2, dict(exit=2), 'has 2 layers; allowed are 1 to 1'),
    ('medusa', 0, {}, "draft='medusa': allowed are 'adaptive', 'eagle', 'e"),
    (['lookup'], 2, {}, "draft=['lookup']: allowed are"),
    (
      'lookup',
      -1,
      {},
      'gamma=-1: must be a whole number, 0 (plain decoding) or',
    ),
    ('lookup', True, {}, 'gamma=True: must be a whole number'),
    (
      lookup.make(gamma=2),
      8,
      {},
      'gamma=8: drafter lookup was made for 2; give gamma=2, or make another',
    ),
  ],
)
def test_bad_settings_are_named(target, draft, gamma, settings, message):
  draft = target if draft == 'itself' else draft
  with pytest.raises(ValueError) as error:
    build.engine(target, draft, gamma=gamma, **settings)
  assert message in str(error.value)


@pytest.mark.parametrize(
  'draft, settings',
  [
    ('lookup', dict(min_match=1)),
    ('itself', dict(min_confidence=0)),
    (lookup.make(gamma=2), {}),
  ],
)
def test_good_settings_of_plain_decoding_do_nothing(target, draft, settings):
  draft = target if draft == 'itself' else draft
  made = build.engine(target, draft, gamma=0, **settings)
  assert made.drafter is decode.PLAIN and made.draft is made.q is None


def test_a_default_is_the_same_program(target):
  make = lambda **settings: build.engine(target, 'lookup', gamma=2, **settings)
  assert make().programs is make(max_match=4, min_match=2).programs


def test_a_drafter_of_ones_own_has_a_gamma(target):
  assert build.engine(target, lookup.make(gamma=2)).drafter.gamma == 2
  assert build.engine(target, 'lookup').drafter.gamma == 4


def test_a_draft_by_its_source_is_loaded_once(target):
  one, two = (
    build.engine(target, 'lm', gamma=g, source='random:tiny:1') for g in (1, 2)
  )
  assert one.draft is two.draft and one.draft.source == 'random:tiny:1'
  assert one.weights.draft is two.weights.draft is not target.params


def test_costs_are_measured_and_can_be_given(target, tmp_path):
  settings = dict(drafter='hybrid', hybrid=dict(drafter='lm'), gamma=3)
  settings['lm'] = dict(source='random:tiny:1')
  made = build.engine(target, 'adaptive', **settings)
  assert set(made.costs) == {'verify', 'lookup', 'lm'}
  for numbers in made.costs.values():
    assert len(numbers) == 4 and numbers == sorted(numbers)
  (tmp_path / 'costs.json').write_text(json.dumps(made.costs))
  again = build.engine(
    target, 'adaptive', costs=str(tmp_path / 'costs.json'), **settings
  )
  assert again.costs == made.costs and again.programs is made.programs
  other = build.with_costs(made, made.costs | dict(lm=[0, 1, 2, 3]))
  assert other.programs is made.programs
  assert other.weights.draft[1].costs.draft_N.tolist() == [0, 1, 2, 3]
  with pytest.raises(ValueError, match='costs: lm is None; want 4 numbers'):
    build.with_costs(made, dict(verify=[1, 1, 1, 1], lookup=[0, 0, 0, 0]))
