"""Batches: each row once an epoch, resumed exactly."""

import itertools
import json

import numpy as np
import pytest

from specdec_jax.train import data

ROWS = 11


def arrays(rows=ROWS):
  """Row i holds i in each array, so that a mixed-up row shows."""
  row = np.arange(rows)
  return {
    'tokens': (row[:, None] * 10 + np.arange(3)).astype(np.int32),
    'hidden': (row[:, None, None] + np.zeros((2, 2))).astype(np.float16),
    'weight': row.astype(np.float32),
  }


def make(rows=ROWS, batch=4, seed=5):
  return data.Batches(arrays(rows), batch=batch, seed=seed)


def content(batch):
  return {k: (a.dtype, a.shape, a.tobytes()) for k, a in batch.items()}


def take(batches, count):
  return [content(b) for b in itertools.islice(batches, count)]


def rows_of(batches, count):
  return [next(batches)['weight'].astype(int).tolist() for _ in range(count)]


def test_rows_of_a_batch_stay_together(tmp_path):
  """Of arrays in memory and on disk."""
  np.save(tmp_path / 'tokens.npy', arrays()['tokens'])
  mapped = np.load(tmp_path / 'tokens.npy', mmap_mode='r')
  batches = data.Batches(arrays() | {'tokens': mapped}, batch=4, seed=5)
  for batch in itertools.islice(batches, 6):
    row = batch['weight'].astype(int)
    expected = {k: a[row] for k, a in arrays().items()}
    assert content(batch) == content(expected)
    assert type(batch['tokens']) is np.ndarray


@pytest.mark.parametrize('rows', [12, 11])
def test_an_epoch_has_a_row_at_most_once_in_an_order_of_its_own(rows):
  """Of 11 rows, those that fill no batch are left out of an epoch only."""
  batches = make(rows)
  epochs = [sum(rows_of(batches, rows // 4), []) for _ in range(9)]
  assert all(len(set(epoch)) == rows // 4 * 4 for epoch in epochs)
  assert set().union(*epochs) == set(range(rows))
  assert len(set(map(tuple, epochs))) == 9


@pytest.mark.parametrize('taken', range(6))
def test_resumed_batches_are_the_same_bytes(taken):
  """Two batches an epoch: on both sides of three epochs' ends."""
  batches = make()
  take(batches, taken)
  state = json.loads(json.dumps(batches.state()))
  expected, resumed = take(batches, 5), make()
  take(resumed, 3)
  for again in (resumed, batches):
    again.restore(state)
    assert again.state() == state
    assert take(again, 5) == expected
    assert again.state()['taken'] == taken + 5


def test_orders_are_permutations_and_the_same_everywhere():
  order = lambda seed, epoch: data.order_of_epoch(8, seed=seed, epoch=epoch)
  assert order(0, 0).tolist() == [1, 4, 5, 6, 2, 0, 3, 7]
  assert order(1, 0).tolist() == [0, 5, 7, 4, 2, 6, 3, 1]
  # Seeds are no shifts of one another.
  assert not np.array_equal(order(0, 1), order(1, 0))
  for rows in (1, 2, 7, 65_537):
    order = data.order_of_epoch(rows, seed=2, epoch=1)
    assert np.array_equal(np.sort(order), np.arange(rows))


def test_refusals():
  why = '11 rows are fewer than a batch of 12.*text.rows'
  with pytest.raises(ValueError, match=why):
    make(batch=12)
  changed = arrays()
  changed['hidden'] = changed['hidden'] + np.float16(1)  # of the same size
  for other, name in (
    (make(seed=6), 'seed'),
    (make(batch=2), 'batch'),
    (make(rows=12), 'rows'),
    (data.Batches(changed, batch=4, seed=5), 'data'),
  ):
    with pytest.raises(ValueError, match=f'but these batches have {name} '):
      make().restore(other.state())


def grouped(batch=4):
  """Rows of 8 and of 4 columns; row i of 'a' ends after i % 8 + 1 columns."""
  row = np.arange(50)
  a = {'a': row[:, None] + np.zeros(8, int), 'b': row[:, None] + np.zeros(4)}
  ends = {'a': row % 8 + 1, 'b': np.where(row == 7, 4, 1)}
  return data.Batches(a | {'i': row}, batch=batch, seed=5, ends=ends), ends


def test_batches_of_like_length_have_no_more_columns_than_they_need():
  batches, ends = grouped()
  needs = np.maximum((ends['a'] + 1) // 2, ends['b'])
  assert batches.share == pytest.approx(needs.mean() / 4)
  assert make().share == 1.0
  epochs, widths = [], set()
  for _ in range(3):
    epoch = []
    for batch in itertools.islice(batches, 12):
      i = batch['i']
      epoch += i.tolist()
      needed = max((ends['a'][i].max() + 1) // 2, ends['b'][i].max())
      assert batch['a'].shape == (4, 2 * needed)
      assert batch['b'].shape == (4, needed)
      assert (batch['a'] == i[:, None]).all()
      widths.add(needed)
    assert len(set(epoch)) == 48
    epochs.append(tuple(epoch))
  assert widths == {1, 2, 3, 4} and len(set(epochs)) == 3
  # Few batches mix lengths: at most one at each of the three borders.
  lengths = (ends['a'][np.reshape(epochs[0], (12, 4))] + 1) // 2
  assert sum(len(set(x)) > 1 for x in lengths) <= 4  # row 7's too
  longest = [x.max() for x in lengths]
  assert longest != sorted(longest)


def test_grouped_batches_resume_and_know_others():
  batches, _ = grouped()
  for _ in range(5):
    next(batches)
  state = json.loads(json.dumps(batches.state()))
  expected = take(batches, 15)
  again, _ = grouped()
  again.restore(state)
  assert take(again, 15) == expected
  del state['grouped']  # as of a run whose batches were not grouped
  with pytest.raises(ValueError, match='state of grouped None'):
    again.restore(state)
