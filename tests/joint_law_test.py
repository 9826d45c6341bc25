"""The joint distribution of consecutive windows: the cheapest cases.

The promises (certify/promises_test.py) have them in full.
"""

import numpy as np
import pytest

from specdec_jax import decode
from specdec_jax.certify import base, counted, enumerated, load, table_model
from specdec_jax.drafters import adaptive, branch, eagle, medusa
from specdec_jax.verify import coupled, reject, traversal

MORE = pytest.mark.more
V, K = 3, 2
PROMPT = table_model.PROMPT[V]


RECIPES, WARM = load.RECIPES, dict(temperature=1.0)


@pytest.mark.parametrize(
  'draft, settings',
  [
    ('scripted', dict(temperature=1.3)),
    *(
      pytest.param(*case, marks=pytest.mark.more)
      for case in (
        ('ragged', dict(temperature=0.7, top_k=2)),
        *(
          (x, WARM)
          for x in ('lm', 'source', 'self', 'eagle', 'medusa', 'dflash')
        ),
      )
    ),
  ],
)
def test_three_windows_of_reject_enumerated(draft, settings, x64):
  world = base.tables(V, encoder=draft == 'source')
  recipe = enumerated.script if draft == 'scripted' else RECIPES['lm']
  pair = base.Pair(reject.RULE, *RECIPES.get(draft, recipe)(world, K))
  if draft == 'ragged':
    pair = pair._replace(drafter=base.ragged(pair.drafter))
  enumerated.windows_error(world, pair, settings)
  # Where there is one, another source gives other probabilities.
  p_RVV, source = world.weights.target, base.source_of(world, PROMPT)
  other = np.abs(table_model.given(p_RVV, source) - p_RVV).max()
  assert (other > 0.1) == (draft == 'source')


WORLD = base.tables(V)
DRAFT, _ = RECIPES['lm'](WORLD, K)
SETTINGS = dict(temperature=0.9, top_p=0.95)


def drawn(rule, drafter, n=7, params=WORLD.weights.draft, **more):
  """Texts of n tokens by production decoding: [65536, n]."""
  request = base.make_request(
    WORLD, [PROMPT] * 2**16, n, gamma=drafter.gamma, **SETTINGS, **more
  )
  pair = base.Pair(rule, drafter, params)
  out = base.run(WORLD, pair, request)
  assert (out.lengths_B == len(PROMPT) + n).all()
  return out.tokens_BL[:, len(PROMPT) : len(PROMPT) + n]


def check_joint(rule, drafter, **more):
  tokens = drawn(rule, drafter, **more)
  p_RVV = table_model.warped(WORLD.weights.target, **SETTINGS)
  p = table_model.joint_distribution(p_RVV, PROMPT, tokens.shape[1])
  counts = np.zeros_like(p)
  np.add.at(counts, tuple(tokens.T), 1)
  assert counted.chi_square(counts, p) > 1e-9
  # These counts would not pass for a distribution that is 20 % off.
  off = p * (1 + 0.2 * np.random.default_rng(0).choice([-1, 1], p.shape))
  assert counted.chi_square(counts, off / off.sum()) < 1e-9


@pytest.mark.parametrize(
  'rule',
  [reject.RULE, pytest.param(coupled.RULE, marks=pytest.mark.slow)],
  ids=lambda r: r[0],
)
def test_joint_law_of_generate(rule):
  check_joint(rule, DRAFT)


def of_eagle(levels):
  config, params = eagle.random_layer(WORLD)
  sizes = branch.settings_of(levels)
  return eagle.make(config, WORLD.target, gamma=0, **sizes), params


@pytest.mark.parametrize(
  'name, levels, drafts, rule',
  [
    pytest.param('eagle', '2,2', 4, reject.RULE, marks=pytest.mark.slow),
    pytest.param('eagle', '2,2', 3, reject.RULE, marks=MORE),
    pytest.param('eagle', '3,1,2', 6, reject.RULE, marks=pytest.mark.slow),
    pytest.param('medusa', '3,2', 5, reject.RULE, marks=pytest.mark.slow),
    pytest.param('medusa', '3,2', 5, traversal.RULE, marks=pytest.mark.slow),
    pytest.param('eagle', 'best:4', 4, reject.RULE, marks=pytest.mark.slow),
    pytest.param('eagle', 'best:4', 3, traversal.RULE, marks=pytest.mark.slow),
    pytest.param('adaptive', 'best:4', 4, reject.RULE, marks=MORE),
  ],
)
def test_joint_law_of_a_tree(name, levels, drafts, rule):
  """drafts: nodes of a window at most; the others are cut."""
  tree, params = of_eagle(levels)
  if name == 'medusa':
    sizes = branch.settings_of(levels)
    model, params = medusa.random_heads(WORLD, len(sizes['levels']))
    tree = medusa.make(model, gamma=0, **sizes)
  if name == 'adaptive':
    count = np.arange(tree.gamma + 1.0)
    costs = adaptive.Costs(1 + 0.15 * count, 0.02 * count)
    tree, params = adaptive.make(tree), adaptive.Params(params, costs)
  check_joint(rule, tree, params=params, drafts=drafts)


@pytest.mark.parametrize(
  'rule, levels',
  [
    (reject.RULE, '2,1'),
    pytest.param(reject.RULE, 'best:3', marks=MORE),
    pytest.param(traversal.RULE, 'best:3', marks=MORE),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        (reject.RULE, '2,2'),
        (traversal.RULE, '2,2'),
        (reject.RULE, '3,2'),
      )
    ),
  ],
)
def test_a_window_of_a_tree_enumerated(rule, levels, x64):
  pair = base.Pair(rule, *of_eagle(levels))
  enumerated.long_window_error(WORLD, pair, WARM)


def test_a_wrong_rule_of_trees_is_seen_in_a_window(x64):
  """It takes what is left of p for a sibling to be p."""

  def verify(noise, draft, p_BNV):
    return reject.verify(noise, draft._replace(q_BKV=draft.q_BKV / 2), p_BNV)

  rule = reject.RULE._replace(verify=verify)
  pair = base.Pair(rule, *RECIPES[base.TREE](WORLD, 3))
  with pytest.raises(base.Broken, match='after .* instead of'):
    enumerated.long_window_error(WORLD, pair, WARM)


@pytest.mark.more
def test_joint_law_of_plain_decoding():
  check_joint(reject.RULE, decode.PLAIN)


@pytest.mark.more
def test_neighbouring_requests_are_independent():
  tokens = drawn(reject.RULE, DRAFT)
  one, two = (tokens[i::2, :3] @ [9, 3, 1] for i in (0, 1))
  both = np.zeros((27, 27))
  np.add.at(both, (one, two), 1)
  marginal = (both.sum(0) + both.sum(1)) / both.sum() / 2
  assert counted.chi_square(both, np.outer(marginal, marginal)) > 1e-9
