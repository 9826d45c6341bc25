"""Rules and drafters as a user would bring them: some right, some wrong."""

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import method
from specdec_jax.verify import block, chain, reject, tree


def hotter(noise, draft, p_BNV):
  """Biased on purpose: the target at temperature 1.02."""
  return _hotter(1 / 1.02)(noise, draft, p_BNV)


def hotter_by(heat):
  """Makes a rule, as the table's lenient does."""
  return types.Rule(f'hotter by {heat}', _hotter(1 / heat))


def _hotter(power):
  def verify(noise, draft, p_BNV):
    p_BNV **= power
    return reject.verify(noise, draft, p_BNV / p_BNV.sum(-1, keepdims=True))

  return verify


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
  return block.verify(
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


def spends_twice(noise, draft, p_BNV):
  """Its first test decides, by the same uniform, on more than one thing."""
  verdict = reject.verify(noise, draft, p_BNV)
  if draft.tokens_BK.shape[1]:
    weights_BV = verdict.weights_BV * (1 + noise.accept_BK[:, :1])
    return verdict._replace(weights_BV=weights_BV)
  return verdict


def one_uniform(noise, draft, p_BNV):
  """Tests every draft by the uniform of the first: biased from gamma 2 on."""
  u_BK = jnp.broadcast_to(noise.accept_BK[:, :1], noise.accept_BK.shape)
  return reject.verify(noise._replace(accept_BK=u_BK), draft, p_BNV)


def reversed_uniforms(noise, draft, p_BNV):
  """Lossless: reject, its first test by the last uniform."""
  u_BK = noise.accept_BK[:, ::-1]
  return reject.verify(noise._replace(accept_BK=u_BK), draft, p_BNV)


def block_by_count(noise, draft, p_BNV):
  """Block that keeps as many drafts as pass, not up to the last: biased."""
  p_BK, q_BK = chain.pick(p_BNV, draft.tokens_BK), chain.q_of_tokens(draft)
  w_BN, K = block._ratios(p_BK, q_BK.astype(p_BNV.dtype)), p_BK.shape[1]
  mass_BK = jnp.pad(block._masses(w_BN, draft, p_BNV), ((0, 0), (0, min(K, 1))))
  inner_BK = noise.accept_BK * (mass_BK + 1 - w_BN[:, 1:]) < mass_BK
  last_BK = noise.accept_BK * q_BK < w_BN[:, :-1] * p_BK
  at_1K, count_B1 = jnp.arange(1, K + 1)[None], draft.count_B[:, None]
  ok_BK = jnp.where(at_1K < count_B1, inner_BK, last_BK) & (at_1K <= count_B1)
  accepted_B = jnp.sum(ok_BK, -1, dtype=jnp.int32)
  p_BV = chain.row(p_BNV, accepted_B)
  w_B1 = jnp.take_along_axis(w_BN, accepted_B[:, None], 1)
  w_B1 = jnp.where(accepted_B[:, None] == count_B1, 1, w_B1)
  rest_BV = w_B1 * p_BV - chain.q_row(draft, accepted_B, p_BV)
  return types.Verdict(accepted_B, jnp.maximum(rest_BV, 0))


def third_sibling(draft):
  return elders(draft) >= 2


def of_a_third_level(draft):
  return tree.shape(draft.parents_BK).depth_BN[:, 1:] >= 3


def sibling_of_a_third_level(draft):
  return of_a_third_level(draft) & (elders(draft) >= 1)


def child_of_a_second_sibling(draft):
  above_BK = jnp.maximum(draft.parents_BK, 0)
  parent_BK = jnp.take_along_axis(elders(draft), above_BK, 1)
  return (draft.parents_BK >= 0) & (parent_BK >= 1)


def elders(draft):
  """How many siblings of each node come before it: [B, K]."""
  parents_BK = draft.parents_BK
  same_BKK = parents_BK[:, :, None] == parents_BK[:, None]
  return jnp.sum(jnp.tril(same_BKK, -1), -1)


def never_rejecting(rule, which):
  """The rule, but for nodes of trees that it accepts at every uniform: biased.

  which: draft -> flags of them, [B, K].
  """

  def verify(noise, draft, p_BNV):
    if tree.is_one(draft):
      u_BK = jnp.where(which(draft), 0, noise.accept_BK)
      noise = noise._replace(accept_BK=u_BK)
    return rule.verify(noise, draft, p_BNV)

  return rule._replace(
    name=f'{rule.name}, every {which.__name__}', verify=verify
  )


LOSSY = types.Rule('lossy', reject.verify, lossless=False)


def says(target, *, gamma, chunk, source='7'):
  """Says the same token for ever: its one weight."""

  def propose(weights, state, context, noise, target_cache):
    size = len(context.lengths_B), gamma
    tokens_BK = jnp.broadcast_to(weights.draft[None], size)
    count_B = jnp.full_like(context.lengths_B, gamma)
    return types.Draft(tokens_BK, None, count_B), state, target_cache

  nothing = lambda *_: ()
  drafter = types.Drafter('says', gamma, nothing, propose, nothing)
  return method.Method(drafter, jnp.array([int(source)]))


def says_much(target, *, gamma, chunk):
  raise ValueError('no\nroom')


def _reporting(name, target, gamma, change):
  """The library's own drafter, but for the Draft that it reports.

  The draft model is the target, less sure.
  """
  right = lm_drafter.make(target.model, gamma=gamma)

  def propose(weights, state, context, noise, target_cache):
    draft, state, cache = right.propose(
      weights, state, context, noise, target_cache
    )
    return change(draft, noise), state, cache

  unsure = jax.tree.map(lambda x: (0.5 * x).astype(x.dtype), target.params)
  return method.Method(right._replace(name=name, propose=propose), unsure)


def uniform_q(target, *, gamma, chunk):
  """Samples from q and reports a uniform distribution."""

  def change(draft, noise):
    if draft.q_BKV is None:  # all rows are greedy
      return draft
    flat_BKV = jnp.full_like(draft.q_BKV, 1 / draft.q_BKV.shape[-1])
    return draft._replace(q_BKV=flat_BKV)

  return _reporting('uniform', target, gamma, change)


def peeking(target, *, gamma, chunk):
  """Proposes only where its drafts' accept noise is small."""

  def change(draft, noise):
    good_B = (noise.accept_BK < 0.5).all(1)
    return draft._replace(count_B=jnp.where(good_B, draft.count_B, 0))

  return _reporting('peeking', target, gamma, change)


def certain(target, *, gamma, chunk):
  """Samples, and reports certainties: lawful, whatever made them."""
  change = lambda draft, noise: draft._replace(q_BKV=None)
  return _reporting('certain', target, gamma, change)


def biased(target, *, gamma, chunk):
  """Changes drawn tokens afterwards and keeps their q."""

  def change(draft, noise):
    tokens_BK = jnp.where(draft.tokens_BK == 1, 0, draft.tokens_BK)
    return draft._replace(tokens_BK=tokens_BK)

  return _reporting('biased', target, gamma, change)


def sure(target, *, gamma, chunk):
  """Ends a window before a drawn token that was unlikely: biased."""

  def change(draft, noise):
    q_BK = chain.q_of_tokens(draft)
    return draft._replace(count_B=chain.prefix(q_BK >= 0.3))

  return _reporting('sure', target, gamma, change)


def needs_more(target, corpus, *, gamma, chunk):
  return None
