"""Every random draw: its law, its key, and what it does not depend on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specdec_jax import sampling
from specdec_jax.certify import counted


def noise(seeds, requests, lengths, *, temperature=1.0, coupled=False):
  as_array = lambda x, t: jnp.asarray(np.array(x, t))
  return sampling.noise(
    as_array(seeds, np.uint32),
    as_array(requests, np.uint32),
    as_array(lengths, np.int32),
    sampling.settings(len(seeds), temperature),
    gamma=3,
    coupled=coupled,
  )


def test_bits_are_jaxs_own():
  for seed in range(3):
    key = jax.random.fold_in(jax.random.key(seed), 2**31 + seed)
    for size in (1, 2, 5, 1000):
      np.testing.assert_array_equal(
        sampling.bits(key, size), jax.random.bits(key, (size,), jnp.uint32)
      )


def test_exponentials_follow_their_law_and_resolve_small_values():
  x = np.asarray(sampling.exponential(jax.random.key(0), 2**22, jnp.float32))
  assert stats.kstest(x[: 2**18], 'expon').pvalue > 1e-6
  # 23-bit uniforms have no value between 0 and 1.2e-7.
  small = x[x < 1e-5]
  assert len(small) == pytest.approx(2**22 * 1e-5, abs=4 * 6.5)
  assert len(np.unique(small)) == len(small)


def test_no_bits_give_an_infinite_or_zero_arrival(monkeypatch):
  for bits in (0, 1, 2**31, 2**32 - 1):
    fake = lambda key, size, bits=bits: jnp.full(size, bits, jnp.uint32)
    with monkeypatch.context() as patch:
      patch.setattr(sampling, 'bits', fake)
      x = sampling.exponential(jax.random.key(0), 3, jnp.float32)
    assert np.isfinite(x).all() and (np.asarray(x) > 0).all()


def test_law_of_a_draw():
  V, n = 16, 2**16
  rng = np.random.default_rng(0)
  w = np.exp(1.5 * rng.normal(size=V)).astype(np.float32)
  w[[3, 7]] = 0
  keys = jax.random.split(jax.random.key(1), n)
  weights_BV = jnp.broadcast_to(jnp.asarray(w), (n, V))
  tokens = sampling.draw(sampling.settings(n, 1.0), keys, weights_BV)
  assert tokens.dtype == jnp.int32
  counts = np.bincount(np.asarray(tokens), minlength=V)
  assert counts[[3, 7]].tolist() == [0, 0]
  assert counted.chi_square(counts, w / w.sum()) > 1e-6


def test_accept_uniforms_are_in_range_and_uniform():
  B = 2**12
  u = np.asarray(noise(np.zeros(B), np.arange(B), np.full(B, 9)).accept_BK)
  assert u.shape == (B, 3) and (u >= 0).all() and (u < 1).all()
  for column in u.T:
    assert stats.kstest(column, 'uniform').pvalue > 1e-6


def test_no_two_draws_share_a_key():
  """Roles, offsets, positions, requests and seeds each change every draw."""
  points = list(itertools.product((0, 1, 2**31), (0, 1, 2**20), range(1, 12)))
  seeds, requests, lengths = zip(*points, strict=True)
  drawn = []

  def record(settings, keys_B, weights_BV):
    drawn.append(np.asarray(jax.random.key_data(keys_B)))
    return jnp.zeros(len(points), jnp.int32)

  w = jnp.ones((len(points), 4))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling, 'draw', record)
    n = noise(seeds, requests, lengths)
    for k in range(3):
      n.draft(k, w)
    # The emitted token's key belongs to its position: once for each.
    n.next(jnp.zeros(len(points), jnp.int32), w)
  keys = np.concatenate(drawn)
  assert len(np.unique(keys, axis=0)) == 4 * len(points)
  # The accept draws' keys are seen by what they give: uniforms of 23 bits.
  uniform = jax.vmap(lambda key: jax.random.uniform(key, ()))
  others = np.asarray(uniform(jax.random.wrap_key_data(jnp.asarray(keys))))
  assert len(np.unique(np.asarray(n.accept_BK))) == 3 * len(points)
  assert np.isin(np.asarray(n.accept_BK), others).sum() <= 1


@pytest.mark.more
def test_next_draw_belongs_to_its_position():
  """Whatever window it is in; the draft and accept draws belong to theirs."""
  w = jnp.asarray(np.random.default_rng(0).random((8, 50)), jnp.float32)
  at = lambda x: jnp.full(8, x, jnp.int32)
  same = lambda a, b: (np.asarray(a) == np.asarray(b)).all()
  early = noise([5] * 8, range(8), [10] * 8)
  late = noise([5] * 8, range(8), [12] * 8)
  assert same(early.next(at(3), w), late.next(at(1), w))
  assert not same(early.next(at(3), w), late.next(at(3), w))
  assert not same(early.draft(2, w), late.draft(0, w))
  assert not same(early.accept_BK[:, 2], late.accept_BK[:, 0])
  coupled = noise([5] * 8, range(8), [10] * 8, coupled=True)
  assert same(coupled.draft(2, w), early.next(at(2), w))
  assert not same(coupled.draft(2, w), early.draft(2, w))


@pytest.mark.more
def test_a_rows_noise_does_not_depend_on_the_batch():
  w = jnp.asarray(np.random.default_rng(0).random((6, 30)), jnp.float32)
  rows = ([1, 1, 2, 3, 1, 7], [4, 5, 4, 4, 9, 0], [3, 3, 3, 8, 20, 1])
  every = noise(*rows)
  for b in (2, 5):
    one = noise(*([x[b]] for x in rows))
    np.testing.assert_array_equal(every.accept_BK[b], one.accept_BK[0])
    pick = lambda n, w: (n.draft(1, w), n.next(jnp.full(len(w), 2), w))
    for x, y in zip(pick(every, w), pick(one, w[b : b + 1]), strict=True):
      assert int(x[b]) == int(y[0])


def test_greedy_batches_draw_nothing_and_take_the_only_weight():
  w = jnp.asarray(np.eye(5, dtype=np.float32)[[3, 0, 4]] * 0.25)
  keys = jax.random.split(jax.random.key(0), 3)
  for temperature in (0, 1):
    settings = sampling.settings(3, temperature)
    assert sampling.draw(settings, keys, w).tolist() == [3, 0, 4]


def test_rows_are_drawn_beside_greedy_ones():
  """What a row draws does not depend on whether its neighbours draw."""
  w = jnp.asarray(np.random.default_rng(0).random((8, 50)), jnp.float32)
  greedy = np.arange(8) % 2 == 0
  drawn = []
  for cold in (0.7, 0.0):
    warm = np.where(greedy, cold, 0.7)
    n = noise([0] * 8, range(8), [4] * 8, temperature=warm)
    drawn.append(np.stack([n.draft(0, w), n.next(jnp.zeros(8, jnp.int32), w)]))
  np.testing.assert_array_equal(drawn[0][:, ~greedy], drawn[1][:, ~greedy])
  likeliest = np.argmax(w, -1)[None]
  assert (drawn[1] != likeliest)[:, ~greedy].any(1).all()
