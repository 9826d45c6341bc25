"""The distribution of one window, enumerated: no sampling error."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import types
from specdec_jax.certify import base, enumerate_window, enumerated, problems
from specdec_jax.verify import block, reject

BOTH = pytest.mark.parametrize(
  'rule', [reject.RULE, block.RULE], ids=lambda rule: rule.name
)


@pytest.fixture(params=['float32', 'float64'])
def either(request):
  with jax.enable_x64(request.param == 'float64'):
    yield


# --- both rules ---------------------------------------------------------------


@pytest.mark.parametrize(
  'either',
  [pytest.param('float32', marks=pytest.mark.more), 'float64'],
  indirect=True,
)
@pytest.mark.parametrize(
  'rule, count, shape',
  [(reject.RULE, 400, shape) for shape in enumerated.SHAPES]
  + [(block.RULE, 200, shape) for shape in ((2, 4, 0.25), (3, 3, 0.2))],
)
def test_law_of_a_window_is_the_targets(either, rule, count, shape):
  """All families, three kinds of drafts; the certificate has more pairs."""
  off = enumerated.window_error(rule, 1, count, *shape)
  assert off <= base.bound()


@BOTH
def test_u_zero_rejects_what_the_target_excludes(either, rule):
  p_V = np.array([0.5, 0.5, 0.0, 0.0, 0.0])
  q_V = np.array([0.0, 0.5, 0.25, 0.25, 0.0])
  p = jnp.asarray(np.tile(p_V, (5, 3, 1)))
  tokens = jnp.array([[2, 0], [1, 3], [1, 1], [3, 2], [4, 0]], jnp.int32)
  for q in (jnp.asarray(np.tile(q_V, (5, 2, 1))), None):
    draft = types.Draft(tokens, q, jnp.full(5, 2, jnp.int32))
    batch = enumerate_window.Windows(draft, p, np.ones(5))
    accepted_B = enumerate_window.run_rule(rule, batch, jnp.zeros((5, 2)))[0]
    assert accepted_B.tolist() == [0, 1, 2, 0, 0]


@BOTH
@pytest.mark.parametrize('q', [None, np.full((1, 2, 3), 1 / 3)])
def test_what_is_no_token_is_never_accepted(either, rule, q):
  for no in (-1, 3):
    tokens = jnp.array([[no, 0]], jnp.int32)
    draft = types.Draft(tokens, q, jnp.full(1, 2, jnp.int32))
    batch = enumerate_window.Windows(draft, np.full((1, 3, 3), 1 / 3), [1.0])
    accepted_B = enumerate_window.run_rule(rule, batch, jnp.zeros((1, 2)))[0]
    assert accepted_B.tolist() == [0], no


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
  batch = enumerate_window.Windows(draft, p_BNV, np.ones(B))
  return batch, rng.random((B, K)).astype(np.float32)


def check_same(one, other):
  for x, y in zip(one, other, strict=True):
    np.testing.assert_array_equal(x, y)


@BOTH
def test_a_certain_draft_equals_its_one_hot(rule):
  batch, u_BK = random_window(3, 4)
  one_hot = jax.nn.one_hot(batch.draft.tokens_BK, 5)
  results = [
    enumerate_window.run_rule(
      rule, batch._replace(draft=batch.draft._replace(q_BKV=q)), u_BK
    )
    for q in (None, one_hot)
  ]
  check_same(*results)


# --- reject -------------------------------------------------------------------


def test_accept_test_flips_at_the_ratio(either):
  gamma, each = 2, 60
  p, q = problems.of_all_families(5, each=each, gamma=gamma, vocab=4)
  batch = problems.windows(p, q, 'distinct')
  dtype = p.dtype
  # Subnormal p counts as 0 on CPU; such tokens carry no mass.
  draft, p_BNV = batch.draft, batch.p_BNV
  at = np.asarray(draft.tokens_BK)[..., None]
  p_BK = np.take_along_axis(p_BNV[:, :gamma], at, -1)[..., 0]
  q_BK = np.take_along_axis(np.asarray(draft.q_BKV), at, -1)[..., 0]
  normal = lambda x: x >= 4 * np.finfo(dtype).tiny / np.finfo(dtype).eps
  with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
    t_BK = np.where(q_BK > 0, p_BK / np.where(q_BK > 0, q_BK, 1), 0)
  ulps = lambda t, n: (t * (1 + n * np.finfo(dtype).eps)).astype(dtype)
  for k in range(gamma):
    # Offsets before k pass where they can at all; then k decides.
    reached_B = (
      normal(p_BK[:, :k]).all(1) & (q_BK[:, k] > 0) & normal(p_BK[:, k])
    )
    for shift, passes in ((-2, True), (2, False)):
      u_B = ulps(t_BK[:, k], shift)
      tested_B = reached_B & (u_B < 1) & normal(u_B * q_BK[:, k])
      u_BK = np.zeros_like(p_BK)
      u_BK[:, k] = np.where(tested_B, u_B, 0)
      u_BK[:, k + 1 :] = np.nextafter(dtype.type(1), dtype.type(0))
      accepted_B = enumerate_window.run_rule(reject.RULE, batch, u_BK)[0]
      kept_B = accepted_B[tested_B] > k
      wrong = np.flatnonzero(tested_B)[kept_B != passes]
      family = wrong * len(problems.FAMILIES) // len(tested_B)
      assert not wrong.size, ([*problems.FAMILIES][family[0]], k, shift)


def test_real_vocabulary_with_flat_and_peaked_rows():
  V, B = 50257, 64
  rng = np.random.default_rng(0)
  for sigma in (0.5, 4.0):
    z = sigma * rng.normal(size=(2, V))
    p_V, q_V = (np.exp(z) / np.exp(z).sum(-1, keepdims=True)).astype(np.float32)
    tokens = rng.choice(V, (B, 1), p=q_V.astype(float) / q_V.sum(dtype=float))
    draft = types.Draft(
      jnp.asarray(tokens, jnp.int32),
      jnp.broadcast_to(q_V, (B, 1, V)),
      jnp.ones(B, jnp.int32),
    )
    p_BNV = np.broadcast_to(p_V, (B, 2, V))
    batch = enumerate_window.Windows(draft, p_BNV, np.ones(B))
    run = lambda u_B1, batch=batch: enumerate_window.run_rule(
      reject.RULE, batch, np.float32(u_B1)
    )
    t_B1 = np.minimum(p_V.astype(float) / q_V, 1)[tokens]
    assert (run(t_B1 * 0.999)[0] == 1).all()
    kept_B, _, weights_BV = run(np.minimum(t_B1 * 1.001 + 1e-7, 1 - 2**-24))
    refused_B = t_B1[:, 0] < 0.998
    assert refused_B.any() and (kept_B[refused_B] == 0).all()
    w_V = weights_BV[refused_B][0].astype(float)
    keep_V = np.minimum(p_V.astype(float), q_V)
    law_V = keep_V + (1 - keep_V.sum()) * w_V / w_V.sum()
    assert np.abs(law_V - p_V).max() <= 1e-6


# --- block beside reject ------------------------------------------------------


@pytest.mark.parametrize('K, greedy', [(1, False), (4, True)])
def test_one_draft_and_temperature_zero_are_reject(K, greedy):
  batch, u_BK = random_window(K, 3, greedy=greedy)
  mine, theirs = (
    enumerate_window.run_rule(rule, batch, u_BK)
    for rule in (block.RULE, reject.RULE)
  )
  check_same(mine, theirs)
  assert (mine[0] > 0).any() and (mine[0] < batch.draft.count_B).any()


@pytest.mark.more
@pytest.mark.parametrize(
  # Lemma 1 of the paper; the row of gamma 3 by exact enumeration.
  'gamma, kept',
  [(1, ('2/3', '2/3')), (2, ('10/9', '11/9')), (3, ('38/27', '5/3'))],
)
def test_accepted_drafts_of_the_papers_toy(gamma, kept, x64):
  spread = lambda x, n: np.broadcast_to(x, (1, n, 2, 2)).astype(np.float64)
  p, q = spread([1 / 3, 2 / 3], gamma + 1), spread([2 / 3, 1 / 3], gamma)
  batch = problems.windows(p, q, 'distinct')
  for rule, wanted in zip((reject.RULE, block.RULE), kept, strict=True):
    every = enumerate_window.ends(rule, batch)
    mean = sum((x.chance_B * x.accepted_B).sum() for x in every)
    assert abs(mean - float(fractions.Fraction(wanted))) < 1e-15
