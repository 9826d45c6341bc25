"""A machine that computes wrongly, or a program that does, is named."""

import functools

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import sampling
from specdec_jax.bench import timing
from specdec_jax.certify import base, hardware
from specdec_jax.models import weights


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
  settings = functools.partial(sampling.settings, top_k=64)
  patch.setattr(sampling, 'settings', settings)


@pytest.mark.more
@pytest.mark.parametrize(
  ('check', 'plant', 'case'),
  [
    (hardware.float32_products, in_bfloat16, 'float32 rounds to some 1e-7'),
    (hardware.float32_products, nan_of(weights, 'matmul'), 'off by nan'),
    (hardware.whole_vocabulary, nan_of(sampling, 'probabilities'), 'by nan'),
    (hardware.whole_vocabulary, hidden_top_k, '936 of 1,000 ids can never'),
  ],
)
def test_a_mistake_is_named(monkeypatch, check, plant, case):
  jax.clear_caches()
  plant(monkeypatch)
  with jax.debug_nans(False), pytest.raises(base.Broken, match=case):
    check(1000)


@pytest.mark.parametrize('share', [0.3, float('nan'), 0.6])
def test_slow_memory_is_named(monkeypatch, share):
  reads = dict(sustained=share * 819.0)
  monkeypatch.setattr(timing, 'bandwidth', lambda programs: reads)
  monkeypatch.setattr(timing, 'reads', lambda dtype: {})
  device = type('Device', (), {'device_kind': 'TPU v5 lite'})
  monkeypatch.setattr(jax, 'devices', lambda: [device])
  if share > 0.5:
    assert hardware.bandwidth() == '491 GB/s of the 819 of v5e'
  else:
    with pytest.raises(base.Broken, match='of the 819 of v5e; is another'):
      hardware.bandwidth()
