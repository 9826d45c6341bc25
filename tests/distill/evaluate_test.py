"""The target as its own draft is judged perfect; another one is not."""

import numpy as np
import pytest

from specdec_jax import build, requests
from specdec_jax.distill import evaluate, sections
from specdec_jax.drafters import lm as lm_drafter


def figures(draft_source: str, temperature: float, gamma: int = 2):
  target, draft = build.load('random:tiny'), build.load(draft_source)
  q = draft.draft_model(target)
  judge = sections.Judge(gamma, 12, temperature)
  items = requests.items([[1, 2, 3], [7] * 9])
  drafter = lambda gamma: lm_drafter.make(q, gamma=gamma)
  return evaluate.make(judge, target, drafter, q, items, 0)(draft.params)


@pytest.mark.more
def test_the_target_itself_is_a_perfect_draft():
  found = figures('random:tiny', 1.0)
  np.testing.assert_allclose(found['alpha'], 1, 1e-5)
  assert found['alpha_at'] == [1, 1]
  assert found['block_efficiency'] == 3
  assert abs(found['gap']) < 1e-4


@pytest.mark.more
def test_alpha_is_of_what_is_emitted_alone(monkeypatch):
  """Neither of a prompt, nor of the columns behind an end."""

  def overlap(weights, request, *args, **named):
    index_BL = np.indices(request.tokens_BL.shape)[1]
    inside_BL = index_BL >= np.asarray(request.lengths_B)[:, None]
    inside_BL &= index_BL < np.asarray(request.limit_B)[:, None]
    assert not inside_BL.all(1).any()
    return np.where(inside_BL, 0.5, 9.0), None

  monkeypatch.setattr(evaluate.predict, 'overlap', overlap)
  assert figures('random:tiny', 1.0)['alpha'] == 0.5


@pytest.mark.more
def test_the_gap_is_between_alpha_alone_and_decoding():
  found = figures('random:tiny:1', 1.0)
  alpha = found['alpha']
  assert 0 < alpha < 1
  expected = 1 + alpha + alpha**2
  np.testing.assert_allclose(
    found['gap'], expected - found['block_efficiency'], 1e-9
  )
