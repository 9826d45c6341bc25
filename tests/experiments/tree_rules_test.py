"""What rules accept of a tree beside the most that any could."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import page
from experiments.tree_rules import exact, optimum
from specdec_jax import build, sampling, types
from specdec_jax.certify import base, problems
from specdec_jax.verify import reject
from tests import programs


@pytest.fixture(autouse=True)
def wide():
  with jax.enable_x64(True):
    yield


def of_sets(found: exact.Problems, x: int) -> float:
  """The optimum of one level by its dual.

  The least, over sets of tokens, of p in the set and the chance that not all
  candidates are in it: Hu et al. 2025 (https://arxiv.org/abs/2502.18779).
  """
  draft, V = found.batch.draft, found.p_XNVV.shape[-1]
  B = found.chance_XR.shape[1]
  rows = range(x * B, (x + 1) * B)
  drawn = [
    set(np.asarray(draft.tokens_BK[b])[np.asarray(draft.proposed_BK[b])])
    for b in rows
  ]
  inside = lambda some: [own <= some for own in drawn]
  p_V = found.p_XNVV[x, 0, 0]
  return min(
    p_V[list(some)].sum() + found.chance_XR[x] @ ~np.array(inside(set(some)))
    for n in range(V + 1)
    for some in itertools.combinations(range(V), n)
  )


@pytest.mark.parametrize('kind', problems.KINDS)
def test_the_optimum_of_one_level_is_that_of_its_dual(kind):
  found = exact.problems(kind, '2', 4, 1)
  wanted = [of_sets(found, x) for x in range(len(found.p_XNVV))]
  np.testing.assert_allclose(exact.best(found), wanted, atol=1e-7)


def test_of_one_draft_it_is_the_overlap():
  found = exact.problems('distinct', '1', 5, 2)
  overlap_X = np.minimum(found.p_XNVV[:, 0, 0], found.q_XKVV[:, 0, 0]).sum(-1)
  np.testing.assert_allclose(exact.best(found), overlap_X, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize('levels', ['3', '2,2'])
def test_of_a_certain_tree_it_is_p_of_the_nodes_and_every_rule_reaches_it(
  levels,
):
  found = exact.problems('deterministic', levels, 3, 2)
  best_X = exact.best(found)
  np.testing.assert_allclose(best_X, exact.certain(found), atol=1e-7)
  for rule in exact.rules_of_trees():
    np.testing.assert_allclose(exact.accepted(rule, found), best_X, atol=1e-7)


@pytest.mark.more
@pytest.mark.parametrize(
  'size',
  [('2', 4), pytest.param(('2,2', 3), marks=pytest.mark.slow)],
  ids=str,
)
def test_no_rule_accepts_more_than_the_optimum_and_all_less_somewhere(size):
  found = exact.problems('distinct', *size, 2)
  best_X = exact.best(found)
  for rule in exact.rules_of_trees():
    own_X = exact.accepted(rule, found)
    assert (own_X <= best_X + 1e-7).all() and (own_X < best_X - 0.01).any()


@pytest.mark.more
def test_a_rule_that_is_biased_has_no_share():
  half = lambda noise, draft, p_BNV: reject.verify(
    noise, draft._replace(q_BKV=draft.q_BKV / 2), p_BNV
  )
  rule = types.Rule('half', half, trees=True)
  with pytest.raises(base.Broken, match='half, distinct: off by'):
    exact.accepted(rule, exact.problems('distinct', '2', 3, 1))


@pytest.mark.parametrize('count', [1, 2, 3])
def test_coupled_accepts_as_often_as_its_races_say(count):
  """The production draws of 40,000 requests, at 4.5 standard errors."""
  rng, B, V = np.random.default_rng(count), 40_000, 4
  p_V, q_V = rng.dirichlet(np.ones(V), 2)
  ids_B, zeros_B = jnp.arange(B, dtype=jnp.uint32), jnp.zeros(B, jnp.int32)
  settings = types.Sampling(jnp.ones(B), zeros_B, jnp.ones(B))

  @jax.jit
  def drawn(ids_B):
    noise = sampling.noise(
      ids_B * 0, ids_B, zeros_B + 7, settings, gamma=count, coupled=True
    )
    q_B1V, root_B1 = jnp.tile(q_V, (B, 1, 1)), zeros_B[:, None] - 1
    family_B1X, _ = noise.children(root_B1, 0, q_B1V, count)
    return noise.next(zeros_B, jnp.tile(p_V, (B, 1))), family_B1X[:, 0]

  own_B, family_BX = map(np.asarray, drawn(ids_B))
  hit_B = (own_B[:, None] == family_BX).any(1)
  wanted_V = optimum.raced(p_V[None], q_V[None], count)[0]
  for x in range(V):
    rate, error = (hit_B & (own_B == x)).mean(), np.sqrt(wanted_V[x] / B)
    assert abs(rate - wanted_V[x]) < 4.5 * error
  if count == 1:
    ratio_VV = np.maximum(*(z[None] / z[:, None] for z in (p_V, q_V)))
    np.testing.assert_allclose(wanted_V, 1 / ratio_VV.sum(1))


def test_cells_are_kept_of_the_same_code_and_settings_only():
  doc = {'machine': {'commit': 'a'}, 'new': 8, 'trees': ('2,2',), 'cells': []}
  known = page.plain(doc | {'cells': [1, 2]})
  assert page.kept(known, doc) == [1, 2]
  for other in {'machine': {'commit': 'b'}}, {'new': 9}:
    assert page.kept(known | other, doc) == []
  assert page.kept(None, doc) == []


def program(folder, name, questions, *arguments):
  """A program with so many questions, of which a run has more arguments."""
  asked = folder / 'question.jsonl'
  made = lambda i: dict(question_id=i, category='chat', turns=[f'One two {i}.'])
  asked.write_text('\n'.join(json.dumps(made(i)) for i in range(questions)))
  return functools.partial(
    programs.run,
    f'experiments/tree_rules/{name}.py',
    '--config=configs/smollm2.py:tiny',
    f'--questions={asked}',
    f'--results={folder}',
    *arguments,
  )


@pytest.mark.slow
def test_a_tiny_run_goes_on_where_it_was(tmp_path):
  ran = program(tmp_path, 'table', 1, '--trees=2,1')
  run = lambda *more: ran(*more).check()
  stored = lambda: json.loads((tmp_path / 'tree_rules.json').read_text())
  run('--temperatures=0')
  (one,) = stored()['measured']['cells']
  assert (one['tree'], one['temperature']) == ('2,1', 0)
  out = run('--temperatures=1', '--minutes=0').out
  assert stored()['measured']['cells'] == [one] and 'run again' in out
  run('--temperatures=1')
  rules = [x for x in build.lossless_rules().values() if x.trees]
  assert len(stored()['measured']['cells']) == 1 + len(rules)


@pytest.mark.slow
def test_trees_are_timed_beside_chains(tmp_path):
  run = program(tmp_path, 'speed', 4, '--dtypes=float32', '--repeats=1')
  run('--shapes=1;2,1').check()
  rows = json.loads((tmp_path / 'speed.json').read_text())['rows']
  assert [x['shape'] for x in rows] == ['plain', 'chain of 1', '2,1']
  assert all(x['differing'].startswith('0 of ') for x in rows[1:])
  assert rows[1]['over_chain'] is None and rows[2]['over_chain']['value'] > 0
  run('--shapes=2,1').check_refused('name a chain too')
