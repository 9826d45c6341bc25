"""Lenience: what it emits, how far that is from p, and its bound."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import sampling, types
from specdec_jax.certify import enumerate_window
from specdec_jax.verify import lenient

V = 5


def scores(logits_BNV, temperature):
  B = len(logits_BNV)
  return types.Scores(
    jnp.asarray(logits_BNV), sampling.settings(B, temperature)
  )


@pytest.mark.more
@pytest.mark.parametrize('lenience', [0.9, 0.3])
def test_a_window_of_two_drafts_emits_the_stated_law(lenience, x64):
  """Every draft and every side of both tests, on the production rule."""
  K, vocab, rule = 2, 3, lenient.make(lenience)
  every = [
    enumerate_window.problems(name, 0, count=10, gamma=K, vocab=vocab)
    for name in enumerate_window.FAMILIES
  ]
  p_XNVV, q_XKVV = map(np.concatenate, zip(*every, strict=True))
  batch = enumerate_window.windows(
    p_XNVV, q_XKVV, np.full(len(p_XNVV), K, np.int32)
  )
  # Only a greedy row reads the logits.
  bound = rule._replace(
    verify=lambda noise, draft, p_BNV: rule.verify(
      noise, draft, p_BNV, scores(np.zeros(p_BNV.shape), 1.0)
    ),
    scored=False,
  )
  target = enumerate_window.target_distribution(p_XNVV)
  emitted = enumerate_window.window_distribution(bound, batch, target)
  p_XNVV, q_XKVV = (
    enumerate_window.normal(x.astype(float)) for x in (p_XNVV, q_XKVV)
  )
  # kept and emitted of both tokens, the second after each first one.
  flat = lambda x_XVV: x_XVV.reshape(1, -1, vocab)
  s = scores(np.zeros((1, 1, vocab)), 1.0)
  of = lambda k, f: np.asarray(
    f(flat(p_XNVV[:, k]), flat(q_XKVV[:, k]), s)
  ).reshape(-1, vocab, vocab)
  first_XV = of(0, rule.emitted)[:, 0]
  np.testing.assert_allclose(emitted.sum((2, 3)), first_XV, atol=1e-12)
  assert (emitted.sum((2, 3)) <= p_XNVV[:, 0, 0] / lenience + 1e-12).all()
  # A token after a rejection is the target's alone, and so is the bonus.
  kept_XV1 = of(0, rule.kept)[:, 0, :, None]
  both_XVV = kept_XV1 * of(1, rule.emitted)
  both_XVV += (first_XV[..., None] - kept_XV1) * p_XNVV[:, 1]
  wanted = both_XVV[..., None] * p_XNVV[:, 2][:, None]
  np.testing.assert_allclose(emitted, wanted, atol=1e-12)
  limit_XVV = first_XV[..., None] * p_XNVV[:, 1] / lenience
  assert (emitted.sum(3) <= limit_XVV + 1e-12).all()


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
