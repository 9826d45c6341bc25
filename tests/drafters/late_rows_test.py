"""Rows that have read less than others: each drafts as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import sampling, types
from specdec_jax.certify import base, load

V, L, B, TURNS = 5, 128, 5, 12
MORE = pytest.mark.more


def schedule(gamma: int):
  """(lengths_B before, tokens that are emitted, caps of the drafts) of each
  turn [TURNS, B]: nothing is drafted, one token emitted, or all, or some."""
  rng = np.random.default_rng(gamma)
  caps_TB = rng.integers(0, gamma + 1, (TURNS, B))
  caps_TB[:, :2] = gamma
  caps_TB[:-1, 2] = caps_TB[: TURNS // 2, 3] = 0
  caps_TB[-1] = gamma
  emitted_TB = rng.integers(1, caps_TB + 2)
  emitted_TB[:, 0], emitted_TB[:, 1] = 1, gamma + 1
  before_TB = np.cumsum(emitted_TB, 0) - emitted_TB + [[2, 9, 3, 6, 4]]
  return before_TB, emitted_TB, caps_TB


def made(name: str, gamma: int):
  """(rows) -> (tokens, q) of their drafts in each turn, and their caps."""
  world = base.transformers(V)
  drafter, params = load.RECIPES[name](world, gamma)
  weights, rng = types.Weights(world.weights.target, params), np.random
  text_BL = rng.default_rng(0).integers(1, V, (B, L)).astype(np.int32)
  states_BLE = rng.default_rng(1).normal(size=(B, L, 16))
  features = lambda rows: states_BLE[rows] if drafter.taps else None
  before_TB, emitted_TB, caps_TB = schedule(gamma)
  likeliest = lambda _, q_BV: jnp.argmax(q_BV, -1).astype(jnp.int32)

  def context(text_BL, lengths_B, caps_B):
    n, caps_B = len(text_BL), jnp.asarray(caps_B, jnp.int32)
    live_B, asked = jnp.ones(n, bool), sampling.settings(n, 1.0)
    return types.Context(
      text_BL, jnp.asarray(lengths_B, jnp.int32), live_B, asked, caps_B
    )

  @jax.jit
  def begin(text_BL, states_BLE, before_B):
    return drafter.init(
      weights, context(text_BL, before_B, before_B), states_BLE
    )

  @jax.jit
  def turn(state, text_BL, states_BLE, before_B, emitted_B, caps_B):
    given = context(text_BL, before_B, caps_B)
    noise = types.Noise(None, likeliest, likeliest)
    draft, state, _ = drafter.propose(weights, state, given, noise, None)
    new_BNE = None
    if drafter.taps:
      at_BN = before_B[:, None] - 1 + jnp.arange(gamma + 1)[None]
      new_BNE = jnp.take_along_axis(states_BLE, at_BN[..., None], 1)
    after = context(text_BL, before_B + emitted_B, caps_B)
    emitted_B = jnp.asarray(emitted_B, jnp.int32)
    outcome = types.Outcome(emitted_B - 1, emitted_B - 1, emitted_B)
    return draft, drafter.commit(state, after, outcome, new_BNE)

  def run(rows):
    given, found = (text_BL[rows], features(rows)), []
    state = begin(*given, before_TB[0, rows])
    for t in range(TURNS):
      each = (x[t, rows] for x in (before_TB, emitted_TB, caps_TB))
      draft, state = turn(state, *given, *each)
      found.append((draft.tokens_BK, draft.q_BKV))
    return jax.device_get(found), caps_TB[:, rows]

  return run


@pytest.mark.parametrize(
  'name, gamma',
  [
    ('eagle', 5),
    *(
      pytest.param(*x, marks=MORE)
      for x in (('eagle', 8), ('lm', 5), ('lm', 9), ('medusa', 6))
      + (('dflash', 5), ('dflash', 8), ('hybrid', 6))
    ),
  ],
)
def test_a_row_drafts_as_if_it_were_alone(name, gamma, x64):
  run = made(name, gamma)
  together, _ = run([*range(B)])
  compared = 0
  for b in range(B):
    alone, caps_T1 = run([b])
    for t, (cap,) in enumerate(caps_T1):
      for one, two in zip(together[t], alone[t], strict=True):
        one, two = one[b, :cap], two[0, :cap]
        np.testing.assert_allclose(one, two, atol=1e-9, err_msg=f'{b}, {t}')
      compared += cap
  assert compared > 2 * TURNS * gamma
