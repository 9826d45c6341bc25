"""Shuffles rows of aligned arrays into batches, which resume exactly."""

import collections
import concurrent.futures
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from specdec_jax import hosts, sharding

_AHEAD = 2  # batches that are read before they are asked for


class Batches(Iterator[dict[str, np.ndarray]]):
  """Endless batches of rows from arrays with the same leading axis.

  Each epoch has every row once, in a new order, but for rows that do not fill
  the last batch. Arrays may be np.memmap: a thread that stays _AHEAD batches
  ahead reads a batch's rows alone.

  share: columns that the mean row needs, over all columns; 1.0 without `ends`.
  """

  def __init__(
    self,
    arrays: Mapping[str, np.ndarray],
    *,
    batch: int,
    seed: int,
    ends: Mapping[str, np.ndarray] | None = None,
  ):
    """Reads no batch yet; refuses fewer rows than a batch has.

    ends: by name, each row's columns before its padding [N]. Batches then have
      rows of like length, and as many quarters of these arrays' columns as the
      longest row needs: padding costs as much as text, and four widths are few
      programs to compile.
    """
    lengths, ends = {len(a) for a in arrays.values()}, ends or {}
    assert len(lengths) == 1, lengths
    (rows,) = lengths
    if rows < batch:
      raise ValueError(
        f'{rows} rows are fewer than a batch of {batch}: give more data, or a '
        'smaller text.rows (train.py) or batch.rows (distill.py)'
      )
    self._about: dict[str, Any] = dict(
      seed=seed, batch=batch, rows=rows, data=_fingerprint(arrays)
    )
    quarters_N, steps = np.full(rows, 4), rows // batch
    if ends:
      self._about['grouped'] = sorted(ends)
      # Of all arrays' columns, 1 to 4, that a row needs.
      each = [-(-4 * n // arrays[name].shape[1]) for name, n in ends.items()]
      quarters_N = np.clip(np.max(each, axis=0), 1, 4)
    self.share = float(np.mean(quarters_N)) / 4
    order = functools.lru_cache(1)(
      lambda epoch: _order((steps, batch), quarters_N, seed, epoch)
    )

    def take(number: int) -> dict[str, np.ndarray]:
      epoch, step = divmod(number, steps)
      chosen = order(epoch)[step]
      found = {name: a[chosen] for name, a in arrays.items()}
      for name in ends:
        width = quarters_N[chosen].max() * found[name].shape[1]
        found[name] = found[name][:, : -(-width // 4)]
      return found

    self._take, self._taken = take, 0
    self._thread = concurrent.futures.ThreadPoolExecutor(1, 'batches')
    self._ahead: collections.deque = collections.deque()

  def __next__(self) -> dict[str, np.ndarray]:
    while len(self._ahead) <= _AHEAD:
      number = self._taken + len(self._ahead)
      self._ahead.append(self._thread.submit(self._take, number))
    batch = self._ahead.popleft().result()
    self._taken += 1
    return batch

  def state(self) -> dict[str, Any]:
    """Returns as JSON how many batches were taken, and of which rows."""
    return {**self._about, 'taken': self._taken}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues where state() was taken; refuses other batches' state."""
    for name, mine in self._about.items():
      if state.get(name) != mine:
        raise ValueError(
          f'state of {name} {state.get(name)}, but these batches have {name} '
          f'{mine}: resume with the same data, batch and seed, or start anew'
        )
    self._taken = state['taken']
    self._ahead.clear()


def _order(
  shape: tuple[int, int], quarters_N: np.ndarray, seed: int, epoch: int
) -> np.ndarray:
  """Returns an epoch's batches, of rows of like length: [batches, rows]."""
  rows = order_of_epoch(len(quarters_N), seed=seed, epoch=epoch)
  rows = rows[: shape[0] * shape[1]]
  # Stable: among equal lengths the order stays random, and that of batches too.
  rows = rows[np.argsort(quarters_N[rows], kind='stable')].reshape(shape)
  if quarters_N.min() == quarters_N.max():
    return rows
  return rows[order_of_epoch(len(rows), seed=seed, epoch=epoch)]


def order_of_epoch(rows: int, *, seed: int, epoch: int) -> np.ndarray:
  """Draws a permutation of range(rows), the same on every machine, by Philox:
  numpy's Generator.permutation may change between versions."""
  key = np.random.SeedSequence(seed, spawn_key=(epoch,))
  return np.argsort(np.random.Philox(key).random_raw(rows), kind='stable')


def placer(
  layout: sharding.Layout | None,
) -> Callable[[dict[str, np.ndarray]], dict[str, Any]]:
  """Makes a function that splits a batch's rows over the mesh's data axis."""
  if layout is None:
    return lambda batch: batch
  rows = lambda x: layout.sharding('batch', *[None] * (x.ndim - 1))
  return lambda batch: {n: hosts.put(x, rows(x)) for n, x in batch.items()}


def check_rows(
  rows: Mapping[str, int], parts: int, by: str = 'mesh.data'
) -> None:
  """Raises ValueError unless `parts` divides every number in `rows`, by
  setting; by: the setting of parts."""
  for name, count in rows.items():
    if count % parts:
      raise ValueError(f'{name}={count}: {by}={parts} has to divide it')


def _fingerprint(arrays: Mapping[str, np.ndarray]) -> str:
  """Hashes names, dtypes, shapes and 64 rows; all of a memmap is slow."""
  out = hashlib.sha256()
  for name in sorted(arrays):
    a = arrays[name]
    sample = a[:: max(1, math.ceil(len(a) / 64))]
    out.update(f'{name} {a.dtype.name} {a.shape}\n'.encode())
    out.update(np.ascontiguousarray(sample).tobytes())
  return out.hexdigest()[:16]
