"""The joint law over consecutive windows, enumerated and counted."""

import functools

import jax
import numpy as np
import pytest

from specdec_jax import decode, sampling, types
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import scripted
from specdec_jax.eval import certify
from specdec_jax.verify import coupled, reject
from tests import fakes

V, K = 3, 2
TARGET = fakes.table_model(V)
DRAFT = lm_drafter.make(TARGET, gamma=K)
PROMPT = [1, 2, 0]


def warped(logits_RVV, temperature, top_k=0, top_p=1.0):
  """The table's own law under sampling settings, float64."""
  rows = logits_RVV.reshape(-1, 1, V)
  p = sampling.probabilities(
    rows, sampling.settings(len(rows), temperature, top_k, top_p)
  )
  p = np.asarray(p, np.float64)
  return (p / p.sum(-1, keepdims=True)).reshape(logits_RVV.shape)


def completed(tokens_RL, lengths_R, chance_R, law, start):
  """Law of n tokens from texts of m <= n tokens, extended by the target."""
  n = law.ndim
  out = np.zeros_like(law)
  for m in range(1, n + 1):
    rows = lengths_R == start + m
    if not rows.any():
      continue
    flat = np.ravel_multi_index(tokens_RL[rows, start : start + m].T, (V,) * m)
    mass = np.bincount(flat, chance_R[rows], V**m).reshape((V,) * m)
    head = law.sum(tuple(range(m, n)), keepdims=True)
    with np.errstate(invalid='ignore'):
      rest = np.where(head > 0, law / head, 0)
    out += mass.reshape(mass.shape + (1,) * (n - m)) * rest
  return out


def walked(drafter, rule, weights, settings, *, windows, rows=8192):
  request = fakes.request(
    [PROMPT] * rows, 40, vocab=V, length=16 + 32, **settings
  )
  state, info = decode.programs(TARGET, drafter, rule).start(weights, request)
  step = certify.step_with(TARGET, drafter, rule)
  return certify.walk(
    step,
    weights,
    request,
    state,
    info,
    certify.outcomes(V, K),
    windows=windows,
  )


@pytest.mark.parametrize(
  'draft, settings',
  [
    ('lm', dict(temperature=1.0)),
    ('ragged', dict(temperature=0.7, top_k=2)),
    ('scripted', dict(temperature=1.3)),
  ],
)
@pytest.mark.parametrize('x64', [False, True], ids=['float32', 'float64'])
def test_three_windows_of_reject_enumerated(x64, draft, settings):
  with jax.enable_x64(x64):
    logits = fakes.table(0, V)
    drafter = dict(
      lm=DRAFT, ragged=fakes.ragged(DRAFT), scripted=scripted.make(gamma=K)
    )[draft]
    script = np.random.default_rng(1).integers(0, V, (1, 48)).astype(np.int32)
    other = fakes.table(1, V)
    if draft == 'scripted':
      script = np.repeat(script, 8192, 0)
      other = (script, script % (K + 1))
    tokens_RL, lengths_R, chance_R = walked(
      drafter,
      reject.RULE,
      types.Weights(logits, other),
      settings,
      windows=3,
    )
    law = fakes.joint_law(warped(logits, **settings), PROMPT, 3 * (K + 1))
  bound = 1e-12 if x64 else 1e-6
  assert abs(chance_R.sum() - 1) <= bound
  assert len(np.unique(lengths_R)) > 3
  got = completed(tokens_RL, lengths_R, chance_R, law, len(PROMPT))
  assert np.abs(got - law).max() <= bound


@functools.cache
def counted(rule, drafter, samples, rows, settings, seed=0):
  """How often production decoding says each text of 7 tokens."""
  n = 7
  logits = fakes.table(0, V)
  weights = types.Weights(logits, fakes.table(1, V))
  programs = decode.programs(TARGET, drafter, rule)
  counts, calls = np.zeros(V**n), []
  for i in range(samples // rows):
    request = fakes.request(
      [PROMPT] * rows,
      n,
      vocab=V,
      gamma=K,
      seed=seed,
      request=np.arange(rows) + i * rows,
      **dict(settings),
    )
    out = programs.generate(weights, request)
    new = np.asarray(out.tokens_BL)[:, len(PROMPT) : len(PROMPT) + n]
    assert (np.asarray(out.lengths_B) == len(PROMPT) + n).all()
    counts += np.bincount(np.ravel_multi_index(new.T, (V,) * n), minlength=V**n)
    calls.append(np.asarray(out.info.calls_B))
  assert np.concatenate(calls).min() >= (3 if drafter.gamma else n)
  law = fakes.joint_law(warped(logits, **dict(settings)), PROMPT, n)
  return counts, law


SETTINGS = (('temperature', 0.9), ('top_p', 0.95))


@pytest.mark.parametrize(
  'rule', [reject.RULE, coupled.RULE], ids=lambda r: r[0]
)
def test_joint_law_of_generate(rule):
  counts, law = counted(rule, DRAFT, 2**16, 2**12, SETTINGS)
  assert certify.chi_square(counts, law) > 1e-9


def test_joint_law_of_plain_decoding():
  counts, law = counted(reject.RULE, decode.PLAIN, 2**16, 2**12, SETTINGS)
  assert certify.chi_square(counts, law) > 1e-9


def test_chi_square_sees_a_bias():
  rng = np.random.default_rng(0)
  law = rng.dirichlet(np.ones(200))
  counts = rng.multinomial(2**16, law)
  other = law * (1 + 0.1 * rng.choice([-1, 1], 200))
  assert certify.chi_square(counts, law) > 1e-3
  assert certify.chi_square(counts, other / other.sum()) < 1e-9
