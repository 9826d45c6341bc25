"""Divergences against their formulas in NumPy, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.distill import divergences

pytestmark = pytest.mark.usefixtures('x64')


def laws(seed: int, vocab: int = 7):
  draw = np.random.default_rng(seed)
  p, q = draw.dirichlet(np.ones(vocab), 2)
  return p, q


def found(name: str, p, q) -> float:
  with np.errstate(divide='ignore'):
    logs = jnp.log(p), jnp.log(q)
  return float(divergences.divergence_of(name)(*logs))


def jensen_shannon(p, q, beta):
  m = beta * p + (1 - beta) * q
  kl = FORMULAS['forward_kl']
  return beta * kl(p, m) + (1 - beta) * kl(q, m)


FORMULAS = {
  'forward_kl': lambda p, q: np.sum(p * np.log(p / q), -1),
  'reverse_kl': lambda p, q: np.sum(q * np.log(q / p), -1),
  'total_variation': lambda p, q: np.sum(np.abs(p - q), -1) / 2,
  'log_alpha': lambda p, q: -np.log(np.sum(np.minimum(p, q), -1)),
  'jensen_shannon:0.1': lambda p, q: jensen_shannon(p, q, 0.1),
  'jensen_shannon:0.5': lambda p, q: jensen_shannon(p, q, 0.5),
}


@pytest.mark.parametrize('name', FORMULAS)
@pytest.mark.parametrize('seed', range(3))
def test_is_its_formula(name, seed):
  p, q = laws(seed)
  np.testing.assert_allclose(found(name, p, q), FORMULAS[name](p, q), 1e-12)
  assert abs(found(name, p, p)) < 1e-12


def test_a_draft_of_fewer_ids_sees_what_p_leaves_to_them():
  """On a part of the vocabulary, the total variation is still that of all."""
  p, q = laws(2)
  q[5:] = 0
  q /= q.sum()
  few = found('total_variation', p[:5], q[:5])
  np.testing.assert_allclose(few, np.sum(np.abs(p - q)) / 2, 1e-12)


@pytest.mark.parametrize('name', FORMULAS)
def test_slopes_are_finite_and_right_where_a_law_is_0(name):
  p = jnp.array([0.5, 0.5, 0.0, 0.0])
  logits = jnp.array([0.3, -0.2, 0.1, -jnp.inf])
  divergence = divergences.divergence_of(name)
  if name == 'reverse_kl':
    p = jnp.array([0.5, 0.3, 0.2, 0.0])  # it is infinite where p alone is 0

  def value(some):
    log_q = jax.nn.log_softmax(jnp.append(some, logits[3]))
    return divergence(jnp.log(p), log_q)

  slope = jax.grad(value)(logits[:3])
  assert np.isfinite(slope).all()
  for i in range(3):
    step = 1e-6 * np.eye(3)[i]
    want = (value(logits[:3] + step) - value(logits[:3] - step)) / 2e-6
    np.testing.assert_allclose(slope[i], want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
  'name', ['kl', 'jensen_shannon:1', 'jensen_shannon:x', 'forward_kl:0.5']
)
def test_refuses(name):
  why = f"'{name}': .*allowed are forward_kl, .* BETA between 0 and 1"
  with pytest.raises(ValueError, match=why):
    divergences.divergence_of(name)
