"""Sliding windows survive rejection: decoding equals a full recompute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, forward, types
from specdec_jax.costs import scripted
from specdec_jax.models import lm
from specdec_jax.verify import reject
from tests import fakes

V, GAMMA, WIDEST, NEW = 13, 3, 8, 80
# Every start of a window of decoding modulo 8, and so modulo 4, with every
# number of accepted drafts.
PHASE, ACCEPTED = map(np.ravel, np.mgrid[:WIDEST, : GAMMA + 1])
ROWS, L = len(PHASE), 2 * WIDEST + NEW + GAMMA


def decoded(programs, weights, request):
  output, state = fakes.run_steps(programs, weights, request)
  return np.asarray(output.tokens_BL), output.info, state.cache


@functools.partial(jax.jit, static_argnums=0)
def recomputed(model, params, tokens_BL):
  """(greedy token after every prefix, cache) of one pass over everything."""
  hidden_BLD, _, cache = forward.read(
    model,
    params,
    tokens_BL,
    jnp.zeros((ROWS,), jnp.int32),
    model.init_cache(ROWS, L),
    slots=L,
  )
  return jnp.argmax(model.head(params, hidden_BLD), -1), cache


@pytest.mark.more
def test_rejection_at_every_phase_equals_a_full_recompute(x64):
  config = fakes.tiny(
    depth=3,
    windows=(4, WIDEST, 0),
    rotated=(True, True, False),
    local_rope_theta=100.0,
  ).running(scan_layers=True)
  model, params = lm.make(config), fakes.wild(config, 0)
  options = decode.Options(widths=())
  programs = decode.programs(
    model, scripted.make(gamma=GAMMA), reject.RULE, options
  )
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, V, WIDEST + p).tolist() for p in PHASE]
  request = fakes.request(prompts, NEW, vocab=V, length=L)
  start_B1 = request.lengths_B[:, None]

  # Without proposals: plain decoding.
  none_BL, all_BL = np.zeros((2, ROWS, L), np.int32) + [[[0]], [[GAMMA]]]
  silent = types.Weights(params, (request.tokens_BL, none_BL))
  text_BL, _, _ = decoded(programs, silent, request)
  best_BL, fresh = recomputed(model, params, text_BL)
  for tokens, best, n in zip(text_BL, best_BL, start_B1[:, 0], strict=True):
    np.testing.assert_array_equal(
      tokens[n : n + NEW], best[n - 1 : n + NEW - 1]
    )

  # A script that is wrong once in every window, after ACCEPTED right drafts.
  turn_BL = (np.arange(L)[None] - start_B1) % (ACCEPTED[:, None] + 1)
  wrong_BL = (turn_BL == ACCEPTED[:, None]) & (ACCEPTED[:, None] < GAMMA)
  script_BL = np.where(wrong_BL, (text_BL + 1) % V, text_BL).astype(np.int32)
  weights = types.Weights(params, (script_BL, all_BL))
  again_BL, info, cache = decoded(programs, weights, request)
  np.testing.assert_array_equal(again_BL, text_BL)
  right_B = np.asarray(info.hist_BN)[np.arange(ROWS), ACCEPTED]
  assert (right_B >= NEW // (GAMMA + 1)).all()
  assert (info.calls_B - right_B <= 1).all()  # the last may be cut
  for held, anew in zip(cache, fresh, strict=True):  # [B, depth, L, G * C]
    for b, n in enumerate(start_B1[:, 0]):
      read = n + NEW - 1
      np.testing.assert_allclose(
        held[b, :, :read], anew[b, :, :read], atol=1e-12
      )
