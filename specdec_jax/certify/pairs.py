"""Pairs of laws (p, q) that verification rules have been seen to get wrong."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


def _softmax(rng, shape, sigma):
  z = sigma * rng.normal(size=shape)
  return normal(np.exp(z - z.max(-1, keepdims=True)))


def normal(w):
  return w / w.sum(-1, keepdims=True)


def _one_hot(rng, shape):
  return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]


def _ulp(rng, p, dtype):
  """p with every entry moved by -1, 0 or 1 units in the last place."""
  p = p.astype(dtype)
  to = np.array([0, np.nan, 1], dtype)[rng.integers(0, 3, p.shape)]
  return np.where(np.isnan(to), p, np.nextafter(p, to, dtype=dtype))


def _truncated(rng, shape):
  """Random top-k, so that supports differ."""
  p = _softmax(rng, shape, 1)
  k = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
  rank = np.argsort(np.argsort(-p, -1), -1)
  return normal(np.where(rank < k, p, 0))


def _disjoint(rng, shape):
  in_p = rng.random(shape) < 0.5
  in_p[..., 0], in_p[..., 1] = True, False
  flip = rng.random((*shape[:-1], 1)) < 0.5
  p, q = _softmax(rng, shape, 1), _softmax(rng, shape, 1)
  return normal(p * (in_p ^ flip)), normal(q * ~(in_p ^ flip))


def _tails(rng, shape):
  """Zero mass from an index of the row's own on."""
  end = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
  return normal(_softmax(rng, shape, 1) * (np.arange(shape[-1]) < end))


def _tiny(rng, shape):
  """A peak, and the rest near the smallest float32 numbers."""
  w = 10.0 ** rng.uniform(-44, -30, shape)
  return np.maximum(w, _one_hot(rng, shape))


# name -> f(rng, shape, dtype) -> (p, q), rows over the last axis of shape.
FAMILIES: dict[str, Callable[..., Any]] = {
  'flat': lambda r, s, d: (_softmax(r, s, 0.1), _softmax(r, s, 0.1)),
  'sigma 1': lambda r, s, d: (_softmax(r, s, 1), _softmax(r, s, 1)),
  'sigma 3': lambda r, s, d: (_softmax(r, s, 3), _softmax(r, s, 3)),
  'sigma 10': lambda r, s, d: (_softmax(r, s, 10), _softmax(r, s, 10)),
  'disjoint': lambda r, s, d: _disjoint(r, s),
  'equal': lambda r, s, d: (_softmax(r, s, 1),) * 2,
  'one ulp': lambda r, s, d: (lambda p: (p, _ulp(r, p, d)))(_softmax(r, s, 1)),
  'one-hot p': lambda r, s, d: (_one_hot(r, s), _softmax(r, s, 1)),
  'one-hot q': lambda r, s, d: (_softmax(r, s, 1), _one_hot(r, s)),
  'zero tails': lambda r, s, d: (_tails(r, s), _tails(r, s)),
  'subnormal': lambda r, s, d: (_tiny(r, s), _tiny(r, s)),
  'truncated': lambda r, s, d: (_truncated(r, s), _truncated(r, s)),
}


def problems(
  family: str, seed: int | list[int], *, count: int, gamma: int, vocab: int
):
  """Random (p_XNVV, q_XKVV): the law of token k after each token k - 1."""
  dtype = np.dtype(jnp.result_type(float))
  p, q = FAMILIES[family](
    np.random.default_rng(seed), (count, gamma + 1, vocab, vocab), dtype
  )
  return p.astype(dtype), q.astype(dtype)[:, :gamma]
