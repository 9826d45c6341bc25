"""The distribution of one window, enumerated: no sampling error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import types
from specdec_jax.certify import base, enumerate_window, enumerated
from specdec_jax.verify import reject


@pytest.fixture(params=['float32', 'float64'])
def either(request):
  with jax.enable_x64(request.param == 'float64'):
    yield


@pytest.mark.parametrize('shape', enumerated.SHAPES)
def test_law_of_a_window_is_the_targets(either, shape):
  """All families, three kinds of drafts; the certificate has more pairs."""
  off = enumerated.window_error(reject.RULE, 1, 400, *shape)
  assert off <= enumerated.BOUNDS[base.wide()]


@pytest.mark.parametrize('family', enumerate_window.FAMILIES)
def test_accept_test_flips_at_the_ratio(either, family):
  gamma, vocab = 2, 4
  p, q = enumerate_window.problems(
    family, seed=5, count=60, gamma=gamma, vocab=vocab
  )
  batch = enumerate_window.windows(p, q, np.full(60, gamma, np.int32))
  dtype = p.dtype
  # Subnormal p counts as 0 on CPU; such tokens carry no mass.
  draft, p_BNV = batch.draft, np.asarray(batch.p_BNV)
  at = np.asarray(draft.tokens_BK)[..., None]
  p_BK = np.take_along_axis(p_BNV[:, :gamma], at, -1)[..., 0]
  q_BK = np.take_along_axis(np.asarray(draft.q_BKV), at, -1)[..., 0]
  normal = lambda x: x >= 4 * np.finfo(dtype).tiny / np.finfo(dtype).eps
  with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
    t_BK = np.where(q_BK > 0, p_BK / np.where(q_BK > 0, q_BK, 1), 0)
  ulps = lambda t, n: (t * (1 + n * np.finfo(dtype).eps)).astype(dtype)
  for k in range(gamma):
    # Offsets before k pass where they can at all; then k decides.
    reached_B = (
      normal(p_BK[:, :k]).all(1) & (q_BK[:, k] > 0) & normal(p_BK[:, k])
    )
    for shift, passes in ((-2, True), (2, False)):
      u_B = ulps(t_BK[:, k], shift)
      tested_B = reached_B & (u_B < 1) & normal(u_B * q_BK[:, k])
      u_BK = np.zeros_like(p_BK)
      u_BK[:, k] = np.where(tested_B, u_B, 0)
      u_BK[:, k + 1 :] = np.nextafter(dtype.type(1), dtype.type(0))
      accepted_B, _ = enumerate_window.run_rule(reject.RULE, batch, u_BK)
      kept_B = accepted_B[tested_B] > k
      assert (kept_B == passes).all(), (family, k, shift)


def test_u_zero_rejects_what_the_target_excludes(either):
  p_V = np.array([0.5, 0.5, 0.0, 0.0, 0.0])
  q_V = np.array([0.0, 0.5, 0.25, 0.25, 0.0])
  p = jnp.asarray(np.tile(p_V, (5, 3, 1)))
  tokens = jnp.array([[2, 0], [1, 3], [1, 1], [3, 2], [4, 0]], jnp.int32)
  for q in (jnp.asarray(np.tile(q_V, (5, 2, 1))), None):
    draft = types.Draft(tokens, q, jnp.full(5, 2, jnp.int32))
    batch = enumerate_window.Windows(draft, p, np.ones((1, 5)))
    accepted_B, _ = enumerate_window.run_rule(
      reject.RULE, batch, jnp.zeros((5, 2))
    )
    assert accepted_B.tolist() == [0, 1, 2, 0, 0]


def test_certain_draft_equals_its_one_hot():
  rng = np.random.default_rng(3)
  B, K, V = 4096, 3, 5
  p, _ = enumerate_window.problems('sigma 3', seed=1, count=B, gamma=K, vocab=V)
  p = jnp.asarray(p[:, :, 0])
  tokens = rng.integers(0, V, (B, K)).astype(np.int32)
  count = rng.integers(0, K + 1, B).astype(np.int32)
  accept = rng.random((B, K)).astype(np.float32)
  one_hot = np.eye(V, dtype=np.float32)[tokens]
  results = [
    enumerate_window.run_rule(
      reject.RULE,
      enumerate_window.Windows(
        types.Draft(tokens, q, count), p, np.ones((1, B))
      ),
      accept,
    )
    for q in (None, one_hot)
  ]
  np.testing.assert_array_equal(results[0][0], results[1][0])
  np.testing.assert_array_equal(results[0][1], results[1][1])


def test_real_vocabulary_with_flat_and_peaked_rows():
  V, B = 50257, 64
  rng = np.random.default_rng(0)
  for sigma in (0.5, 4.0):
    z = sigma * rng.normal(size=(2, V))
    p_V, q_V = (np.exp(z) / np.exp(z).sum(-1, keepdims=True)).astype(np.float32)
    tokens = rng.choice(V, (B, 1), p=q_V.astype(float) / q_V.sum(dtype=float))
    draft = types.Draft(
      jnp.asarray(tokens, jnp.int32),
      jnp.broadcast_to(q_V, (B, 1, V)),
      jnp.ones(B, jnp.int32),
    )
    batch = enumerate_window.Windows(
      draft, jnp.broadcast_to(p_V, (B, 2, V)), np.ones((1, B))
    )
    t_B1 = np.minimum(p_V.astype(float) / q_V, 1)[tokens]
    kept_B, _ = enumerate_window.run_rule(
      reject.RULE, batch, np.float32(t_B1 * 0.999)
    )
    assert (kept_B == 1).all()
    high_B1 = np.float32(np.minimum(t_B1 * 1.001 + 1e-7, 1 - 2**-24))
    kept_B, weights_BV = enumerate_window.run_rule(reject.RULE, batch, high_B1)
    refused_B = t_B1[:, 0] < 0.998
    assert refused_B.any() and (kept_B[refused_B] == 0).all()
    w_V = weights_BV[refused_B][0].astype(float)
    keep_V = np.minimum(p_V.astype(float), q_V)
    law_V = keep_V + (1 - keep_V.sum()) * w_V / w_V.sum()
    assert np.abs(law_V - p_V).max() <= 1e-6
