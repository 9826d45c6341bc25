"""Rotations and attention against formulas written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.models import attention, cache
from specdec_jax.models import config as model_config
from tests import fakes


def test_a_window_sees_the_last_tokens_and_turns_by_its_own_base(x64):
  config = fakes.tiny(
    windows=(3, 0),
    rope_theta=500.0,
    local_rope_theta=100.0,
    rope_scaling=model_config.RopeScaling(factor=8.0, original_context=0),
  )
  positions = np.array([[0, 1, 2], [4, 5, 6]])
  slots = np.arange(8)
  causal = slots <= positions[..., None]
  views = attention.views(config, jnp.asarray(positions), jnp.asarray(causal))
  assert list(views) == [(3, True), (0, True)]
  views = {window: view for (window, _), view in views.items()}
  near = slots > positions[..., None] - 3
  np.testing.assert_array_equal(views[0].mask_BTS, causal)
  np.testing.assert_array_equal(views[3].mask_BTS, causal & near)
  assert near.sum() < near.size and views[3].mask_BTS[1, 2].sum() == 3
  pair = np.arange(config.head_dim // 2) * 2 / config.head_dim
  for window, freq in ((0, 500.0**-pair / 8), (3, 100.0**-pair)):
    angle = positions[:, :, None, None] * freq
    np.testing.assert_allclose(views[window].cos, np.cos(angle), atol=1e-12)
    np.testing.assert_allclose(views[window].sin, np.sin(angle), atol=1e-12)


def test_positions_past_256_keep_their_angle_in_bfloat16():
  config = fakes.tiny(dtype='bfloat16')
  cos, _ = attention.rotation(jnp.array([[256, 257]]), config)
  assert cos.dtype == jnp.float32
  assert cos[0, 0, 0, 0] != cos[0, 1, 0, 0]


@pytest.mark.parametrize('scale, cap', [(None, None), (0.9, 1.5)])
def test_grouped_heads_equal_repeated_keys_and_values(x64, scale, cap):
  B, T, H, G, S, C = 2, 3, 6, 2, 7, 4
  rng = np.random.default_rng(0)
  q = rng.normal(size=(B, T, H, C))
  k, v = rng.normal(size=(2, B, G, S, C))
  mask = rng.random((B, T, S)) < 0.5
  mask[..., 0] = True
  got = attention.attend(
    jnp.asarray(q),
    cache.KVCache(jnp.asarray(k), jnp.asarray(v)),
    jnp.asarray(mask),
    scale=scale,
    cap=cap,
  )
  k, v = (np.repeat(x, H // G, 1) for x in (k, v))  # head h reads h // (H / G)
  scores = np.einsum('bthc,bhsc->bhts', q, k) * (scale or 1 / np.sqrt(C))
  if cap is not None:
    scores = cap * np.tanh(scores / cap)
  scores = np.where(mask[:, None], scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  wanted = np.einsum('bhts,bhsc->bthc', weights, v).reshape(B, T, H * C)
  np.testing.assert_allclose(got, wanted, atol=1e-12)


def test_a_row_that_sees_nothing_is_finite():
  zeros = jnp.zeros((1, 1, 4, 2))
  out = attention.attend(
    jnp.ones((1, 1, 2, 2)),
    cache.KVCache(zeros, zeros),
    jnp.zeros((1, 1, 4), bool),
  )
  assert np.isfinite(out).all()


def test_a_gpu_without_cudnn_attends_by_xla(monkeypatch):
  T, C = attention.CUDNN_FROM, 64
  q_BTHC = jnp.ones((1, T, 2, C), jnp.bfloat16)
  layer = cache.KVCache(*(jnp.ones((1, 1, T, C), jnp.bfloat16) for _ in 'kv'))
  mask_BTS = jnp.tril(jnp.ones((1, T, T), bool))
  wanted = attention.attend(q_BTHC, layer, mask_BTS)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  got = attention.attend(q_BTHC, layer, mask_BTS)
  np.testing.assert_array_equal(got, wanted)
