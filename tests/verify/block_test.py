"""Block verification: exact, and never keeps less than reject."""

import fractions
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import types
from specdec_jax.certify import base, enumerate_window, enumerated
from specdec_jax.verify import block, reject


@pytest.fixture(params=['float32', 'float64'])
def either(request):
  with jax.enable_x64(request.param == 'float64'):
    yield


@pytest.mark.parametrize('shape', [(2, 4, 0.25), (3, 3, 0.2)])
def test_law_of_a_window_is_the_targets(either, shape):
  off = enumerated.window_error(block.RULE, 1, 200, *shape)
  assert off <= enumerated.BOUNDS[base.wide()]


# Lemma 1 of the paper; the rows of gamma 3 and 4 by exact enumeration.
ACCEPTED = {
  1: ('2/3', '2/3'),
  2: ('10/9', '11/9'),
  3: ('38/27', '5/3'),
}


def mean_accepted(rule, batch):
  """Expected drafts kept in each problem of a batch: [X]."""
  outcomes, mean_B = enumerate_window.outcomes_of(rule, batch), 0
  for passes_K, accepted_B, _ in zip(*outcomes[1:], strict=True):
    t_BK = outcomes.t_BK
    mean_B += np.where(passes_K, t_BK, 1 - t_BK).prod(1) * accepted_B
  shape = batch.chance_XR.shape
  return (batch.chance_XR * np.reshape(mean_B, shape)).sum(1)


@pytest.mark.more
@pytest.mark.parametrize('gamma', ACCEPTED)
def test_accepted_drafts_of_the_papers_toy(gamma, x64):
  spread = lambda x, n: np.broadcast_to(x, (1, n, 2, 2)).astype(np.float64)
  batch = enumerate_window.windows(
    spread([1 / 3, 2 / 3], gamma + 1),
    spread([2 / 3, 1 / 3], gamma),
    np.array([gamma]),
  )
  for rule, wanted in zip(
    (reject.RULE, block.RULE), ACCEPTED[gamma], strict=True
  ):
    (mean,) = mean_accepted(rule, batch)
    assert abs(mean - float(fractions.Fraction(wanted))) < 1e-15


def test_keeps_at_least_as_many_as_reject_on_every_pair():
  """Expected drafts kept, over the draft paths of every family at once."""
  gamma, vocab, count = 3, 3, 20
  with jax.enable_x64(True):
    parts = [
      enumerate_window.problems(name, 7, count=count, gamma=gamma, vocab=vocab)
      for name in enumerate_window.FAMILIES
    ]
    p, q = (np.concatenate(x) for x in zip(*parts, strict=True))
    batch = enumerate_window.windows(p, q, np.full(len(p), gamma, np.int32))
    means = [mean_accepted(rule, batch) for rule in (reject.RULE, block.RULE)]
  assert (means[1] >= means[0] - 1e-12).all()
  assert (means[1] > means[0] + 1e-3).mean() > 0.2


def random_window(K: int, seed: int, *, greedy: bool = False):
  rng = np.random.default_rng(seed)
  B, V = 512, 5
  make = lambda n: rng.dirichlet(np.ones(V), (B, n)).astype(np.float32)
  p_BNV, q_BKV = make(K + 1), make(K)
  if greedy:
    p_BNV, q_BKV = (np.eye(V, dtype='f4')[x.argmax(-1)] for x in (p_BNV, q_BKV))
  tokens_BK = q_BKV.argmax(-1).astype(np.int32)
  count_B = rng.integers(0, K + 1, B).astype(np.int32)
  draft = types.Draft(*map(jnp.asarray, (tokens_BK, q_BKV, count_B)))
  return enumerate_window.Windows(
    draft, jnp.asarray(p_BNV), np.ones((1, B))
  ), rng.random((B, K)).astype(np.float32)


@pytest.mark.parametrize('K, greedy', [(1, False), (4, True)])
def test_one_draft_and_temperature_zero_are_reject(K, greedy):
  batch, u_BK = random_window(K, 3, greedy=greedy)
  mine, theirs = (
    enumerate_window.run_rule(rule, batch, u_BK)
    for rule in (block.RULE, reject.RULE)
  )
  np.testing.assert_array_equal(mine[0], theirs[0])
  np.testing.assert_array_equal(mine[1], theirs[1])
  assert (mine[0] > 0).any() and (mine[0] < batch.draft.count_B).any()


def test_a_certain_draft_equals_its_one_hot():
  batch, u_BK = random_window(3, 4)
  one_hot = jax.nn.one_hot(batch.draft.tokens_BK, 5)
  results = [
    enumerate_window.run_rule(
      block.RULE, batch._replace(draft=batch.draft._replace(q_BKV=q)), u_BK
    )
    for q in (None, one_hot)
  ]
  np.testing.assert_array_equal(results[0][0], results[1][0])
  np.testing.assert_array_equal(results[0][1], results[1][1])


def test_accepts_no_token_of_probability_zero_at_u_zero():
  tokens = np.array(list(itertools.product(range(3), repeat=2)), np.int32)
  p_V, q_V = [0.6, 0.4, 0.0], [0.0, 0.5, 0.5]
  spread = lambda x, n: jnp.broadcast_to(jnp.array(x), (9, n, 3))
  draft = types.Draft(jnp.asarray(tokens), spread(q_V, 2), jnp.full(9, 2))
  batch = enumerate_window.Windows(draft, spread(p_V, 3), np.ones((1, 9)))
  accepted_B, _ = enumerate_window.run_rule(
    block.RULE, batch, jnp.zeros((9, 2))
  )
  for row, n in zip(tokens, accepted_B, strict=True):
    assert not (row[:n] == 2).any()
