"""The formulas against the paper's own table and against worked numbers."""

import math

import pytest

from specdec_jax.bench import cost


# Leviathan et al. 2023, table 1: alpha, gamma, operations, speed at c = 0.
@pytest.mark.parametrize(
  'alpha, gamma, operations, speed',
  [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
  ],
)
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


def test_histogram_tokens_is_exact():
  assert cost.histogram_tokens([5, 0, 5]) == 2.0
  with pytest.raises(ValueError, match='no windows'):
    cost.histogram_tokens([0, 0])


def test_truncated_keeps_windows_and_cuts_tokens():
  assert cost.truncated([4, 3, 2, 1], 2) == [4, 3, 3]
  assert cost.truncated([4, 3, 2, 1], 3) == [4, 3, 2, 1]
  with pytest.raises(ValueError, match='gamma=4'):
    cost.truncated([4, 3, 2, 1], 4)


def test_truncated_histogram_of_independent_tokens_is_equation_1():
  a, gamma = 0.7, 6
  hist = [a**k * (1 - a) for k in range(gamma)] + [a**gamma]
  for g in range(1, gamma + 1):
    found = cost.histogram_tokens(cost.truncated(hist, g))
    assert math.isclose(found, cost.expected_tokens(a, g))


def test_window_pays_for_width_only_where_something_is_proposed():
  assert cost.window(0.0, 0.0, 1.5) == 1.0
  assert cost.window(0.0, 1.0, 1.5) == 1.5
  assert math.isclose(cost.window(0.1, 0.25, 1.4), 0.1 + 0.25 * 1.4 + 0.75)
  assert math.isclose(cost.window(0.0, 0.25, 1.4, 1.1), 0.35 + 0.825)
  with pytest.raises(ValueError, match='share'):
    cost.window(0.0, 1.5, 1.0)


def test_sparse_tokens():
  assert math.isclose(cost.sparse_tokens(1.0, 4, 0.5), 3.0)
  assert cost.sparse_tokens(0.9, 4, 0.0) == 1.0


def test_alpha_of_is_the_inverse_of_equation_1():
  for alpha in (0.0, 0.3, 0.99, 1.0):
    for gamma, rate in ((1, 1.0), (4, 1.0), (4, 0.2)):
      tokens = cost.sparse_tokens(alpha, gamma, rate)
      found = cost.alpha_of(tokens, gamma, rate)
      assert math.isclose(found, alpha, abs_tol=1e-6)
  assert cost.alpha_of(0.5, 4) <= 1e-9
  assert cost.alpha_of(5.01, 4) is None
  assert cost.alpha_of(1.5, 4, 0.1) is None


def test_break_even():
  # Corollary 3.9, gamma 1 and v = 1: alpha = c.
  assert math.isclose(cost.alpha_of(cost.window(0.3, 1.0, 1.0), 1), 0.3)
  assert math.isclose(cost.break_even_c(1.3, 1.0, 1), 0.3)
  assert math.isclose(cost.break_even_c(2.0, 1.2, 4), 0.2)
  assert cost.break_even_c(1.1, 1.2, 4) < 0


def test_interpolated():
  v = cost.interpolated({1: 1.0, 5: 1.8})
  assert [v(n) for n in (1, 5, 9)] == [1.0, 1.8, 1.8]
  assert math.isclose(v(3), 1.4)


@pytest.mark.parametrize('alpha, gamma', [(-0.1, 2), (1.1, 2), (0.5, -1)])
def test_arguments_out_of_range(alpha, gamma):
  with pytest.raises(ValueError):
    cost.expected_tokens(alpha, gamma)
