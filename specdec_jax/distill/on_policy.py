"""What a student reads: fixed text, its teacher's answers, or its own."""

import io
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from specdec_jax import types
from specdec_jax.io import files
from specdec_jax.train import data, logs


def rows_of(tokens: np.ndarray, spans: np.ndarray) -> dict[str, np.ndarray]:
  """[n, L] prompts with what follows them, which alone counts.

  spans: [n, 2], the prompt's and the whole length.
  """
  index_1L = np.arange(tokens.shape[1])[None]
  start, end = spans[:, :1], spans[:, 1:]
  counted = (index_1L >= start) & (index_1L < end)
  return {'tokens': np.where(index_1L < end, tokens, 0), 'counted': counted}


def mixed(one: dict[str, np.ndarray], other: dict[str, np.ndarray], seed: int):
  """Each row from the one or the other by the toss of a coin."""
  coin = np.random.default_rng(seed).random(len(one['tokens'])) < 0.5
  pick = lambda a, b: np.where(coin[:, None], a, b)
  return {name: pick(one[name], other[name]) for name in one}


class OnPolicy:
  """Batches of what the student itself says, said anew every `every` steps.

  say(step, params) -> rows. What was said is kept in the folder: a run that
  goes on reads what it had read. batches(rows, step) -> their batches.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    say: Callable[[int, types.Params], dict[str, np.ndarray]],
    every: int,
    batches: Callable[[dict[str, np.ndarray], int], data.Batches],
  ):
    self._folder, self._say, self._every = folder, say, every
    self._make, self._made, self._batches = batches, -1, None

  def refresh(self, step: int, params: types.Params) -> None:
    if step % self._every == 0 and step != self._made:
      rows = self._say(step, params)
      with logs.writing(self._folder):
        self._folder.mkdir(parents=True, exist_ok=True)
        _write(self._folder / f'{step}.npz', rows)
      self._open(step)

  def __iter__(self):
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    assert self._batches is not None, 'refresh comes first'
    return next(self._batches)

  def state(self) -> dict[str, Any]:
    assert self._batches is not None, 'refresh comes first'
    return {'made': self._made, 'batches': self._batches.state()}

  def restore(self, state: dict[str, Any]) -> None:
    self._open(state['made'])
    assert self._batches is not None
    self._batches.restore(state['batches'])

  def _open(self, step: int) -> None:
    path = self._folder / f'{step}.npz'
    self._batches, self._made = self._make(_read(path), step), step


def _write(path: pathlib.Path, rows: dict[str, np.ndarray]) -> None:
  content = io.BytesIO()
  np.savez(content, allow_pickle=False, **rows)
  files.write(path, content.getvalue())


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
  try:
    with np.load(path, allow_pickle=False) as found:
      return dict(found)
  except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(
      f'{path}: what the student said before cannot be read ({error}); remove '
      'the checkpoints from there on, or take another workdir'
    ) from error
