"""Lenience: what it accepts, and how far what it emits is from p."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import sampling, types
from specdec_jax.verify import lenient

V = 5


def scores(logits_BNV, temperature):
  B = len(logits_BNV)
  return types.Scores(
    jnp.asarray(logits_BNV), sampling.settings(B, temperature)
  )


def test_accepts_at_the_ratio_divided_by_the_lenience():
  p_V, q_V = np.array([0.1, 0.9, 0, 0, 0]), np.array([0.8, 0.2, 0, 0, 0])
  draft = types.Draft(jnp.array([[0]]), jnp.array([[q_V]]), jnp.array([1]))
  s = scores(np.zeros((1, 2, V)), 1.0)
  for u, kept in ((0.24, 1), (0.26, 0)):  # 0.1 / (0.5 * 0.8) = 0.25
    noise = types.Noise(jnp.array([[u]]), None, None)
    p_1NV = jnp.broadcast_to(jnp.asarray(p_V), (1, 2, V))
    verdict = lenient.make(0.5).verify(noise, draft, p_1NV, s)
    assert verdict.accepted_B.tolist() == [kept]


@pytest.mark.more
def test_greedy_keeps_what_is_nearly_the_best():
  p_V = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
  with np.errstate(divide='ignore'):
    s = scores(np.log(np.tile(p_V, (V, 2, 1))), 0.0)
  p_BNV = jnp.broadcast_to(jnp.eye(V)[0], (V, 2, V))
  draft = types.Draft(
    jnp.arange(V)[:, None], jnp.eye(V)[:, None], jnp.ones(V, jnp.int32)
  )
  noise = types.Noise(jnp.zeros((V, 1)), None, None)
  for lenience, kept in ((0.9, 1), (0.6, 2), (0.3, 3), (0.1, 4)):
    verdict = lenient.make(lenience).verify(noise, draft, p_BNV, s)
    assert verdict.accepted_B.tolist() == [1] * kept + [0] * (V - kept)
    assert (verdict.weights_BV[kept:].argmax(-1) == 0).all()
    said = lenient.make(lenience).emitted(
      p_BNV[:, :1], draft.q_BKV, s._replace(logits_BNV=s.logits_BNV[:, :1])
    )
    off = np.abs(said - p_BNV[:, :1]).sum(-1)[:, 0] / 2
    assert off.tolist() == [0] + [1] * (kept - 1) + [0] * (V - kept)
