"""Logits to probabilities, against a float64 oracle that sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import sampling
from specdec_jax.certify.table_model import probabilities as oracle


def rows(V):
  """Logits of many kinds: random, peaked, flat, tied, partly excluded."""
  rng = np.random.default_rng(0)
  out = [s * rng.normal(size=V) for s in (0.01, 1, 1, 3, 10, 100)]
  out += [np.round(2 * rng.normal(size=V)) for _ in range(6)]  # many ties
  out += [np.zeros(V), np.full(V, -1e30), np.arange(V) * 1.0]
  cut = rng.normal(size=V)
  cut[V // 2 :] = -np.inf
  return np.array([*out, cut, np.where(np.arange(V) == 1, 0, -np.inf)])


SETTINGS = [
  (t, k, p)
  for t in (0.0, 1e-8, 2e-5, 1e-2, 0.3, 0.7, 1.0, 1.3, 50.0)
  for k in (0, 1, 2, 5, 10**6)
  for p in (1e-6, 0.3, 0.9, 0.999, 1.0)
]


@pytest.mark.parametrize('V', [2, 7, 50])
@pytest.mark.parametrize('wide', [False, True], ids=['float32', 'float64'])
def test_probabilities_equal_the_sorting_oracle(wide, V):
  with jax.enable_x64(wide):
    dtype = np.float64 if wide else np.float32
    tie, tol = (1e-11, 1e-12) if wide else (1e-5, 2e-6)
    cases = [(x, s) for x in rows(V).astype(dtype) for s in SETTINGS]
    logits, settings = zip(*cases, strict=True)
    got = sampling.probabilities(
      jnp.asarray(np.array(logits))[:, None],
      sampling.settings(len(cases), *zip(*settings, strict=True)),
    )[:, 0]
    assert got.dtype == dtype
    got = np.asarray(got, np.float64)
  undecided = 0
  for g, x, (t, k, p) in zip(got, logits, settings, strict=True):
    t, p = float(dtype(t)), float(dtype(p))
    wanted = oracle(x, t, k, p)
    if np.abs(g - wanted).max() > tol:
      # Allowed only where the kept mass is top_p itself up to rounding.
      either = [oracle(x, t, k, p, slack) for slack in (-tie, tie)]
      assert min(np.abs(g - w).max() for w in either) <= tol, (x, t, k, p)
      undecided += 1
    assert abs(g.sum() - 1) < 1e-5
  assert undecided < 0.03 * len(cases)


@pytest.mark.more
def test_a_mass_of_exactly_top_p_is_enough():
  x = jnp.asarray(
    np.random.default_rng(0).normal(size=(50, 1, 16)), jnp.float32
  )
  settings = sampling.settings(50, 1.0)
  p = sampling.probabilities(x, settings)
  top = np.asarray(p.max(-1))[:, 0]
  cut = sampling.probabilities(x, settings._replace(top_p_B=top))
  assert (np.asarray(cut > 0).sum(-1) == 1).all()
  more = settings._replace(top_p_B=np.nextafter(top, np.float32(1)))
  assert (np.asarray(sampling.probabilities(x, more) > 0).sum(-1) == 2).all()


def test_top_k_parts_neighbouring_floats():
  x = np.array([0, -1, np.nextafter(np.float32(-1), -2)], np.float32)
  p = sampling.probabilities(
    jnp.asarray(x)[None, None], sampling.settings(1, 1.0, 2)
  )
  assert (np.asarray(p[0, 0]) > 0).tolist() == [True, True, False]


def test_greedy_is_the_first_maximum():
  rng = np.random.default_rng(0)
  x = np.round(rng.normal(size=(1000, 3, 6))).astype(np.float32)  # ties
  for dtype in (jnp.float32, jnp.bfloat16):
    p = sampling.probabilities(jnp.asarray(x, dtype), sampling.settings(1000))
    assert p.dtype == jnp.float32
    np.testing.assert_array_equal(
      np.asarray(p), np.eye(6)[np.argmax(x, -1)].astype(np.float32)
    )


def test_rows_that_are_greedy_for_ever_compile_nothing_that_samples():
  logits_BNV = jnp.asarray([[[1.0, 3.0, 2.0]]])
  greedy = sampling.settings(1)
  known = greedy._replace(temperature_B=None)
  run = lambda s: jax.make_jaxpr(sampling.probabilities)(logits_BNV, s)
  assert 'exp' in str(run(greedy)) and 'exp' not in str(run(known))
  for s in (greedy, known):
    p_BNV = sampling.probabilities(logits_BNV, s)
    assert p_BNV.tolist() == [[[0, 1, 0]]]


@pytest.mark.parametrize('count', [1, 3])
def test_the_largest_are_the_same_by_a_sort_and_by_passes(count):
  """Of equals the first, and what is left where the rest cannot be drawn."""
  inf = np.inf
  x = np.array([[2, 7, 7, 1], [-inf, 3, -inf, 3], [0.0, -0.0, 5, 5]])
  x = x.astype(np.float32)
  want = np.argsort(-x, -1, kind='stable')[:, :count]
  for at in (sampling.largest, sampling._largest_by_passes):
    value, index = at(x, count=count)
    np.testing.assert_array_equal(np.where(value > -inf, index, want), want)
    np.testing.assert_array_equal(value, np.take_along_axis(x, want, -1))


def test_a_largest_id_is_in_the_vocabulary_whatever_happens():
  x = np.full((2, 5), np.nan, np.float32)
  x[1] = -np.inf
  with jax.debug_nans(False):
    first = sampling.first_of(jnp.asarray(x), jnp.max(x, -1, keepdims=True))
  assert first.tolist() == [[4], [0]]


@pytest.mark.more
def test_a_row_does_not_depend_on_the_others():
  rng = np.random.default_rng(1)
  x = rng.normal(size=(64, 2, 50)).astype(np.float32)
  mine = sampling.settings(64, 0.9)
  plain = np.asarray(sampling.probabilities(jnp.asarray(x), mine))
  odd = np.arange(64) % 2 == 1
  for change in (
    dict(temperature_B=np.where(odd, 0, 0.9).astype(np.float32)),
    dict(top_k_B=np.where(odd, 3, 0).astype(np.int32)),
    dict(top_p_B=np.where(odd, 0.5, 1).astype(np.float32)),
  ):
    other = sampling.probabilities(jnp.asarray(x), mine._replace(**change))
    np.testing.assert_array_equal(np.asarray(other)[~odd], plain[~odd])
    assert (np.asarray(other)[odd] != plain[odd]).any((1, 2)).all()


def test_entropies_leave_padding_out():
  logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25, 0.0]]]))
  _, _, entropy_BN = sampling.logprobs(logits, jnp.zeros((1, 1), int), 1)
  assert float(entropy_BN[0, 0]) == pytest.approx(1.5 * np.log(2), abs=1e-6)
