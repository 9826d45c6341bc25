"""Alternates two drafters: lookup where the text repeats, else another."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax import fields, forward, types
from specdec_jax.drafters import lm, lookup, method

WRAPS = 1


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked):
  drafter: object = fields.setting(
    'eagle', help='drafts where lookup does not; its own section configures it'
  )
  match: int = fields.setting(
    3, low=1, help='shortest match that lookup continues, in tokens'
  )


def for_target(
  target, settings: Settings, *, gamma: int, chunk: int, inner: method.Method
) -> method.Method:
  """Alternates lookup with `inner`, settings.drafter's Method."""
  longest = max(settings.match, lookup.Settings.max_match)
  first = lookup.make(gamma=gamma, min_match=settings.match, max_match=longest)
  return method.Method(
    make(first, inner.drafter),
    ((), inner.params),
    draft=inner.draft,
    parts=(method.Method(first), inner),
  )


def recipe(world, gamma: int):
  first = lookup.make(gamma=gamma, min_match=1)
  drafter = make(first, lm.make(world.draft, gamma=gamma))
  return drafter, ((), world.weights.draft)


class State(NamedTuple):
  """first, second: their states. first_B: rows whose window is the first's."""

  first: Any
  second: Any
  first_B: types.Array


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(first: types.Drafter, second: types.Drafter) -> types.Drafter:
  """Gives each row's window to the first where it proposes, else to the second.

  The choice is made from what is committed, before anything is drafted, so
  every rule stays exact. The second drafts nothing in windows of the first's:
  where all are, a window costs what the first's does. weights.draft is (the
  first's, the second's).

  The first proposes with certainty (q None) and reads no features. Beside the
  second's trees its window is a tree with one path. Raises ValueError for
  drafters with different gamma, or a second that leaves the target early.
  """
  assert not first.taps and not first.exit, first
  if first.gamma != second.gamma or second.exit:
    raise ValueError(
      f'hybrid of {first.name} (gamma {first.gamma}) and {second.name} (gamma '
      f'{second.gamma}): both need the same gamma, and the second may not '
      'leave the target early'
    )
  return types.Drafter(
    'hybrid',
    first.gamma,
    functools.partial(_init, first, second),
    functools.partial(_propose, first, second),
    functools.partial(_commit, first, second),
    taps=second.taps,
    tree=second.tree,
  )


def _own(weights):
  return tuple(weights._replace(draft=x) for x in weights.draft)


def _init(first, second, weights, context, features):
  one, two = _own(weights)
  return State(
    first.init(one, context, None),
    second.init(two, context, features),
    jnp.zeros_like(context.live_B),
  )


def _propose(first, second, weights, state, context, noise, target_cache):
  one, two = _own(weights)
  draft, mine, target_cache = first.propose(
    one, state.first, context, noise, target_cache
  )
  count_B = jnp.minimum(draft.count_B, context.gamma_B)
  first_B = count_B > 0
  rest = context._replace(gamma_B=jnp.where(first_B, 0, context.gamma_B))
  other, theirs, target_cache = second.propose(
    two, state.second, rest, noise, target_cache
  )
  tokens_BK = jnp.where(first_B[:, None], draft.tokens_BK, other.tokens_BK)
  marks = {'second_B': ~first_B & (other.count_B > 0)}
  if 'sourced_B' in draft.marks:
    marks['sourced_B'] = draft.marks['sourced_B'] & first_B
  both = types.Draft(
    tokens_BK,
    _certain(other.q_BKV, tokens_BK, first_B & context.live_B),
    jnp.where(first_B, count_B, other.count_B),
    marks=marks,
    **_joined(other, first_B),
  )
  return both, State(mine, theirs, first_B), target_cache


def _joined(other: types.Draft, first_B) -> dict[str, Any]:
  """Returns a tree's nodes, or in the rows of first_B a chain's."""
  if other.parents_BK is None:
    return {}
  chain_1K = jnp.arange(other.parents_BK.shape[1], dtype=jnp.int32)[None] - 1
  proposed_BK = other.proposed_BK
  return dict(
    parents_BK=jnp.where(first_B[:, None], chain_1K, other.parents_BK),
    proposed_BK=None if proposed_BK is None else proposed_BK | first_B[:, None],
  )


def _commit(first, second, state, context, outcome, features_BNE):
  def part(rows_B):
    keep = lambda x_B: jnp.where(rows_B, x_B, 0)
    return outcome._replace(
      verified_B=keep(outcome.verified_B), accepted_B=keep(outcome.accepted_B)
    )

  own_B = state.first_B
  return State(
    first.commit(state.first, context, part(own_B), None),
    second.commit(state.second, context, part(~own_B), features_BNE),
    own_B,
  )


def _certain(q_BKV, tokens_BK, rows_B):
  """Puts all of q_BKV on the tokens in some rows; keeps None, of certain
  drafts. Costs nothing in windows where no row is among them."""
  if q_BKV is None:
    return None

  def put(q_BKV):
    hot_BKV = jnp.arange(q_BKV.shape[-1])[None, None] == tokens_BK[..., None]
    return jnp.where(rows_B[:, None, None], hot_BKV.astype(q_BKV.dtype), q_BKV)

  return forward.once(jnp.any(rows_B), put, q_BKV)
