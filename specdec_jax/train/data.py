"""Batches of aligned arrays: shuffled, shared by processes, resumed exactly.

Knows no text and no model: rows of arrays in, dicts of rows out.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np


class Batches(Iterator[dict[str, np.ndarray]]):
  """The endless batches that `batches` makes.

  state() is JSON; after restore(state) the same batches follow, byte for byte.
  It says how many global batches were taken, so another number of processes may
  go on from it.
  """

  def __init__(self, iterator: grain.DatasetIterator, about: dict[str, Any]):
    self._iterator, self._about = iterator, about

  def __next__(self) -> dict[str, np.ndarray]:
    return next(self._iterator)

  def state(self) -> dict[str, Any]:
    taken = grain.experimental.get_next_index(self._iterator)
    return {**self._about, 'taken': taken}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on where state() was asked for.

    Raises:
      ValueError: no such state, or one of another data set, batch or seed.
    """
    names = [*self._about, 'taken']
    if sorted(state) != sorted(names):
      raise ValueError(
        f'state with {", ".join(map(str, state)) or "nothing"}: a state of '
        f'batches has {", ".join(names)}; give one that state() returned'
      )
    for name, mine in self._about.items():
      if state[name] != mine:
        raise ValueError(
          f'state of {name} {state[name]}, but these batches have {name} '
          f'{mine}: resume with the same data, batch and seed, or start anew'
        )
    taken = state['taken']
    if type(taken) is not int or not 0 <= taken < _ENDLESS:
      raise ValueError(
        f'state with taken {taken!r}: it must be an integer from 0 on; give '
        'one that state() returned'
      )
    grain.experimental.set_next_index(self._iterator, taken)


def batches(
  arrays: Mapping[str, np.ndarray],
  *,
  batch: int,
  seed: int,
  process: tuple[int, int] = (0, 1),
) -> Batches:
  """Endless batches of the rows of arrays that share their leading axis.

  Each epoch has every row once, in an order of its own; the rows that do not
  fill its last batch are left out. `batch` counts the rows of all processes:
  process (i, count) gets the i-th of count equal parts of each batch, so the
  parts in order are what a single process gets. Arrays may be np.memmap: only
  the rows asked for are read, in a thread, two batches ahead.

  Example: 5 rows in the order 3 0 4 1 2, batch 4, process (1, 2): rows 4 1.

  Raises:
    ValueError: no arrays, or of different lengths; fewer rows than a batch; a
      batch that the processes cannot share; a seed below 0.
  """
  rows = _shared_rows(arrays)
  index, count = process
  if not 0 <= index < count:
    raise ValueError(
      f'process={process}: the first counts from 0 to one less than the second'
    )
  if batch < 1 or batch % count:
    raise ValueError(
      f'batch={batch} for {count} processes: it must be a positive multiple of '
      f'their number'
    )
  if rows < batch:
    raise ValueError(
      f'{rows} rows are fewer than batch={batch}: use a smaller batch or more '
      'data'
    )
  if seed < 0:
    raise ValueError(f'seed={seed}: it must be 0 or more')
  about = dict(seed=seed, batch=batch, rows=rows, data=_fingerprint(arrays))
  part = slice(index * batch // count, (index + 1) * batch // count)
  take = _Take(arrays, rows, batch, seed, part)
  # One thread: _Take keeps the order of one epoch. Reading ahead does not move
  # the index of the next batch that is handed out.
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
  steps = grain.MapDataset.range(_ENDLESS).map(take)
  return Batches(iter(steps.to_iter_dataset(options)), about)


_ENDLESS = 1 << 62


class _Take:
  """The number of a batch -> this process's part of it."""

  def __init__(self, arrays, rows: int, batch: int, seed: int, part: slice):
    self._arrays, self._part = dict(arrays), part
    self._rows, self._batch, self._seed = rows, batch, seed
    self._epoch, self._order = -1, np.zeros(0, np.int64)

  def __call__(self, number: int) -> dict[str, np.ndarray]:
    epoch, step = divmod(number, self._rows // self._batch)
    if epoch != self._epoch:
      self._order = order_of_epoch(self._rows, seed=self._seed, epoch=epoch)
      self._epoch = epoch
    taken = self._order[step * self._batch :][: self._batch][self._part]
    return {name: a[taken] for name, a in self._arrays.items()}


def order_of_epoch(rows: int, *, seed: int, epoch: int) -> np.ndarray:
  """A random permutation of range(rows), the same on every machine.

  Not grain's shuffle: with 4**k + 1 rows, k >= 8, 0.2.18 gives one row twice
  and the last never; its epoch e of seed s is epoch e - 1 of seed s + 1; and
  it takes 65,536 / rows steps for each row of a small set. Nor numpy's
  Generator.permutation, which may change between versions; Philox may not.
  """
  key = np.random.SeedSequence(seed, spawn_key=(epoch,))
  return np.argsort(np.random.Philox(key).random_raw(rows), kind='stable')


def _shared_rows(arrays: Mapping[str, np.ndarray]) -> int:
  shapes = {name: np.shape(a) for name, a in arrays.items()}
  if not shapes or () in shapes.values():
    raise ValueError(
      f'arrays of shapes {shapes}: give at least one, each with rows first'
    )
  lengths = {name: shape[0] for name, shape in shapes.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(
      f'arrays have different numbers of rows, {lengths}: row i of each must '
      'belong to the same text'
    )
  return next(iter(lengths.values()))


def _fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
  """Of names, dtypes, shapes and 64 of the rows: a whole memmap takes long."""
  out = hashlib.sha256()
  for name in sorted(arrays):
    a = arrays[name]
    sample = a[:: math.ceil(len(a) / 64)]
    out.update(f'{name} {a.dtype.name} {a.shape}\n'.encode())
    out.update(np.ascontiguousarray(sample).tobytes())
  return out.hexdigest()[:16]
