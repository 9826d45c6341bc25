"""Typical acceptance: what it keeps, and the token that follows."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import types
from specdec_jax.verify import typical

V = 5
FLAT, SURE = [0.4, 0.3, 0.2, 0.1, 0.0], [0.9, 0.1, 0.0, 0.0, 0.0]


def window(rule, p_NV, tokens_BK, counts=None):
  """The verdict of a rule on windows with the same p."""
  B, K = np.shape(tokens_BK)
  count_B = jnp.full(B, K) if counts is None else jnp.asarray(counts)
  q_BKV = jnp.full((B, K, V), 1 / V)
  draft = types.Draft(jnp.asarray(tokens_BK), q_BKV, count_B)
  p_BNV = jnp.broadcast_to(jnp.asarray(p_NV), (B, K + 1, V))
  return rule.verify(types.Noise(jnp.zeros((B, K)), None, None), draft, p_BNV)


@pytest.mark.parametrize(
  # H(FLAT) = 1.280, exp(-H) = 0.278; H(SURE) = 0.325, exp(-H) = 0.722.
  'eps, p_V, kept',
  [
    (0.09, FLAT, 4),  # 0.3 * 0.278 = 0.083
    (0.3, FLAT, 3),  # 0.548 * 0.278 = 0.152
    (0.6, FLAT, 2),  # 0.775 * 0.278 = 0.215
    (0.98, FLAT, 2),  # 0.990 * 0.278 = 0.275
    (0.09, SURE, 2),  # 0.09, of 0.3 * 0.722 = 0.217
    (0.11, SURE, 1),
    (0.98, SURE, 1),  # 0.990 * 0.722 = 0.715
    (0.98, [1.0, 0.0, 0.0, 0.0, 0.0], 1),
  ],
)
def test_a_draft_is_kept_where_the_paper_keeps_it(eps, p_V, kept):
  verdict = window(typical.make(eps), [p_V] * 2, np.arange(V)[:, None])
  assert verdict.accepted_B.tolist() == [1] * kept + [0] * (V - kept)


def test_a_window_ends_at_the_first_draft_that_fails():
  """Then comes the likeliest token, or of no draft any."""
  p_NV = [FLAT, SURE, np.roll(FLAT, 2)]
  tokens_BK = [[0, 0], [3, 0], [0, 1], [1, 0], [0, 0], [0, 0]]
  counts = [2, 2, 2, 2, 1, 0]
  verdict = window(typical.make(0.3), p_NV, tokens_BK, counts)
  assert verdict.accepted_B.tolist() == [2, 0, 1, 2, 1, 0]
  likeliest = [2, 0, 0, 2, 0]
  np.testing.assert_array_equal(verdict.weights_BV[:-1], np.eye(V)[likeliest])
  np.testing.assert_allclose(verdict.weights_BV[-1], FLAT)


def test_what_is_stated_where_nothing_is_drafted():
  p_BTV, q_BTV = jnp.asarray([[FLAT]]), jnp.zeros((1, 1, V))
  found = typical.make(0.3).emitted(p_BTV, q_BTV, None)
  np.testing.assert_array_equal(found, p_BTV)
