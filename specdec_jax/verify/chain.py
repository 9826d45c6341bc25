"""Indexes p and q by draft tokens, for all rules."""

import jax
import jax.numpy as jnp

from specdec_jax import types

Array = jax.Array


def pick(p_BNV: Array, tokens_BK: Array) -> Array:
  """Picks p_BNV[:, k] at draft token k: [B, K]. What is no token gives NaN,
  which no rule accepts."""
  K, V = tokens_BK.shape[1], p_BNV.shape[-1]
  # A negative index would count from the end.
  tokens_BK = jnp.where(tokens_BK < 0, V, tokens_BK)
  return jnp.take_along_axis(p_BNV[:, :K], tokens_BK[..., None], -1)[..., 0]


def at(x_BV: Array, index_B1: Array) -> Array:
  """Picks from one distribution a row: [B]."""
  return pick(x_BV[:, None], index_B1)[:, 0]


def q_of_tokens(draft: types.Draft) -> Array:
  """Picks q at each draft token, [B, K]; a deterministic proposal has q = 1."""
  if draft.q_BKV is None:
    return jnp.ones(draft.tokens_BK.shape)
  return pick(draft.q_BKV, draft.tokens_BK)


def proposed(draft: types.Draft) -> Array:
  K = draft.tokens_BK.shape[1]
  return jnp.arange(K)[None] < draft.count_B[:, None]


def prefix(ok_BK: Array) -> Array:
  """Counts a row's leading true values: [B]."""
  return jnp.cumprod(ok_BK.astype(jnp.int32), -1).sum(-1, dtype=jnp.int32)


def row(p_BNV: Array, index_B: Array) -> Array:
  return jnp.take_along_axis(p_BNV, index_B[:, None, None], 1)[:, 0]


def q_row(draft: types.Draft, index_B: Array, like_BV: Array) -> Array:
  """Picks q at an offset, [B, V], in like_BV's dtype; zero where no token was
  proposed there."""
  K = draft.tokens_BK.shape[1]
  if K == 0:
    return jnp.zeros_like(like_BV)
  at_B = jnp.minimum(index_B, K - 1)
  if draft.q_BKV is None:
    token_B = jnp.take_along_axis(draft.tokens_BK, at_B[:, None], 1)
    q_BV = jnp.arange(like_BV.shape[-1])[None] == token_B
  else:
    q_BV = row(draft.q_BKV, at_B)
  return jnp.where((index_B < draft.count_B)[:, None], q_BV, 0).astype(
    like_BV.dtype
  )
