"""On-policy batches: completions that the student samples during training."""

import io
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from specdec_jax import hosts, types
from specdec_jax.io import files
from specdec_jax.train import data, logs


def mixed(one: dict[str, np.ndarray], other: dict[str, np.ndarray], seed: int):
  """Takes each row from one of both, with probability 1/2."""
  coin = np.random.default_rng(seed).random(len(one['tokens'])) < 0.5
  pick = lambda a, b: np.where(coin.reshape(-1, *[1] * (a.ndim - 1)), a, b)
  return {name: pick(one[name], other[name]) for name in one}


class OnPolicy:
  """Batches of rows that are sampled anew every `every` steps.

  The rows are saved in a folder, so that a resumed run reads the same ones.

  Args:
    folder: for the rows, one file for each sampling.
    sample: (step, params) -> rows, arrays that share their leading axis.
    every: steps from one sampling to the next.
    batches: (rows, step) -> their batches.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    sample: Callable[[int, types.Params], dict[str, np.ndarray]],
    every: int,
    batches: Callable[[dict[str, np.ndarray], int], data.Batches],
  ):
    self._folder, self._sample, self._every = folder, sample, every
    self._make, self._sampled_at, self._batches = batches, -1, None

  def refresh(self, step: int, params: types.Params) -> None:
    """Samples new rows if they are due at this step."""
    if step % self._every == 0 and step != self._sampled_at:
      rows = self._sample(step, params)
      hosts.from_first(lambda: self._save(step, rows))
      self._open(step)

  def _save(self, step: int, rows: dict[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **rows)
    with logs.writing(self._folder):
      self._folder.mkdir(parents=True, exist_ok=True)
      files.write(self._folder / f'{step}.npz', content.getvalue())

  def __next__(self) -> dict[str, np.ndarray]:
    assert self._batches is not None, 'refresh comes first'
    return next(self._batches)

  def state(self) -> dict[str, Any]:
    """The position in the batches for restore, as JSON."""
    assert self._batches is not None, 'refresh comes first'
    return {'made': self._sampled_at, 'batches': self._batches.state()}

  def restore(self, state: dict[str, Any]) -> None:
    self._open(state['made']).restore(state['batches'])

  def _open(self, step: int) -> data.Batches:
    path = self._folder / f'{step}.npz'
    try:
      with np.load(path, allow_pickle=False) as found:
        rows = dict(found)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
      raise ValueError(
        f'{path}: the completions of the student cannot be read ({error}); '
        'remove the checkpoints from there on, or take another workdir'
      ) from error
    self._batches, self._sampled_at = self._make(rows, step), step
    return self._batches
