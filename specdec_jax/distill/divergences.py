"""Divergences between teacher and student, which distillation minimises.

Each takes log p (teacher) and log q (student), [..., V], and returns [...], in
nats. A reduced vocabulary restricts both: q sums to 1 there, p to the mass that
the teacher gives it.
"""

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specdec_jax import fields

Array = jax.Array
Divergence = Callable[[Array, Array], Array]


def forward_kl(log_p: Array, log_q: Array) -> Array:
  """sum p log(p / q): q must cover all of p."""
  return jnp.sum(_terms(log_p, log_q), -1)


def reverse_kl(log_p: Array, log_q: Array) -> Array:
  """sum q log(q / p): q may settle on a part of p."""
  return jnp.sum(_terms(log_q, log_p), -1)


def jensen_shannon(log_p: Array, log_q: Array, *, beta: float = 0.5) -> Array:
  """beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q.

  GKD (Agarwal et al. 2024, https://arxiv.org/abs/2306.13649), equation 1.
  """
  assert 0 < beta < 1, beta
  # Finite: logaddexp of two -inf has no gradient. _terms drops those anyway.
  finite = lambda x: jnp.maximum(x, -1e30)
  log_m = jnp.logaddexp(
    finite(log_p) + jnp.log(beta), finite(log_q) + jnp.log1p(-beta)
  )
  to_p, to_q = _terms(log_p, log_m), _terms(log_q, log_m)
  return jnp.sum(beta * to_p + (1 - beta) * to_q, -1)


def total_variation(log_p: Array, log_q: Array) -> Array:
  """1 - sum min(p, q): the probability that a draft token is rejected.

  Leviathan et al. 2023, theorem 3.5; DistillSpec's TVD.
  """
  return 1 - alpha(log_p, log_q)


def log_alpha(log_p: Array, log_q: Array) -> Array:
  """-log sum min(p, q): unlike total variation, steep where alpha is small."""
  return -jnp.log(jnp.maximum(alpha(log_p, log_q), 1e-9))


def alpha(log_p: Array, log_q: Array) -> Array:
  """sum min(p, q): the probability that a draft token is accepted."""
  return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), -1)


DIVERGENCES: dict[str, Divergence] = {
  'forward_kl': forward_kl,
  'reverse_kl': reverse_kl,
  'total_variation': total_variation,
  'log_alpha': log_alpha,
}


def divergence_of(name: str) -> Divergence:
  """Finds a divergence by name; 'jensen_shannon:0.5' has beta 0.5."""
  if name in DIVERGENCES:
    return DIVERGENCES[name]
  kind, _, beta = name.partition(':')
  with contextlib.suppress(ValueError):
    if kind == 'jensen_shannon' and 0 < float(beta) < 1:
      return functools.partial(jensen_shannon, beta=float(beta))
  raise ValueError(
    f'divergence={name!r}: {fields.choices(name, DIVERGENCES)}, and '
    'jensen_shannon:BETA with BETA between 0 and 1'
  )


def _terms(log_a: Array, log_b: Array) -> Array:
  """Computes a log(a / b), and 0 where a is 0, whatever b is there."""
  positive = log_a > -jnp.inf
  # Replaced before subtracting: infinity minus infinity has no gradient.
  log_a, log_b = (jnp.where(positive, x, 0) for x in (log_a, log_b))
  return jnp.where(positive, jnp.exp(log_a) * (log_a - log_b), 0)
