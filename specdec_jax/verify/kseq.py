"""k-SEQ: independent siblings, each tested with a share of p."""

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import chain, reject, tree

Array = types.Array


def verify(noise: types.Noise, draft: types.Draft, p_BNV) -> types.Verdict:
  """Tests the k children of the last accepted node, all drawn from one q.

  Child x is accepted with probability min(1, p(x) / (rho q(x))); the first that
  is has its children tested next. With beta the mass of min(p / rho, q) and
  m = (1 - (1 - beta)^k) / beta, the tests that are made on average, one is with
  probability m beta; if none is, the next token is drawn from
  p - m min(p / rho, q). That is nowhere negative for any rho that is at least
  m; the least such rho keeps the most, and depends on k, which must not depend
  on the children. Emitted tokens are distributed exactly as p. With one child a
  node, and of a chain, rho is 1 and it is `reject`. Sun et al. 2023,
  Algorithm 2 (https://arxiv.org/abs/2310.15141).

  Raises:
    ValueError: a tree whose children were not drawn.
  """
  if not tree.is_one(draft) or draft.tokens_BK.shape[1] == 1:
    return reject.verify(noise, draft, p_BNV)
  if draft.q_BKV is None:
    raise ValueError(
      'rule kseq: it takes independent siblings, and those of this tree are '
      'deterministic (q_BKV is None); give reject or traversal'
    )
  rows, B = tree.rows(noise, draft, p_BNV), len(draft.count_B)
  last_B, _, left_BV = jax.lax.while_loop(
    lambda walk: ~jnp.all(walk[1]),
    lambda walk: jax.vmap(_descend)(rows, p_BNV, walk[0]),
    (jnp.full(B, -1, jnp.int32), jnp.zeros(B, bool), p_BNV[:, 0]),
  )
  return tree.verdict(draft, last_B, left_BV)


def _descend(row: tree.Row, p_NV: Array, last: Array):
  """Accepts a child of the last accepted node, or draws what is left.

  Returns (the last one now, whether no other can be, what follows it).
  """
  child_K = (row.parents_K == last) & row.proposed_K
  k, K = jnp.sum(child_K), len(child_K)
  p_V = p_NV[last + 1]
  # All children have one q; in a greedy row p decides.
  q_V = jnp.where(k > 0, row.q_KV[jnp.argmax(child_K)], 0)
  rho, left_V = _share(p_V, q_V, k, K)
  at = lambda x_V: chain.pick(
    jnp.broadcast_to(x_V, (1, K, len(x_V))), row.tokens_K[None]
  )[0]
  # Where p is certain, its token is kept whatever drew it.
  ok_K = (row.u_K * rho * at(q_V) < at(p_V)) | (at(p_V) == 1)
  ok_K &= child_K
  some = jnp.any(ok_K)
  last = jnp.where(some, jnp.argmax(ok_K), last)
  return last.astype(jnp.int32), ~some, left_V


def _share(p_V: Array, q_V: Array, k: Array, most: int):
  """(rho, the weights of the next token if no child is accepted).

  rho is found by halving [1, k] and rounded up. most: of k.
  """

  def tests(rho):
    shared_V = jnp.minimum(p_V / rho, q_V)
    missed = jnp.maximum(1 - jnp.sum(shared_V), 0)
    # 1 + missed + missed^2 ...: not divided by a beta that may be 0.
    j_K = jnp.arange(most)
    return jnp.sum(jnp.where(j_K < k, missed**j_K, 0)), shared_V

  def halve(_, ends):
    low, high = ends
    middle = (low + high) / 2
    enough = tests(middle)[0] <= middle
    return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

  one, most_rho = jnp.ones((), p_V.dtype), jnp.maximum(k, 1).astype(p_V.dtype)
  _, rho = jax.lax.fori_loop(0, 16, halve, (one, most_rho))
  m, shared_V = tests(rho)
  return rho, jnp.maximum(p_V - m * shared_V, 0)


RULE = types.Rule(
  'kseq',
  verify,
  certain=True,
  trees=True,
  siblings='independent',
  on_chains='reject',
)
