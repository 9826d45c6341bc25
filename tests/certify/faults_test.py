"""Every fault of --inject-fault is caught by the promise that it names."""

import jax
import pytest

from specdec_jax import decode, sampling
from specdec_jax.certify import certificate, faults

# Amounts that show a fault, by promise; each is a case of promises_test.
AMOUNTS = {
  'window-distribution': 60,
  'windows-enumerated': 2,
  'long-rows': 12,
  'joint-distribution-tables': 2**12,
  'greedy-identity': 1,
  'invariance': 9,
  'pool': 12,
  'accounting': 1,
}
# Of the case, where another would be found too.
WORDS = {'reused-noise': 'draws with the noise of the next token'}
# What does not compile a transformer.
QUICK = ('wrong-residual', 'past-stops', 'reused-noise')
NAMES = [
  x if x in QUICK else pytest.param(x, marks=pytest.mark.more)
  for x in faults.FAULTS
]


@pytest.mark.parametrize('name', NAMES)
def test_a_planted_fault_is_caught(name):
  seen_by = faults.FAULTS[name].promise
  (promise,) = certificate.choose([seen_by], ())
  promise = promise._replace(quick=AMOUNTS[seen_by])
  with faults.subject(name) as subject, jax.debug_nans(False):
    row = certificate.check(promise, subject, full=False)
  assert row.passed is False, row
  assert 'raised' not in row.case, row.case
  assert WORDS.get(name, '') in row.case, row.case
  assert name in row.case, row.case


def test_the_loop_is_right_again_afterwards():
  right = sampling.next_keys, decode._commit
  for name in ('one-key', 'past-stops'):
    with faults.subject(name):
      assert (sampling.next_keys, decode._commit) != right
    assert (sampling.next_keys, decode._commit) == right


def test_what_is_no_fault_is_refused_with_those_that_are():
  with pytest.raises(ValueError) as error, faults.subject('help'):
    pass
  for known, fault in faults.FAULTS.items():
    assert f'{known} ({fault.text})' in str(error.value)
  with pytest.raises(ValueError, match='planted in reject with lm; give no'):
    with faults.subject('flat-q', 'block', '', ''):
      pass
  with faults.subject('', 'block', '', '') as right:
    assert right.supplied == ('rule',)
