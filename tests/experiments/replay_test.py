"""Laws from a text against the rules themselves, enumerated, and by hand."""

import itertools

import numpy as np
import pytest

from experiments import replay
from specdec_jax.certify import enumerate_window, problems
from specdec_jax.verify import block, reject

V, K = 3, 3
RULES = {rule.name: rule for rule in (reject.RULE, block.RULE)}


def tables(seed):
  """(p_NVV, q_KVV) by offset and last token; some q are 0 where p is not."""
  rng = np.random.default_rng(seed)
  p_NVV = enumerate_window.normal(rng.random((K + 1, V, V)) ** 2 + 1e-3)
  q_KVV = rng.random((K, V, V)) ** 2
  q_KVV *= rng.random(q_KVV.shape) < 0.7
  q_KVV[..., 0] += 1e-3
  return p_NVV, enumerate_window.normal(q_KVV)


def every_text(p_NVV, q_KVV):
  """(tokens_BN, chance_B under p, ratio_BK) of all texts of N tokens."""
  tokens_BN = np.array(list(itertools.product(range(V), repeat=K + 1)))
  before_BN = np.pad(tokens_BN, ((0, 0), (1, 0)))[:, :-1]
  at_1N = np.arange(K + 1)[None]
  p_BN = p_NVV[at_1N, before_BN, tokens_BN]
  q_BK = q_KVV[at_1N[:, :K], before_BN[:, :K], tokens_BN[:, :K]]
  return tokens_BN, p_BN.prod(1), q_BK / p_BN[:, :K]


@pytest.mark.parametrize('name', RULES)
def test_equals_the_rule_enumerated(name, x64):
  """P(m kept, and these m + 1 tokens emitted), by the production function."""
  p_NVV, q_KVV = tables(1)
  batch = problems.windows(p_NVV[None], q_KVV[None], 'distinct')
  joint = np.zeros((K + 1,) + (V,) * (K + 1))
  for end in enumerate_window.ends(RULES[name], batch):
    for row, m in enumerate(end.accepted_B):
      head = tuple(batch.draft.tokens_BK[row, :m].tolist())
      share_V = end.chance_B[row] * end.next_BV[row]
      joint[(m, *head)] += share_V.reshape((V,) + (1,) * (K - m))
  tokens_BN, chance_B, ratio_BK = every_text(p_NVV, q_KVV)
  # The first window of texts that go on for long enough.
  ratio_BT = np.pad(ratio_BK, ((0, 0), (0, 1)), constant_values=0.5)
  kept_BTN = replay.at_least(ratio_BT, replay.RULES[name], K)
  law_BN = replay.accepted(kept_BTN, K)[:, 0]
  for m in range(K + 1):
    expected = np.zeros((V,) * (K + 1))
    expected[tuple(tokens_BN.T)] = chance_B * law_BN[:, m]
    rest = tuple(range(m + 1, K + 1))
    # joint repeats itself along the tokens that were not emitted.
    expected = np.broadcast_to(
      expected.sum(rest, keepdims=True), joint[m].shape
    )
    np.testing.assert_allclose(joint[m], expected, atol=1e-12)


def cuts(ratio, gamma, name):
  """Windows of one text by accepted drafts: every walk, one by one."""
  kept_1TN = replay.at_least(ratio[None], replay.RULES[name], gamma)
  (law_TN,) = replay.accepted(kept_1TN, gamma)
  windows_N = np.zeros(gamma + 1)

  def go(start, chance):
    if start < len(ratio) and chance:
      for m, weight in enumerate(law_TN[start]):
        windows_N[m] += chance * weight
        go(start + m + 1, chance * weight)

  go(0, 1.0)
  return windows_N


@pytest.mark.parametrize('name', RULES)
def test_walk_equals_every_way_to_cut_a_text(name):
  rng = np.random.default_rng(2)
  ratios = [rng.lognormal(0, 1, n) for n in (7, 1, 4)]
  ratios[0][3] = 0
  found_BGN = replay.count(ratios, replay.RULES[name], 3)
  for b, ratio in enumerate(ratios):
    for gamma in range(4):
      found_N = found_BGN[b, gamma, : gamma + 1]
      np.testing.assert_allclose(found_N, cuts(ratio, gamma, name))


@pytest.mark.parametrize('name', RULES)
def test_by_hand(name):
  rule = replay.RULES[name]
  same, never = np.ones(10), np.zeros(10)
  found_BGN = replay.count([same, never], rule, 4)
  # Windows of gamma + 1 tokens; the end cuts the last one to two drafts.
  assert found_BGN[0].sum(-1).tolist() == [10, 5, 4, 3, 2]
  assert found_BGN[0, 3].tolist() == [0, 0, 1, 2, 0]
  assert (found_BGN[1].sum(-1) == 10).all()
  # The worked example of walk.
  half = replay.count([np.array([0.5, 0.3])], rule, 1)
  assert half.sum(-1).tolist() == [[2, 1.5]]
