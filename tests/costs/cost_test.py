"""The formulas against the paper's own table and against worked numbers."""

import math

import pytest

from experiments import papers
from specdec_jax.costs import cost


@pytest.mark.parametrize('alpha, gamma, operations, speed', papers.TABLE1)
def test_leviathan_table_1(alpha, gamma, operations, speed):
  assert round(cost.improvement(alpha, gamma, 0.0), 2) == speed
  assert round(cost.operations(alpha, gamma, 0.0), 2) == operations


def test_expected_tokens_at_the_ends():
  assert cost.expected_tokens(0.0, 5) == 1
  assert cost.expected_tokens(1.0, 5) == 6
  assert cost.expected_tokens(0.7, 0) == 1
  nearly = cost.expected_tokens(1 - 1e-12, 5)
  assert math.isclose(nearly, 6, rel_tol=1e-3)


def test_optimal_gamma_is_the_best_of_all():
  gains = {g: cost.improvement(0.8, g, 0.05) for g in range(1, 65)}
  gamma = cost.optimal_gamma(0.8, 0.05)
  assert gains[gamma] == max(gains.values())
  assert gamma == 8


def test_do_not_speculate_where_a_draft_costs_what_it_saves():
  # Corollary 3.9: some gamma helps exactly when alpha > c.
  assert cost.optimal_gamma(0.5, 0.6) == 0
  assert cost.optimal_gamma(0.5, 0.4) == 1
  assert cost.best({2: 0.9, 4: 1.0}) == 0
  assert cost.best({}) == 0


def test_histograms_by_hand():
  assert cost.histogram_tokens([5, 0, 5]) == 2.0
  assert cost.truncated([4, 3, 2, 1], 2) == [4, 3, 3]
  assert cost.truncated([4, 3, 2, 1], 3) == [4, 3, 2, 1]


def test_truncated_histogram_of_independent_tokens_is_equation_1():
  a, gamma = 0.7, 6
  hist = [a**k * (1 - a) for k in range(gamma)] + [a**gamma]
  for g in range(1, gamma + 1):
    found = cost.histogram_tokens(cost.truncated(hist, g))
    assert math.isclose(found, cost.expected_tokens(a, g))


@pytest.mark.parametrize('alpha, gamma', [(-0.1, 2), (1.1, 2), (0.5, -1)])
def test_arguments_out_of_range(alpha, gamma):
  with pytest.raises(ValueError):
    cost.expected_tokens(alpha, gamma)
