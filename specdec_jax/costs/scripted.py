"""Drafts a given text, for calibration and tests."""

import functools

import jax.numpy as jnp

from specdec_jax import types


@functools.cache  # an equal drafter would be compiled again
def make(*, gamma: int) -> types.Drafter:
  """Proposes gamma tokens from a given text (the script), at no cost.

  weights.draft is (script_BL, count_BL): the token to propose at each index in
  the row, and the most tokens to propose in a window that starts there. The
  target's greedy text with some tokens replaced gives any acceptance; wrong
  tokens everywhere give windows in which nothing is accepted.
  """

  def propose(weights, state, context, noise, target_cache):
    del noise
    script_BL, count_BL = weights.draft
    L = script_BL.shape[1]
    at_BK = context.lengths_B[:, None] + jnp.arange(gamma)[None]
    take = lambda x, at: jnp.take_along_axis(x, jnp.minimum(at, L - 1), 1)
    count_B = jnp.clip(
      take(count_BL, context.lengths_B[:, None])[:, 0], 0, gamma
    )
    return (
      types.Draft(take(script_BL, at_BK), None, count_B),
      state,
      target_cache,
    )

  return types.Drafter(
    'scripted', gamma, lambda *_: (), propose, lambda state, *_: state
  )
