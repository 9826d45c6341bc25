"""The joint distribution of consecutive windows: the cheapest cases.

The promises (certify/promises_test.py) have them in full.
"""

import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.certify import base, counted, enumerated, recipes, table_model
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.verify import block, coupled, reject

V, K = 3, 2
PROMPT = enumerated.PROMPT[V]


@pytest.mark.parametrize(
  'draft, settings',
  [
    ('lm', dict(temperature=1.0)),
    ('ragged', dict(temperature=0.7, top_k=2)),
    ('scripted', dict(temperature=1.3)),
  ],
)
def test_three_windows_of_reject_enumerated(draft, settings, x64):
  world = base.tables(V)
  recipe = enumerated.script if draft == 'scripted' else recipes.RECIPES['lm']
  drafter, other = recipe(world, K)
  if draft == 'ragged':
    drafter = base.ragged(drafter)
  enumerated.walk(world, drafter, other, reject.RULE, settings)


def drawn(rule, drafter, world, samples, settings, n=7):
  """Texts of n tokens by production decoding: [samples, n]."""
  rows, parts, calls = 2**12, [], []
  for i in range(0, samples, rows):
    request = base.make_request(
      world,
      [PROMPT] * rows,
      n,
      length=len(PROMPT) + n + drafter.gamma,
      gamma=drafter.gamma,
      request=np.arange(rows) + i,
      **dict(settings),
    )
    out = base.run(world, drafter, rule, world.weights.draft, request)
    parts.append(out.tokens_BL[:, len(PROMPT) : len(PROMPT) + n])
    assert (out.lengths_B == len(PROMPT) + n).all()
    calls.append(out.info.calls_B)
  if drafter.gamma < n:
    assert np.concatenate(calls).min() >= n // (drafter.gamma + 1)
  return np.concatenate(parts)


WORLD = base.tables(V)
DRAFT = lm_drafter.make(WORLD.draft, gamma=K)
SETTINGS = (('temperature', 0.9), ('top_p', 0.95))


def check_joint(rule, drafter):
  tokens = drawn(rule, drafter, WORLD, 2**16, SETTINGS)
  n = tokens.shape[1]
  warped = table_model.warped(WORLD.weights.target, **dict(SETTINGS))
  p = table_model.joint_distribution(warped, PROMPT, n)
  flat = np.ravel_multi_index(tokens.T, p.shape)
  counts = np.bincount(flat, minlength=p.size)
  assert counted.chi_square(counts, p) > 1e-9


@pytest.mark.parametrize(
  'rule', [reject.RULE, coupled.RULE], ids=lambda r: r[0]
)
def test_joint_law_of_generate(rule):
  check_joint(rule, DRAFT)


def test_joint_law_of_plain_decoding():
  check_joint(reject.RULE, decode.PLAIN)


def test_neighbouring_requests_are_independent():
  tokens = drawn(reject.RULE, DRAFT, WORLD, 2**16, SETTINGS)
  one, two = (tokens[i::2, :3] @ [9, 3, 1] for i in (0, 1))
  both = np.zeros((27, 27))
  np.add.at(both, (one, two), 1)
  marginal = (both.sum(0) + both.sum(1)) / both.sum() / 2
  assert counted.chi_square(both, np.outer(marginal, marginal)) > 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
  'rule', [reject.RULE, block.RULE, coupled.RULE], ids=lambda r: r[0]
)
def test_tokens_and_pairs_of_a_larger_vocabulary(rule):
  """Peaked rows that depend on the last token only, gamma 4, many texts."""
  size, gamma, n = 16, 4, 10
  model = table_model.make(size)
  weights = [table_model.table(i, size, hashes=1, scale=2) for i in (3, 4)]
  world = base.World(model, model, types.Weights(*weights), size)
  drafter = lm_drafter.make(model, gamma=gamma)
  tokens = drawn(rule, drafter, world, 2**20, (('temperature', 1.0),), n)
  (p_VV,) = table_model.warped(weights[0], temperature=1.0)
  p_V = p_VV[PROMPT[-1]]
  for k in range(n - 1):
    pair_VV = p_V[:, None] * p_VV
    counts = np.zeros((size, size))
    np.add.at(counts, (tokens[:, k], tokens[:, k + 1]), 1)
    assert counted.chi_square(counts, pair_VV) > 1e-9, k
    p_V = pair_VV.sum(0)


def test_chi_square_sees_a_bias():
  rng = np.random.default_rng(0)
  law = rng.dirichlet(np.ones(200))
  counts = rng.multinomial(2**16, law)
  other = law * (1 + 0.1 * rng.choice([-1, 1], 200))
  assert counted.chi_square(counts, law) > 1e-3
  assert counted.chi_square(counts, other / other.sum()) < 1e-9
