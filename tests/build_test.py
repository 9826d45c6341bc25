"""Mistakes of those who call build.engine are one sentence, before any work."""

import pytest

from specdec_jax import build, decode
from specdec_jax.drafters import lookup


@pytest.fixture(scope='module')
def target():
  return build.load('random:tiny')


NONE, LOOKUP = 'draft=None', "draft='lookup'"


@pytest.mark.parametrize(
  'draft, gamma, settings, message',
  [
    (
      'early_exit',
      2,
      {},
      "draft='early_exit': needs the setting exit, a whole number",
    ),
    ('ngram', 2, {}, "draft='ngram': needs the setting path, a path"),
    (
      'ngram',
      0,
      dict(min_confidence=0.1),
      "draft='ngram': needs the setting path, a path",
    ),
    (
      'lookup',
      2,
      dict(min_mach=1),
      f'{LOOKUP}: min_mach=1 is no setting of it; allowed are min_match, '
      'max_match',
    ),
    ('lookup', 0, dict(min_mach=1), f'{LOOKUP}: min_mach=1 is no setting'),
    ('lookup', 2, dict(chunk=1), f'{LOOKUP}: chunk=1 is no setting'),
    (None, 2, dict(exit=1), f'{NONE}: exit=1 is no setting of it; none are'),
    (lookup.make(gamma=2), 2, dict(exit=1), 'drafter lookup: exit=1 is no'),
    (
      'itself',
      2,
      dict(exit=1),
      'exit=1 is no setting of it; allowed are min_c',
    ),
    ('itself', 2, dict(chunk=8), 'chunk=8 is no setting of it; allowed are'),
    ('early_exit', 2, dict(exit='1'), "exit='1': must be a whole number"),
    ('early_exit', 2, dict(exit=1.0), 'exit=1.0: must be a whole number'),
    ('early_exit', 2, dict(exit=True), 'exit=True: must be a whole number'),
    ('early_exit', 2, dict(exit=None), 'exit=None: must be a whole number'),
    ('early_exit', 0, dict(exit='1'), "exit='1': must be a whole number"),
    ('lookup', 2, dict(min_match=1.5), 'min_match=1.5: must be a whole number'),
    ('itself', 2, dict(min_confidence='x'), "='x': must be a number"),
    ('itself', 2, dict(min_confidence=True), '=True: must be a number'),
    ('ngram', 2, dict(path=3), 'path=3: must be a path'),
    ('eagle', 2, {}, "draft='eagle': needs the setting path, a path"),
    ('eagle', 2, dict(path='/absent'), 'eagle /absent: no such file; give'),
    ('medusa', 0, {}, "draft='medusa': allowed are 'eagle', 'early_exit', 'l"),
    (['lookup'], 2, {}, "draft=['lookup']: allowed are"),
  ],
)
def test_bad_settings_are_named(target, draft, gamma, settings, message):
  draft = target if draft == 'itself' else draft
  with pytest.raises(ValueError) as error:
    build.engine(target, draft, gamma=gamma, **settings)
  assert message in str(error.value)


@pytest.mark.parametrize(
  'draft, settings',
  [('lookup', dict(min_match=1)), ('itself', dict(min_confidence=0))],
)
def test_good_settings_of_plain_decoding_do_nothing(target, draft, settings):
  draft = target if draft == 'itself' else draft
  made = build.engine(target, draft, gamma=0, **settings)
  assert made.drafter is decode.PLAIN and made.draft is made.q is None


def test_a_default_is_the_same_program(target):
  make = lambda **settings: build.engine(target, 'lookup', gamma=2, **settings)
  assert make().programs is make(max_match=4, min_match=2).programs


def test_a_drafter_of_ones_own_may_take_anything(target, monkeypatch):
  """A row of DRAFTERS, however its function names what it takes."""

  def own(target, *, gamma, least=1, **rest):
    return build.Made(lookup.make(gamma=gamma, min_match=least, **rest))

  monkeypatch.setitem(build.DRAFTERS, 'own', own)
  assert build.engine(target, 'own', least=2, max_match=3).drafter.gamma == 4
