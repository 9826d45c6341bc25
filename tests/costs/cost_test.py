"""The formulas against worked numbers; analytic_test has the paper's."""

import math

from specdec_jax.costs import cost


def test_expected_tokens_at_the_ends():
  assert cost.expected_tokens(0.0, 5) == 1
  assert cost.expected_tokens(1.0, 5) == 6
  assert cost.expected_tokens(0.7, 0) == 1
  nearly = cost.expected_tokens(1 - 1e-12, 5)
  assert math.isclose(nearly, 6, rel_tol=1e-3)


def test_do_not_speculate_where_nothing_is_faster():
  assert cost.best({2: 1.2, 4: 1.3, 8: 1.1}) == 4
  assert cost.best({2: 0.9, 4: 1.0}) == 0
  assert cost.best({}) == 0


def test_tokens_of_a_tree_by_hand():
  """At 0.6 a second child has a fifth of 0.4, a third one of what is left."""
  second, third = 0.08, 0.32 / 5
  for nodes, levels, wanted in (
    (0, 3, 1),
    (1, 3, 1.6),
    (2, 3, 1.96),
    (3, 3, 1.96 + 0.216),
    (4, 3, 1.96 + 0.216 + second),
    (3, 1, 1.6 + second + third),
    (4, 2, 1.96 + second + third),
  ):
    found = cost.tree_tokens(0.6, nodes, levels)
    assert math.isclose(found, wanted), (nodes, levels)
  chain = cost.tree_tokens(1.0, 5, 5)
  assert math.isclose(chain, cost.expected_tokens(1.0, 5))
