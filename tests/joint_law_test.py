"""The joint law over consecutive windows: the cheapest cases of the promises.

The certificate (certify_test.py) has them in full.
"""

import functools

import jax
import numpy as np
import pytest

from specdec_jax import decode
from specdec_jax.certify import (
  base,
  enumerated,
  recipes,
  statistics,
  table_model,
)
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import scripted
from specdec_jax.verify import coupled, reject

V, K = 3, 2
PROMPT = enumerated.PROMPT[V]


@pytest.mark.parametrize(
  'draft, settings',
  [
    ('lm', dict(temperature=1.0)),
    ('ragged', dict(temperature=0.7, top_k=2)),
    ('scripted', dict(temperature=1.3)),
  ],
)
def test_three_windows_of_reject_enumerated(draft, settings):
  with jax.enable_x64(True):
    world = base.tables(V)
    drafter, other = recipes.RECIPES['lm'](world, K)
    if draft == 'ragged':
      drafter = base.ragged(drafter)
    if draft == 'scripted':
      script = np.random.default_rng(1).integers(0, V, (1, 48))
      script = np.repeat(script.astype(np.int32), enumerated.ROWS, 0)
      drafter, other = scripted.make(gamma=K), (script, script % (K + 1))
    off, _ = enumerated.walk(
      world, drafter, other, reject.RULE, settings, windows=3
    )
  assert off <= enumerated.BOUNDS[True]


@functools.cache
def counted(rule, drafter, samples, rows, settings):
  """How often production decoding says each text of 7 tokens."""
  n, world = 7, base.tables(V)
  counts, calls = np.zeros(V**n), []
  for i in range(samples // rows):
    request = base.make_request(
      world,
      [PROMPT] * rows,
      n,
      length=len(PROMPT) + n + K,
      gamma=K,
      request=np.arange(rows) + i * rows,
      **dict(settings),
    )
    out = base.run(world, drafter, rule, world.weights.draft, request)
    new = out.tokens_BL[:, len(PROMPT) : len(PROMPT) + n]
    assert (out.lengths_B == len(PROMPT) + n).all()
    counts += np.bincount(np.ravel_multi_index(new.T, (V,) * n), minlength=V**n)
    calls.append(out.info.calls_B)
  assert np.concatenate(calls).min() >= (3 if drafter.gamma else n)
  warped = table_model.warped(world.weights.target, **dict(settings))
  law = table_model.joint_law(warped, PROMPT, n)
  return counts.reshape(law.shape), law


DRAFT = lm_drafter.make(base.tables(V).draft, gamma=K)
SETTINGS = (('temperature', 0.9), ('top_p', 0.95))


@pytest.mark.parametrize(
  'rule', [reject.RULE, coupled.RULE], ids=lambda r: r[0]
)
def test_joint_law_of_generate(rule):
  counts, law = counted(rule, DRAFT, 2**16, 2**12, SETTINGS)
  assert statistics.chi_square(counts, law) > 1e-9


def test_joint_law_of_plain_decoding():
  counts, law = counted(reject.RULE, decode.PLAIN, 2**16, 2**12, SETTINGS)
  assert statistics.chi_square(counts, law) > 1e-9


def test_chi_square_sees_a_bias():
  rng = np.random.default_rng(0)
  law = rng.dirichlet(np.ones(200))
  counts = rng.multinomial(2**16, law)
  other = law * (1 + 0.1 * rng.choice([-1, 1], 200))
  assert statistics.chi_square(counts, law) > 1e-3
  assert statistics.chi_square(counts, other / other.sum()) < 1e-9
