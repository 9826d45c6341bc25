"""The coupled rule, offset by offset, with the target's draws given."""

import itertools

import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.verify import coupled

K, V = 3, 5


def test_accepts_the_proposed_tokens_that_are_the_targets_draws():
  """All agreements of three tokens, with 0 to 3 of them proposed."""
  cases = list(itertools.product(range(K + 1), *[(True, False)] * K))
  B = len(cases)
  draws_BK = np.random.default_rng(0).integers(0, V, (B, K)).astype(np.int32)
  agree_BK = np.array([agree for _, *agree in cases])
  count_B = np.array([count for count, *_ in cases], np.int32)
  draft = types.Draft(
    jnp.asarray(np.where(agree_BK, draws_BK, (draws_BK + 1) % V)), None, count_B
  )
  p_BNV = jnp.asarray(np.random.default_rng(1).random((B, K + 1, V)))
  drawn = []

  def following(offset_B, weights_BV):
    k = len(drawn)
    # The noise of the position that this row of p is about.
    assert offset_B.tolist() == [k] * B
    np.testing.assert_array_equal(weights_BV, p_BNV[:, k])
    drawn.append(k)
    return jnp.asarray(draws_BK[:, k])

  noise = types.Noise(jnp.zeros((B, K)), lambda *_: None, following)
  verdict = coupled.verify(noise, draft, p_BNV)
  for b, (count, *agree) in enumerate(cases):
    wanted = 0
    while wanted < count and agree[wanted]:
      wanted += 1
    assert verdict.accepted_B[b] == wanted, (count, agree)
    np.testing.assert_array_equal(verdict.weights_BV[b], p_BNV[b, wanted])
  assert drawn == list(range(K))
