"""Shuffled batches of rows of aligned arrays, which can be resumed exactly."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import numpy as np

from specdec_jax import sharding

_ENDLESS = 1 << 62


class Batches(Iterator[dict[str, np.ndarray]]):
  """An endless iterator over batches; made by `batches`.

  state() is JSON; after restore(state) the same batches follow, bit for bit.
  """

  def __init__(self, iterator: grain.DatasetIterator, about: dict[str, Any]):
    self._iterator, self._about = iterator, about

  def __next__(self) -> dict[str, np.ndarray]:
    return next(self._iterator)

  def state(self) -> dict[str, Any]:
    taken = grain.experimental.get_next_index(self._iterator)
    return {**self._about, 'taken': taken}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues where state() was taken.

    Raises:
      ValueError: a state of another data set, batch or seed.
    """
    for name, mine in self._about.items():
      if state[name] != mine:
        raise ValueError(
          f'state of {name} {state[name]}, but these batches have {name} '
          f'{mine}: resume with the same data, batch and seed, or start anew'
        )
    grain.experimental.set_next_index(self._iterator, state['taken'])


def batches(
  arrays: Mapping[str, np.ndarray], *, batch: int, seed: int
) -> Batches:
  """Endless batches of rows of arrays with the same leading axis.

  Each epoch has every row once, in a new order; rows that do not fill the last
  batch are left out. Arrays may be np.memmap: only the rows of a batch are
  read, in a thread, two batches ahead.

  Args:
    arrays: by name; row i of each belongs to the same text.
    batch: rows in a batch, 1 or more.
    seed: of the order, 0 or more.

  Raises:
    ValueError: arrays of different lengths; fewer rows than a batch.
  """
  lengths = {name: len(a) for name, a in arrays.items()}
  if len(set(lengths.values())) != 1:
    raise ValueError(
      f'arrays have different numbers of rows, {lengths}: row i of each must '
      'belong to the same text'
    )
  rows = next(iter(lengths.values()))
  if rows < batch:
    raise ValueError(
      f'{rows} rows are fewer than batch={batch}: use a smaller batch or more '
      'data'
    )
  about = dict(seed=seed, batch=batch, rows=rows, data=_fingerprint(arrays))
  order = functools.lru_cache(1)(
    lambda epoch: order_of_epoch(rows, seed=seed, epoch=epoch)
  )

  def take(number: int) -> dict[str, np.ndarray]:
    epoch, step = divmod(number, rows // batch)
    chosen = order(epoch)[step * batch :][:batch]
    return {name: a[chosen] for name, a in arrays.items()}

  # state() counts batches that were returned, not those read ahead.
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
  steps = grain.MapDataset.range(_ENDLESS).map(take)
  return Batches(iter(steps.to_iter_dataset(options)), about)


def order_of_epoch(rows: int, *, seed: int, epoch: int) -> np.ndarray:
  """A random permutation of range(rows), the same on every machine.

  Not grain's shuffle: with 4**k + 1 rows, k >= 8, version 0.2.18 gives one row
  twice and the last never; its epoch e of seed s is epoch e - 1 of seed s + 1;
  and a small set costs 65,536 / rows steps for each row. Nor numpy's
  Generator.permutation, which may change between versions; Philox may not.
  """
  key = np.random.SeedSequence(seed, spawn_key=(epoch,))
  return np.argsort(np.random.Philox(key).random_raw(rows), kind='stable')


def placer(
  layout: sharding.Layout | None,
) -> Callable[[dict[str, np.ndarray]], dict[str, Any]]:
  """A function that splits the rows of a batch over the mesh's data axis."""
  if layout is None:
    return lambda batch: batch
  rows = lambda x: layout.sharding('batch', *[None] * (x.ndim - 1))
  return lambda batch: {n: sharding.put(x, rows(x)) for n, x in batch.items()}


def check_rows(rows: Mapping[str, int], parts: int) -> None:
  """Raises ValueError unless `parts` divides every number of rows.

  rows: by the name of the setting, for the message.
  """
  for name, count in rows.items():
    if count % parts:
      raise ValueError(f'{name}={count}: mesh.data={parts} has to divide it')


def _fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
  """SHA-256 of names, dtypes, shapes and 64 rows; all of a memmap is slow."""
  out = hashlib.sha256()
  for name in sorted(arrays):
    a = arrays[name]
    sample = a[:: max(1, math.ceil(len(a) / 64))]
    out.update(f'{name} {a.dtype.name} {a.shape}\n'.encode())
    out.update(np.ascontiguousarray(sample).tobytes())
  return out.hexdigest()[:16]
