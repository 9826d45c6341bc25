"""The acceptance and the distribution that a rule states, enumerated."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, sampling, types

V, U = 5, 4000


def one_window(rule, p_NV, q_V, scores):
  """(kept_V, emitted_V) of a window of one draft, over all drafts and U; and
  the weights [X, V] of the token after a draft that is kept."""
  x_B, u_B = map(np.ravel, np.meshgrid(np.arange(V), (np.arange(U) + 0.5) / U))
  every = lambda x: jnp.broadcast_to(jnp.asarray(x), (len(x_B), *np.shape(x)))
  draft = types.Draft(
    jnp.asarray(x_B)[:, None], every(q_V[None]), every(jnp.int32(1))
  )
  noise = types.Noise(jnp.asarray(u_B)[:, None], lambda *_: None, None)
  extra = [scores(len(x_B))] if rule.scored else []
  verdict = rule.verify(noise, draft, every(p_NV), *extra)
  kept_B = np.asarray(verdict.accepted_B) == 1
  chance_B = q_V[x_B] / U
  kept_V = np.bincount(x_B[kept_B], chance_B[kept_B], V)
  weights_BV = np.asarray(verdict.weights_BV).astype(float)
  rest_BV = weights_BV[~kept_B] / weights_BV[~kept_B].sum(-1, keepdims=True)
  emitted_V = kept_V + (chance_B[~kept_B, None] * rest_BV).sum(0)
  return kept_V, emitted_V, weights_BV[kept_B]


@pytest.mark.parametrize('temperature', [1.0, 0.0])
@pytest.mark.parametrize(
  'name',
  [
    *('reject', 'block', 'lenient:0.9', 'lenient:0.5', 'lenient:0.1'),
    *('typical:0.05', 'typical:0.3', 'typical:0.9'),
  ],
)
def test_a_rule_keeps_and_emits_what_it_states(name, temperature):
  """Rule.kept and Rule.emitted, or min(p, q) and p, from verify alone.

  Not for coupled, whose drafts share the target's noise: see its promise.
  """
  rule, rng = build.rule_of(name), np.random.default_rng(0)
  for _ in range(5):
    *raw_NV, q_V = rng.dirichlet(np.ones(V), 3).astype(np.float32)
    best_NV = np.eye(V, dtype=np.float32)[np.argmax(raw_NV, -1)]
    p_NV = np.array(raw_NV) if temperature else best_NV
    scores = lambda rows, raw_NV=raw_NV: types.Scores(
      jnp.broadcast_to(jnp.log(jnp.array(raw_NV)), (rows, 2, V)),
      sampling.settings(rows, temperature),
    )
    kept_V, emitted_V, bonus_XV = one_window(rule, p_NV, q_V, scores)
    after_V = best_NV[1] if name.startswith('typical') else p_NV[1]
    assert np.abs(bonus_XV - after_V[None]).max() < 1e-6
    p_V, first = p_NV[0], scores(1)
    first = first._replace(logits_BNV=first.logits_BNV[:, :1])
    args = p_V[None, None], q_V[None, None], first
    stated_V = np.minimum(p_V, q_V) if rule.kept is None else rule.kept(*args)
    np.testing.assert_allclose(kept_V, np.ravel(stated_V), atol=2 / U)
    stated_V = p_V if rule.emitted is None else rule.emitted(*args)
    np.testing.assert_allclose(emitted_V, np.ravel(stated_V), atol=2 / U)
    if name.startswith('lenient') and temperature:  # the paper's guarantee
      lenience = float(name.partition(':')[2])
      assert (emitted_V <= p_V / lenience + 2 / U).all()


def test_rules_by_name():
  half = build.rule_of('lenient:0.5')
  assert half is build.rule_of('lenient:.5') and not half.lossless
  # Nothing is lossy about a lenience of 1.
  reject = build.rule_of('reject')
  assert build.rule_of('lenient:1').verify is reject.verify
  exact = {'reject', 'block', 'coupled', 'traversal'}
  assert set(build.lossless_rules()) == exact
