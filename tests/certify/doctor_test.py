"""Each check of the doctor sees the mistake that it is named after."""

import functools

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import decode
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import timing
from specdec_jax.certify import certificate, doctor
from specdec_jax.models import weights
from specdec_jax.verify import reject
from tests import programs


@pytest.fixture(autouse=True)
def anew():
  """Nothing that was compiled with a mistake is used again, or before it."""
  yield
  jax.clear_caches()
  decode._kept.clear()


def check(name):
  (found,) = [x for x in doctor.CHECKS if x.name == name]
  with jax.debug_nans(False):
    return certificate.check(found, doctor.subject(), full=False)


def in_bfloat16(patch):
  matmul = weights.matmul
  less = lambda x: x.astype(jnp.bfloat16)
  patch.setattr(
    weights, 'matmul', lambda x, y: matmul(less(x), less(y), jnp.float32)
  )


def nan_of(module, name):
  """The function gives NaN, of the shape and dtype of what it gave."""

  def plant(patch):
    right = getattr(module, name)
    patch.setattr(module, name, lambda *args: right(*args) * jnp.nan)

  return plant


def hidden_top_k(patch):
  settings = sampling_lib.settings
  patch.setattr(sampling_lib, 'settings', functools.partial(settings, top_k=64))


def keys_of(change):
  def plant(patch):
    right = sampling_lib.next_keys
    patch.setattr(
      sampling_lib, 'next_keys', lambda *args: right(*change(*args))
    )

  return plant


def everything_accepted(patch):
  right = reject.RULE

  def verify(noise, draft, p_BNV):
    found = right.verify(noise, draft, p_BNV)
    return found._replace(accepted_B=draft.count_B)

  patch.setattr(reject, 'RULE', right._replace(verify=verify, certain=False))


def temperature_of(change):
  def plant(patch):
    right = sampling_lib.probabilities

    def wrong(logits, sampling, best=None):
      given_B = sampling.temperature_B
      given_B = jnp.zeros_like(sampling.top_p_B) if given_B is None else given_B
      temperature_B = change(given_B)
      return right(logits, sampling._replace(temperature_B=temperature_B), best)

    patch.setattr(sampling_lib, 'probabilities', wrong)

  return plant


WARM = 'own-temperature'


@pytest.mark.more
@pytest.mark.parametrize(
  ('name', 'plant', 'case'),
  [
    ('float32-products', in_bfloat16, 'float32 rounds to some 1e-7'),
    ('float32-products', nan_of(weights, 'matmul'), 'off by nan'),
    ('whole-vocabulary', nan_of(sampling_lib, 'probabilities'), 'off by nan'),
    ('whole-vocabulary', hidden_top_k, '49,936 of 50,000 ids can never be'),
    ('fresh-draws', keys_of(lambda s, r, at: (s, r, 0 * at)), '100% of the'),
    ('fresh-draws', keys_of(lambda s, r, at: (s, 0 * r, at)), 'the same text'),
    (WARM, temperature_of(lambda t: jnp.full_like(t, t[0])), 'is greedy'),
    (WARM, temperature_of(lambda t: jnp.maximum(t, 1.0)), 'temperature 0: req'),
    (
      WARM,
      temperature_of(lambda t: jnp.where(t > 0, jnp.max(t), 0)),
      'among copies of itself',
    ),
    ('windows', everything_accepted, 'it accepts 2 of the drafts'),
    pytest.param(
      *('greedy-text', everything_accepted, 'BUG'), marks=pytest.mark.slow
    ),
  ],
)
def test_a_mistake_is_named(monkeypatch, name, plant, case):
  plant(monkeypatch)
  found = check(name)
  assert found.passed is False and case in found.case, found


@pytest.mark.more
@pytest.mark.parametrize(
  'share, passed', [(0.3, False), (0.6, True), (float('nan'), False)]
)
def test_slow_memory_is_named(monkeypatch, share, passed):
  reads = dict(sustained=share * 819.0)
  monkeypatch.setattr(timing, 'bandwidth', lambda programs: reads)
  monkeypatch.setattr(timing, 'reads', lambda dtype: {})
  device = type('Device', (), {'device_kind': 'TPU v5 lite'})
  monkeypatch.setattr(jax, 'devices', lambda: [device])
  found = check('bandwidth')
  assert found.passed is passed
  assert 'of the 819 of v5e' in found.case + found.reached


@pytest.mark.slow
def test_the_program_ends_in_ok():
  done = programs.run('scripts/doctor.py').check()
  names = [row['name'] for row in done.document['checks']]
  assert names == [x.name for x in doctor.CHECKS]
  assert 'OK: this machine' in done.out
