"""Rules and drafters as a user would bring them: some right, some wrong."""

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.verify import chain, reject


def hotter(noise, draft, p_BNV):
  """Biased on purpose: the target at temperature 1.02."""
  p_BNV **= 1 / 1.02
  return reject.verify(noise, draft, p_BNV / p_BNV.sum(-1, keepdims=True))


def block(noise, draft, p_BNV):
  """Block verification, Sun et al. 2024 (2403.10444), Algorithm 2: exact."""
  B, K = draft.tokens_BK.shape
  if K == 0:
    return types.Verdict(jnp.zeros(B, jnp.int32), p_BNV[:, 0])
  q_BKV = draft.q_BKV
  if q_BKV is None:
    q_BKV = jax.nn.one_hot(draft.tokens_BK, p_BNV.shape[-1], dtype=p_BNV.dtype)
  at_BK1 = draft.tokens_BK[..., None]
  p_BK = jnp.take_along_axis(p_BNV[:, :K], at_BK1, -1)[..., 0]
  q_BK = jnp.take_along_axis(q_BKV, at_BK1, -1)[..., 0]
  w_B = jnp.ones(B, p_BNV.dtype)
  tau_B, w_tau_B = jnp.zeros(B, jnp.int32), w_B
  for i in range(1, K + 1):
    grown_B = w_B * p_BK[:, i - 1]
    # w p / q, at most 1, without dividing by a q that may be 0.
    full_B = (grown_B >= q_BK[:, i - 1]) & (p_BK[:, i - 1] > 0)
    w_B = jnp.where(
      full_B, 1, grown_B / jnp.where(full_B | (grown_B == 0), 1, q_BK[:, i - 1])
    ).astype(p_BNV.dtype)
    h_B = w_B
    if i < K:
      left_BV = jnp.maximum(w_B[:, None] * p_BNV[:, i] - q_BKV[:, i], 0)
      mass_B = left_BV.sum(-1)
      below_B = mass_B + 1 - w_B
      ratio_B = jnp.where(
        below_B > 0, mass_B / jnp.where(below_B > 0, below_B, 1), 1
      )
      h_B = jnp.where(i < draft.count_B, ratio_B, w_B)
    ok_B = (noise.accept_BK[:, i - 1] < h_B) & (i <= draft.count_B)
    tau_B = jnp.where(ok_B, i, tau_B)
    w_tau_B = jnp.where(ok_B, w_B, w_tau_B)
  p_BV = chain.row(p_BNV, tau_B)
  rest_BV = w_tau_B[:, None] * p_BV - chain.q_row(draft, tau_B, p_BV)
  whole_B1 = (tau_B == draft.count_B)[:, None]
  return types.Verdict(
    tau_B, jnp.where(whole_B1, p_BV, jnp.maximum(rest_BV, 0))
  )


def block_by_position(noise, draft, p_BNV):
  """Block with uniforms that belong to a position, not to a window: biased.

  Each window alone is exact. But tau = m says that later positions failed, and
  the next window meets the same uniforms there again.
  """
  B, K = draft.tokens_BK.shape
  cells, V = 1024, p_BNV.shape[-1]
  # A race over cells that the next token's own draw does not look at.
  flat_BC = jnp.broadcast_to((jnp.arange(V + cells) >= V) * 1.0, (B, V + cells))
  at = lambda k: noise.next(jnp.full(B, k, jnp.int32), flat_BC) - V
  u_BK = [(at(k) + 0.5) / cells for k in range(K)]
  accept_BK = jnp.stack(u_BK, 1) if K else noise.accept_BK
  return block(
    noise._replace(accept_BK=accept_BK.astype(p_BNV.dtype)), draft, p_BNV
  )


def wrong_arguments(noise, draft):
  return noise, draft


def no_verdict(noise, draft, p_BNV):
  return p_BNV


def no_empty_window(noise, draft, p_BNV):
  return reject.verify(noise, draft, p_BNV)._replace(
    accepted_B=jnp.stack(list(draft.tokens_BK.T))[0]
  )


LOSSY = types.Rule('lossy', reject.verify, lossless=False)


def makes_nothing(*, gamma):
  return None


def forgetful(model, *, gamma):
  """A drafter whose q is not what its tokens were drawn from."""
  right = lm_drafter.make(model, gamma=gamma)

  def propose(weights, state, context, noise, target_cache):
    draft, state, cache = right.propose(
      weights, state, context, noise, target_cache
    )
    return draft._replace(q_BKV=draft.q_BKV**0.9), state, cache

  return right._replace(name='forgetful', propose=propose)


def careful(model, *, gamma):
  """The library's own drafter under another name."""
  return lm_drafter.make(model, gamma=gamma)._replace(name='careful')


def needs_more(model, corpus, *, gamma):
  return lm_drafter.make(model, gamma=gamma)
