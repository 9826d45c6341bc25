"""Draws problems, pairs of p and q, and lists every window drafted from them.

X: problems. R: what may be drawn, chains or trees. B = X * R.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.certify.enumerate_window import Windows, normal


def _softmax(rng, shape, sigma):
  z = sigma * rng.normal(size=shape)
  return normal(np.exp(z - z.max(-1, keepdims=True)))


def _one_hot(rng, shape):
  return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]


def _one_ulp(rng, shape, dtype):
  """Makes q from p: moves entries by -1, 0 or 1 units in the last place."""
  p = _softmax(rng, shape, 1).astype(dtype)
  to = np.array([0, np.nan, 1], dtype)[rng.integers(0, 3, p.shape)]
  return p, np.where(np.isnan(to), p, np.nextafter(p, to, dtype=dtype))


def _truncated(rng, shape):
  """Draws with a random top-k, so that supports differ."""
  p = _softmax(rng, shape, 1)
  k = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
  rank = np.argsort(np.argsort(-p, -1), -1)
  return normal(np.where(rank < k, p, 0))


def _disjoint(rng, shape):
  in_p = rng.random(shape) < 0.5
  in_p[..., 0], in_p[..., 1] = True, False
  in_p ^= rng.random((*shape[:-1], 1)) < 0.5
  p, q = _softmax(rng, shape, 1), _softmax(rng, shape, 1)
  return normal(p * in_p), normal(q * ~in_p)


def _tails(rng, shape):
  """Draws with zero mass from a random index of each row on."""
  end = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
  return normal(_softmax(rng, shape, 1) * (np.arange(shape[-1]) < end))


def _subnormal(rng, shape):
  """Draws one peak; all else is near the smallest float32 number."""
  w = 10.0 ** rng.uniform(-44, -30, shape)
  return np.maximum(w, _one_hot(rng, shape))


# name -> f(rng, shape, dtype) -> (p, q), normalised over the last axis. Simple
# ones first: a failing rule is reported on the first family that it fails on.
FAMILIES: dict[str, Callable[..., Any]] = {
  'sigma 1': lambda r, s, d: (_softmax(r, s, 1), _softmax(r, s, 1)),
  'sigma 3': lambda r, s, d: (_softmax(r, s, 3), _softmax(r, s, 3)),
  'flat': lambda r, s, d: (_softmax(r, s, 0.1), _softmax(r, s, 0.1)),
  'sigma 10': lambda r, s, d: (_softmax(r, s, 10), _softmax(r, s, 10)),
  'equal': lambda r, s, d: (_softmax(r, s, 1),) * 2,
  'truncated': lambda r, s, d: (_truncated(r, s), _truncated(r, s)),
  'zero tails': lambda r, s, d: (_tails(r, s), _tails(r, s)),
  'disjoint': lambda r, s, d: _disjoint(r, s),
  'one-hot q': lambda r, s, d: (_softmax(r, s, 1), _one_hot(r, s)),
  'one-hot p': lambda r, s, d: (_one_hot(r, s), _softmax(r, s, 1)),
  'one ulp': _one_ulp,
  'subnormal': lambda r, s, d: (_subnormal(r, s), _subnormal(r, s)),
}


def of_all_families(seed: int, *, each: int, gamma: int, vocab: int):
  """Draws (p_XNVV, q_XKVV), `each` of every family in their order.

  [x, k, v] is the distribution of token k after v as token k - 1.
  """
  dtype = np.dtype(jnp.result_type(float))
  shape, parts = (each, gamma + 1, vocab, vocab), []
  for i, family in enumerate(FAMILIES.values()):
    rng = np.random.default_rng([seed, gamma, vocab, i])
    parts.append(family(rng, shape, dtype))
  p, q = (np.concatenate(x).astype(dtype) for x in zip(*parts, strict=True))
  return p, q[:, :gamma]


def target_distribution(p_XNVV) -> np.ndarray:
  """Computes the target's joint p, which `distribution` must equal."""
  p_XNVV = normal(p_XNVV.astype(np.float64))
  out = p_XNVV[:, 0, 0]
  X, N, V, _ = p_XNVV.shape
  for k in range(1, N):
    one = (1,) * (out.ndim - 2)
    out = out[..., None] * p_XNVV[:, k].reshape((X, *one, V, V))
  return out


# --- windows ------------------------------------------------------------------

# Of siblings: drawn one after another without those before; certain.
KINDS = 'distinct', 'deterministic'


def parents_of(levels: str) -> tuple[int, ...]:
  """Lists parents: '3,2' has three children of the root, and two of each."""
  parents, level = [], [-1]
  for count in map(int, levels.split(',')):
    first = len(parents)
    parents += [node for node in level for _ in range(count)]
    level = range(first, len(parents))
  return tuple(parents)


def windows(
  p_XNVV, q_XKVV, kind: str, tree_K=None, *, count_X: Any = None
) -> Windows:
  """Makes the batch of problems, as of_all_families has them.

  kind: of KINDS; certain siblings are q's likeliest tokens. tree_K: parents of
  a tree with as many levels as p and q; None: a chain. count_X: how many drafts
  of a chain are proposed; None: all.
  """
  X, N, V, _ = p_XNVV.shape
  parents_K = range(-1, N - 2) if tree_K is None else tree_K
  tokens, chance, qs = np.zeros((X, 1, 0), np.int32), np.ones((X, 1)), []
  rows_X1, depths = np.arange(X)[:, None], [0]  # of the root
  for i, parent in enumerate(parents_K):
    depth, R = depths[parent + 1], tokens.shape[1]
    depths.append(depth + 1)
    before = tokens[..., parent] if parent >= 0 else np.zeros((X, R), int)
    elders = [j for j in range(i) if parents_K[j] == parent]
    q = q_XKVV[rows_X1, depth, before]
    q, drawn = _given(q, tokens[..., elders], kind)
    chance = (chance[..., None] * drawn).reshape(X, R * V)
    kept = np.flatnonzero((chance > 0).any(0))  # no problem draws the others
    row, token = kept // V, np.tile((kept % V).astype(np.int32), (X, 1))
    chance, qs = chance[:, kept], [x[:, row] for x in [*qs, q]]
    tokens = np.concatenate([tokens[:, row], token[..., None]], -1)
  R, K = tokens.shape[1:]
  before = np.pad(tokens, ((0, 0), (0, 0), (1, 0)))
  p = p_XNVV[rows_X1[..., None], np.array(depths), before]
  flat = lambda x: jnp.asarray(x.reshape(X * R, *x.shape[2:]))
  q = np.stack(qs, 2)
  count_B = np.repeat(np.full(X, K) if count_X is None else count_X, R)
  draft = types.Draft(
    flat(tokens),
    None if kind == 'deterministic' else flat(q),
    jnp.asarray(count_B, jnp.int32),
  )
  if tree_K is not None:
    proposed = q.sum(-1) > 0
    for i, parent in enumerate(tree_K):
      if parent >= 0:
        proposed[..., i] &= proposed[..., parent]
    draft = draft._replace(
      parents_BK=jnp.tile(jnp.asarray(tree_K, jnp.int32), (X * R, 1)),
      proposed_BK=flat(proposed),
    )
  return Windows(draft, np.asarray(flat(p)), chance.reshape(-1))


def _given(q, elders, kind: str):
  """Computes (a child's q given its elder siblings, p of what is drawn).

  Where q has nothing left it is 0, and token 0 is drawn but not proposed.

  q: [X, R, V]. elders: their tokens, [X, R, siblings].
  """
  left = q.astype(np.float64)
  if kind == 'deterministic':
    # The order of q, and of ids where q has no more.
    V = q.shape[-1]
    left = np.where(q > 0, left + 1, 1 - np.arange(V) / V)
  np.put_along_axis(left, elders, 0, -1)
  if kind == 'deterministic':
    left = np.eye(q.shape[-1])[left.argmax(-1)]
  some = left.sum(-1, keepdims=True) > 0
  drawn = normal(np.where(some, left, np.eye(q.shape[-1])[0]))
  # In its own bits, if it can be: p and q may be equal.
  own = np.where(some, drawn, 0).astype(q.dtype) if elders.shape[-1] else q
  return own, drawn
