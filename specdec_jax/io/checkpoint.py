"""Checkpoints: written in the background, hashed, and checked before use.

    folder/40/arrays/        Orbax's files: the leaves of the tree, in order
    folder/40/manifest.json  step, best, facts, leaves, SHA-256 of each file
    folder/50.part/          a save or a removal, under way or interrupted

A folder gets its number by one rename after its manifest is written, and loses
it by one rename before it is removed: wherever the process is killed, what has
a number is whole. It knows neither models nor training; when to save, and what
SIGTERM means, is the training loop's.

Several processes need one file system and the same calls in the same order.
All of them write their shards; process 0 hashes and renames; errors are agreed
upon, so that all raise or none.
"""

import concurrent.futures
import contextlib
import json
import logging as python_logging
import operator
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from specdec_jax.io import manifest

ARRAYS = 'arrays'
NUMBER = re.compile('0|[1-9][0-9]*')
# What Orbax and tensorstore raise when they cannot write.
WRITE_ERRORS = (OSError, ValueError, RuntimeError)
Corrupt = manifest.Corrupt


class Unsaved(ValueError):
  """A step that could not be written; the steps before it are untouched."""


class Restored(NamedTuple):
  """facts: as JSON returns them: tuples as lists, keys as strings."""

  step: int
  arrays: Any
  facts: dict[str, Any]


class Checkpoints:
  """The steps in one folder: the newest `keep` and the newest marked best.

  Use it in a `with`, or close it: a save that is still being written finishes,
  and what went wrong with it is raised there.
  """

  def __init__(self, folder: str | os.PathLike, *, keep: int = 2):
    if keep < 1:
      raise ValueError(f'keep={keep}: keep at least 1 step')
    self.folder, self._keep = pathlib.Path(folder).absolute(), keep
    self._pool = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
    self._pending: concurrent.futures.Future | None = None
    self._refused: set[int] = set()  # by restore; may be saved again
    logging.get_absl_logger().addFilter(_without_orbax_threads)

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def steps(self) -> list[int]:
    """The complete steps, oldest first; what they hold is not checked."""
    if not self.folder.is_dir():
      return []
    names = [path.name for path in self.folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if NUMBER.fullmatch(name))

  def best(self) -> int | None:
    """The newest step that was saved as best and that restore can use."""
    for step in reversed(self.steps()):
      if step in self._refused:
        continue
      try:
        if manifest.read(self._path(step)).best:
          return step
      except Corrupt as error:
        logging.warning('%s; whether it is the best is not known', error)
    return None

  def save(
    self, step: int, arrays: Any, facts: dict[str, Any], *, best: bool = False
  ) -> None:
    """Returns once the arrays may be donated; the writing goes on behind.

    Args:
      step: larger than every step here, those refused by `restore` aside.
      arrays: a pytree of jax and numpy arrays.
      facts: what JSON can hold: config, metrics, the data iterator's state.
      best: keeps this step until a later one is marked best.

    Raises:
      ValueError: an argument that cannot be saved.
      Unsaved: this save or the one before it could not be written.
    """
    self.wait()
    step = operator.index(step)
    self._check_step(step)
    leaves = manifest.named(arrays)
    _check_leaves_can_be_saved(leaves)
    content = manifest.Manifest(
      step, best, _as_json(facts), manifest.kinds(leaves), files={}
    )
    self._refused.discard(step)
    error = None
    with contextlib.ExitStack() as stack:
      stack.enter_context(_unsaved_if_it_fails(self._part(step)))
      try:
        if jax.process_index() == 0:
          self._make_room(step)
      except OSError as e:
        error = e
      _agree(error, OSError('process 0 could not write'))
      stack.enter_context(_orbax())
      response = ocp.save_async(
        str(self._part(step) / ARRAYS), [x for x in leaves.values() if x.size]
      )
    self._pending = self._pool.submit(self._finish, content, response)

  def wait(self) -> None:
    """Until what was saved is complete.

    Raises:
      Unsaved: it could not be written.
    """
    if self._pending is None:
      return
    pending, self._pending = self._pending, None
    error = None
    try:
      pending.result()
    except Unsaved as e:
      error = e
    _agree(error, Unsaved(f'{self.folder}: another process could not save'))

  def close(self) -> None:
    """Waits, and raises what `wait` does."""
    try:
      self.wait()
    finally:
      self._pool.shutdown()

  def restore(self, like: Any, step: int | None = None) -> Restored | None:
    """The newest valid step, or the one given; None where there are none.

    An invalid newer step is passed over with a warning, and may then be saved
    again. A leaf without a sharding goes to the first device.

    Args:
      like: a pytree of jax.ShapeDtypeStruct, each with its sharding if any.

    Raises:
      Corrupt: the step given is not valid, or none is.
      Unsaved: the save before this could not be written.
    """
    self.wait()
    if step is not None:
      return self._restore(step, like)
    first = None
    for step in reversed(self.steps()):
      try:
        restored = self._restore(step, like)
      except Corrupt as error:
        logging.warning('step %d is NOT restored: %s', step, error)
        self._refused.add(step)
        first = first or error
        continue
      if first:
        logging.warning('falling back to step %d of %s', step, self.folder)
      return restored
    if first is None:
      return None
    wrong = f'{first.wrong}; no valid step is left in {self.folder}'
    raise type(first)(first.path, wrong) from first

  def _path(self, step: int) -> pathlib.Path:
    return self.folder / str(step)

  def _part(self, step: int) -> pathlib.Path:
    return self.folder / f'{step}.part'

  def _check_step(self, step: int) -> None:
    if step < 0:
      raise ValueError(f'step={step}: steps start at 0')
    newer = [s for s in self.steps() if s >= step and s not in self._refused]
    if newer:
      raise ValueError(
        f'step={step}: {self.folder} has step {newer[-1]}, which would be '
        'restored instead of it; go on from there or give another folder'
      )

  def _make_room(self, step: int) -> None:
    """Removes what was interrupted, and the invalid step that this replaces."""
    self.folder.mkdir(parents=True, exist_ok=True)
    for path in self.folder.glob('*.part'):
      if NUMBER.fullmatch(path.stem):
        shutil.rmtree(path)
    if self._path(step).exists():
      self._remove(step)
    self._part(step).mkdir()

  def _remove(self, step: int) -> None:
    os.rename(self._path(step), self._part(step))
    shutil.rmtree(self._part(step))

  def _finish(
    self, content: manifest.Manifest, response: ocp.AsyncResponse
  ) -> None:
    part = self._part(content.step)
    with _unsaved_if_it_fails(part):
      response.result()
      if jax.process_index() != 0:
        return
      manifest.write(part, content)
      os.rename(part, self._path(content.step))
    try:
      self._remove_old()
    except OSError as error:
      logging.warning('%s: old steps cannot be removed: %s', self.folder, error)

  def _remove_old(self) -> None:
    steps = self.steps()
    newest = [s for s in steps if s not in self._refused][-self._keep :]
    best = self.best()
    for step in steps:
      # An invalid step ahead of this one stays until its turn comes again.
      if step < newest[-1] and step not in newest and step != best:
        self._remove(step)

  def _restore(self, step: int, like: Any) -> Restored:
    wanted, folder = manifest.named(like), self._path(step)
    error = content = None
    try:
      content = manifest.read(folder)
      manifest.check_leaves(folder, content, wanted)
      manifest.check_files(folder, content)
    except Corrupt as e:
      error = e
    _agree(error, Corrupt(folder, 'not valid in another process'))
    assert content is not None
    # In the order in which they were saved; those without elements were not.
    asked = {name: _with_sharding(wanted[name]) for name in content.leaves}
    with _orbax():
      full = [x for x in asked.values() if x.size]
      found = iter(ocp.load(str(folder / ARRAYS), full))
      empty = lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding)
      arrays = {
        k: next(found) if x.size else empty(x) for k, x in asked.items()
      }
    leaves = [arrays[name] for name in wanted]
    tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return Restored(step, tree, content.facts)


@contextlib.contextmanager
def _orbax():
  context = ocp.Context()
  # Otherwise an array that Orbax refuses leaves threads that wait 5 minutes.
  context.asynchronous.create_directories_asynchronously = False
  with context, jax.transfer_guard('allow'):
    yield


def _without_orbax_threads(record: python_logging.LogRecord) -> bool:
  """Its threads print a stack each of what `result` raises again."""
  return not record.pathname.endswith('orbax/checkpoint/_src/futures/future.py')


def _agree(error: Exception | None, elsewhere: Exception) -> None:
  """Raises in every process if there is an error in one of them."""
  if jax.process_count() > 1:
    failed = multihost_utils.process_allgather(np.int32(error is not None))
    error = error or (elsewhere if np.any(failed) else None)
  if error is not None:
    raise error


@contextlib.contextmanager
def _unsaved_if_it_fails(part: pathlib.Path):
  """Turns what writing raises into one sentence, and gives the space back."""
  try:
    yield
  except WRITE_ERRORS as e:
    if jax.process_index() == 0:
      shutil.rmtree(part, ignore_errors=True)
    reason, advice = ' '.join(str(e).split())[:300], 'give another folder'
    if 'No space left' in reason or 'quota' in reason:
      reason, advice = 'the disk is full', 'free space there or ' + advice
    raise Unsaved(
      f'{part.parent}: step {part.stem} could not be saved: {reason}; '
      f'{advice}, earlier steps are untouched'
    ) from e


def _check_leaves_can_be_saved(leaves: dict[str, Any]) -> None:
  for name, leaf in leaves.items():
    if not isinstance(leaf, jax.Array | np.ndarray):
      raise ValueError(
        f'leaf {name} is {type(leaf).__name__}, not an array: put it into facts'
      )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
      raise ValueError(
        f'leaf {name} is {leaf.dtype}: save jax.random.key_data of it'
      )
  if not any(leaf.size for leaf in leaves.values()):
    raise ValueError('arrays: nothing to save; give at least one array')


def _as_json(facts: dict[str, Any]) -> dict[str, Any]:
  """A copy, so that the caller may go on changing it."""
  try:
    return json.loads(json.dumps(facts))
  except (TypeError, ValueError, RecursionError) as e:
    raise ValueError(f'facts: not JSON: {e}') from e


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
  # Never the sharding that was saved: its devices may not be here.
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  sharding = getattr(leaf, 'sharding', None) or first
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
