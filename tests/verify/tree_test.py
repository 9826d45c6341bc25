"""Trees of drafts: the law of a window, and the path that is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import types
from specdec_jax.certify import base, enumerated
from specdec_jax.verify import coupled, judge, reject, traversal, tree
from tests import own_rules

MORE = pytest.mark.more


QUICK = {
  reject.RULE: [('4', 'distinct'), ('2,2', 'deterministic')],
  traversal.RULE: [('2,1', 'distinct')],
}


def check_law(rule, case, wide, each=4):
  """All families; the certificate has more pairs."""
  with jax.enable_x64(wide):
    assert enumerated.tree_error(rule, 1, *case, each) <= base.bound()


@pytest.mark.parametrize('case', QUICK[reject.RULE], ids=str)
@pytest.mark.parametrize('wide', [False, True])
def test_law_of_a_tree_is_the_targets(case, wide):
  check_law(reject.RULE, case, wide)


def test_law_of_a_tree_under_traversal_is_the_targets():
  check_law(traversal.RULE, *QUICK[traversal.RULE], wide=False)


@pytest.mark.slow
@pytest.mark.parametrize(
  'rule, case', [(x, y) for x in QUICK for y in enumerated.cases_of(x)], ids=str
)
@pytest.mark.parametrize('wide', [False, True])
def test_law_of_every_tree_is_the_targets(rule, case, wide):
  check_law(rule, case, wide, 1)


SEEN = {  # the first trees of a rule -> what each alone sees
  own_rules.third_sibling: '4',
  own_rules.sibling_of_a_third_level: '1,1,2',
  own_rules.child_of_a_second_sibling: '2,',
}


@pytest.mark.parametrize('which', SEEN, ids=lambda x: x.__name__)
@pytest.mark.parametrize(
  'rule',
  [reject.RULE, *(pytest.param(x, marks=MORE) for x in [*QUICK][1:])],
  ids=lambda x: x.name,
)
def test_every_tree_of_the_quick_tier_alone_sees_a_wrong_rule(rule, which):
  wrong, seen = own_rules.never_rejecting(rule, which), []
  for levels, kind in enumerated.cases_of(rule)[:3]:
    try:
      enumerated.tree_error(wrong, 1, levels, kind, 1)
    except base.Broken as error:
      assert f'a tree of {levels} {kind} siblings: wrong in' in str(error)
      seen.append(levels)
  assert len(seen) == 1 and seen[0].startswith(SEEN[which]), seen


PARENTS = [-1, -1, 0, 0, 1, 2, -1]


@pytest.mark.parametrize('K', [*range(1, 17), pytest.param(33, marks=MORE)])
def test_shape_of_a_tree_by_walking_it(K):
  """Chains; the tree above; a trunk of every length with a branch, and any."""
  rng, chain = np.random.default_rng(K), [*range(-1, K - 1)]
  trees = [chain, (PARENTS + chain[7:])[:K]]
  trees += [[*chain[:-1], depth - 1] for depth in range(K)]
  trees += [[int(rng.integers(-1, i)) for i in range(K)] for _ in range(5)]
  found = tree.shape(jnp.array(trees))
  for parents, sees_NN, depth_N in zip(trees, *found[::-1], strict=True):
    for number in range(K + 1):
      above = [number]
      while above[-1]:
        above.append(parents[above[-1] - 1] + 1)
      assert np.flatnonzero(sees_NN[number]).tolist() == sorted(above)
      assert depth_N[number] == len(above) - 1


@pytest.mark.parametrize(
  'path, places', [([0, 3], [0, 1]), ([6], [2]), ([1, 4], [1, 2]), ([], [])]
)
def test_places_of_a_path_in_the_levels(path, places):
  """Levels 0, 1, 6 and 2, 3, 4 and 5: the largest place so far is told."""
  path_BK = jnp.array([path + [7] * (7 - len(path))])
  draft = types.Draft(*[None] * 3, parents_BK=jnp.array([PARENTS]))
  found = tree.places(draft, path_BK)
  assert found[0, : len(path)].tolist() == places
  none = jnp.zeros((2, 0), jnp.int32)
  assert tree.places(draft._replace(parents_BK=none), none).shape == (2, 0)
  # Of the likeliest nodes what counts is the node itself.
  found = tree.places(draft._replace(marks={'worth_BK': none}), path_BK)
  assert found[0, : len(path)].tolist() == path


def a_draft(tokens, proposed=None, count=None):
  one = lambda x: None if x is None else jnp.asarray(x)[None]
  count = jnp.full(1, len(tokens) if count is None else count, jnp.int32)
  return types.Draft(
    one(tokens), None, count, parents_BK=one(PARENTS), proposed_BK=one(proposed)
  )


@pytest.mark.parametrize(
  'wanted, changes, path',
  [
    ([5, 1, 1, 7, 1, 1, 9, 1], {}, [0, 2, 5]),
    ([6, 1, 8, 1, 1, 1, 1, 1], {}, [1, 4]),
    ([3, 1, 1, 1, 1, 1, 1, 1], {}, [6]),
    ([4, 7, 8, 1, 1, 1, 1, 1], {}, []),
    ([5, 1, 1, 7, 1, 1, 9, 1], dict(count=5), [0, 2]),
    ([3, 1, 1, 1, 1, 1, 1, 1], dict(count=6), []),
    ([5, 7, 1, 1, 1, 1, 1, 1], dict(proposed=[1, 1, 0, 1, 1, 0, 1]), [0]),
  ],
)
def test_longest_path_of_wanted_tokens(wanted, changes, path):
  """wanted: the token after the root and each node."""
  if 'proposed' in changes:
    changes = dict(proposed=np.array(changes['proposed'], bool))
  elif path[:2] == [0, 2]:
    wanted = [5, 7, 1, 9, 1, 1, 1, 1]
  draft = a_draft([5, 6, 7, 1, 8, 9, 3], **changes)
  accepted_B, path_BK = tree.matching(draft, jnp.array([wanted]))
  assert path_BK[0, : int(accepted_B[0])].tolist() == path


@pytest.mark.parametrize(
  'path, wanted', [([], (3, 1)), ([0], (3, 2)), ([0, 2], (3, 3)), ([6], (3, 1))]
)
def test_levels_end_where_nothing_is_proposed(path, wanted):
  """Drafts one behind another: at most, and on the path."""
  path_BK = jnp.array([path + [7] * (7 - len(path))])
  accepted_B = jnp.full(1, len(path))
  draft = a_draft([5, 6, 7, 1, 8, 9, 3], np.ones(7, bool))
  found = tree.levels(draft, accepted_B, path_BK)
  assert tuple(int(x[0]) for x in found) == wanted
  # Without what hangs on the path nothing is waited for behind it.
  ok = [i in path for i in range(7)]
  draft = a_draft([5, 6, 7, 1, 8, 9, 3], np.array(ok))
  found = tree.levels(draft, accepted_B, path_BK)
  assert [int(x[0]) for x in found] == [len(path)] * 2


@functools.partial(jax.jit, static_argnums=0)
def greedy(rule, draft, logits_BNV):
  settings = types.Sampling(jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.ones(1))
  noise = types.Noise(
    jnp.full((1, 7), 1 - 2**-24), None, lambda _, w: w.argmax(-1)
  )
  judged = lambda rule: judge.judge(rule, settings, noise, draft, logits_BNV)
  return judged(rule), judged(rule._replace(certain=False))


@pytest.mark.parametrize('rule', [reject.RULE, traversal.RULE])
def test_greedy_rows_are_judged_alike_with_and_without_distributions(rule):
  rng = np.random.default_rng(0)
  for seed in range(20):
    logits = rng.normal(size=(1, 8, 4))
    tokens = rng.integers(0, 4, 7)
    tokens[[1, 6]] = (tokens[0] + [1, 2]) % 4
    tokens[3] = (tokens[2] + 1) % 4
    draft = a_draft(tokens)._replace(q_BKV=jnp.eye(4)[tokens][None])
    one, two = greedy(rule, draft, jnp.asarray(logits))
    (n,), path_BK, next_B, _ = one
    assert (int(two[0][0]), int(two[2][0])) == (int(n), int(next_B[0])), seed
    assert path_BK[0, :n].tolist() == two[1][0, :n].tolist()


@pytest.mark.parametrize(
  'rule',
  [
    reject.RULE,
    coupled.RULE,
    pytest.param(traversal.RULE, marks=MORE),
  ],
  ids=lambda rule: rule.name,
)
def test_a_chain_as_a_tree_is_judged_as_a_chain(rule):
  """On random windows of ragged counts."""
  rng = np.random.default_rng(1)
  B, K, V = 64, 4, 5
  p, q = (rng.dirichlet(np.ones(V), (B, n)) for n in (K + 1, K))
  draft = types.Draft(
    jnp.asarray(rng.integers(0, V, (B, K)), jnp.int32),
    jnp.asarray(q, jnp.float32),
    jnp.asarray(rng.integers(0, K + 1, B), jnp.int32),
  )
  parents = jnp.tile(jnp.arange(-1, K - 1), (B, 1))
  u_BK = jnp.asarray(rng.random((B, K)), jnp.float32)
  draws = jnp.asarray(rng.integers(0, V, (B, K + 1)))
  noise = types.Noise(u_BK, None, lambda at_B, _: draws[jnp.arange(B), at_B])
  one = rule.verify(noise, draft, jnp.asarray(p, jnp.float32))
  two = rule.verify(
    noise, draft._replace(parents_BK=parents), jnp.asarray(p, jnp.float32)
  )
  np.testing.assert_array_equal(one.accepted_B, two.accepted_B)
  np.testing.assert_allclose(one.weights_BV, two.weights_BV, atol=1e-6)
  assert len(set(one.accepted_B.tolist())) > 2
