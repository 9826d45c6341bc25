"""What the promise `pool` alone would see is seen."""

import functools

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import pool
from specdec_jax.certify import base, invariance, load
from specdec_jax.drafters import method
from specdec_jax.verify import reject

REQUESTS = invariance.QUICK_POOL
pytestmark = pytest.mark.more


def hold(name='lm', change=lambda drafter: drafter):
  """Checks a drafter of tables as the promise does."""
  with jax.enable_x64(True):
    world = base.tables(invariance.VOCAB)
    drafter, params = load.RECIPES[name](world, invariance.GAMMA)
    pair = base.Pair(reject.RULE, base.ragged(change(drafter)), params)
    return invariance._same_in_a_pool(world, pair, REQUESTS, 0, batch=False)


def putting(monkeypatch, change):
  """What is read is changed before it is put into rows; new: into a pool."""
  right = pool._put

  def put(held, began, where_B):
    request, *rest = began
    if request.seed_B.shape == held[0].seed_B.shape:  # rows that were few
      return right(held, began, where_B)
    return right(held, (change(request, held[0], where_B), *rest), where_B)

  monkeypatch.setattr(pool, '_put', put)


def exchanged_seeds(request, held, where_B):
  return request._replace(seed_B=request.seed_B[::-1])


def kept_caps(request, held, where_B):
  before_B = held.gamma_B.at[where_B].get(mode='clip')
  some_B = jnp.where(before_B > 0, before_B, request.gamma_B)
  return request._replace(gamma_B=some_B)


@pytest.mark.parametrize(
  'change, case',
  [
    (exchanged_seeds, 'two read together: not as alone'),
    (kept_caps, 'not as alone'),
  ],
)
def test_what_a_refill_does_to_its_rows_is_seen(change, case, monkeypatch):
  with monkeypatch.context() as patched:
    putting(patched, change)
    with pytest.raises(base.Broken, match=case):
      hold()


def alone_in_two(drafter):
  """Drafts nothing where two rows are decoded."""

  def propose(weights, state, context, *rest):
    draft, *more = drafter.propose(weights, state, context, *rest)
    if len(context.lengths_B) == invariance.FEW:
      draft = draft._replace(count_B=0 * draft.count_B)
    return draft, *more

  return drafter._replace(propose=propose)


def test_what_few_rows_do_is_seen():
  with pytest.raises(base.Broken, match='two|not as alone'):
    hold(change=alone_in_two)


def test_every_pair_is_capped(monkeypatch):
  met = []

  def same(world, pair, *_, **__):
    met.append(pair.drafter.name)
    return 1, 1

  monkeypatch.setattr(invariance, '_same_in_a_pool', same)
  drafters = {x: load.RECIPES[x] for x in ('lm', 'lookup')}
  subject = base.Subject([reject.RULE], drafters)
  assert 'lookup (tables)' in invariance.pooled(subject, 1).size
  assert met == ['ragged lm', 'ragged lookup']


def late(drafter):
  """Drafts nothing in a row that has read its text while another reads."""

  def init(weights, context, features):
    own = drafter.init(weights, context, features)
    return own, context.lengths_B

  def propose(weights, state, context, noise, cache):
    own, read_B = state
    drafts_B = context.live_B & (context.gamma_B > 0)
    late_B = drafts_B & (context.lengths_B - read_B > 6)
    draft, own, cache = drafter.propose(weights, own, context, noise, cache)
    count_B = jnp.where(jnp.any(late_B) & ~late_B, 0, draft.count_B)
    read_B = jnp.where(drafts_B, context.lengths_B, read_B)
    return draft._replace(count_B=count_B), (own, read_B), cache

  def commit(state, context, outcome, features):
    return drafter.commit(state[0], context, outcome, features), state[1]

  return drafter._replace(
    name='late', init=init, propose=propose, commit=commit
  )


def test_a_row_that_waits_for_another_is_seen(monkeypatch):
  with pytest.raises(base.Broken, match='not as alone'):
    hold(change=late)
  monkeypatch.setattr(base, 'ragged', lambda drafter: drafter)
  tried, _ = hold(change=late)
  assert tried == 2 * REQUESTS


def test_features_that_are_kept_wrongly_are_seen(monkeypatch):
  """Of a chat that goes on in its row; nothing else keeps them."""
  right = method.keeping_features

  @functools.cache
  def keeping(drafter):
    found = right(drafter)

    def commit(*given):
      own, kept_BLE = found.commit(*given)
      return own, jnp.roll(kept_BLE, 1, 1)

    return found._replace(commit=commit)

  monkeypatch.setattr(method, 'keeping_features', keeping)
  with pytest.raises(base.Broken, match='not as alone'):
    hold('eagle')
