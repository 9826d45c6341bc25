"""Mixed rows, and completions that are kept for resuming."""

from types import SimpleNamespace

import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.distill import completions
from specdec_jax.train import data


def test_a_coin_takes_whole_rows_of_one_or_the_other():
  one = {'tokens': np.zeros((400, 3)), 'counted': np.zeros((400, 3), bool)}
  one['source_length'] = np.zeros(400)
  other = {name: x + 1 for name, x in one.items()}
  rows = completions.mixed(one, other, 5)
  first = rows['tokens'][:, 0]
  assert (rows['tokens'] == first[:, None]).all()
  assert (rows['counted'] == (first[:, None] == 1)).all()
  np.testing.assert_array_equal(rows['source_length'], first)
  assert 150 < first.sum() < 250
  again = completions.mixed(one, other, 5)
  np.testing.assert_array_equal(rows['tokens'], again['tokens'])
  # At another step other rows.
  later = completions.mixed(one, other, 6)['tokens'][:, 0]
  assert 150 < (later != first).sum() < 250


def test_a_row_whose_logits_broke_has_no_answer():
  tokens_BL = np.array([[1, 2, 3, 4], [5, 6, 7, 0]], np.int32)
  info = types.empty_info(2, 4, 0, 0)
  info = info._replace(broken_B=np.array([False, True]))
  state = decode.State(tokens_BL, np.array([4, 3]), np.zeros(2, bool), (), ())
  request = SimpleNamespace(lengths_B=np.array([2, 1]))
  read = completions._reader((), None)
  found = read.__wrapped__(None, request, state, info, np.array([1, 0]))
  assert found['spans'].tolist() == [[1, 1], [2, 4]]
  assert found['tokens'].tolist() == tokens_BL[::-1].tolist()


def on_policy(folder, sampled: list[int], every: int = 3):
  def sample(step, params):
    sampled.append(step)
    return {'tokens': np.full((4, 2), params) + np.arange(4)[:, None]}

  return completions.OnPolicy(
    folder,
    sample,
    every,
    lambda rows, step: data.Batches(rows, batch=2, seed=step),
  )


def read(batches, steps, seen):
  for step in steps:
    batches.refresh(step, 100 * step)
    seen.append((step, next(batches)['tokens'].tolist()))
  return batches


@pytest.mark.parametrize('stop', range(1, 8))
def test_resumes_with_the_completions_that_were_kept(tmp_path, stop):
  whole, sampled = [], []
  read(on_policy(tmp_path / 'whole', sampled), range(8), whole)
  assert sampled == [0, 3, 6]
  parts, sampled = [], []
  state = read(on_policy(tmp_path / 'cut', sampled), range(stop), parts).state()
  resumed = on_policy(tmp_path / 'cut', sampled)
  resumed.restore(state)
  read(resumed, range(stop, 8), parts)
  assert parts == whole
  assert sampled == [0, 3, 6]
