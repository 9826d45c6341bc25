"""Checkpoints: written in the background, hashed, and checked before use.

  folder/40/arrays/        Orbax's files: the tree's leaves, in order
  folder/40/manifest.json  step, best, facts, leaves, SHA-256 of each file
  folder/50.part/          a save or a removal, under way or interrupted

One rename gives a folder its number after its manifest is written, and one
takes it away before the folder is removed. So a numbered folder is complete
wherever the process is killed. Orbax alone checks no content and would restore
a flipped bit silently. Each process writes and reads its parts of the arrays,
and process 0 does all else; all call save, wait and restore.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging as python_logging
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import jax
from absl import logging
from orbax.checkpoint import v1 as ocp

from specdec_jax import hosts
from specdec_jax.io import files

ARRAYS = 'arrays'
MANIFEST = 'manifest.json'
_NUMBER = re.compile('0|[1-9][0-9]*')


class Corrupt(ValueError):
  """A step that cannot be used; says which file is wrong, and how."""


class Unsaved(ValueError):
  """A step that could not be written; earlier steps are untouched."""


class Restored(NamedTuple):
  """A step as it was saved; facts as JSON returns them."""

  step: int
  arrays: Any
  facts: dict[str, Any]


class Checkpoints:
  """The steps in one folder: the newest `keep` and the newest marked best. Use
  it in a `with`, or close it: a pending save finishes, or raises its error."""

  def __init__(self, folder: str | os.PathLike, *, keep: int = 2):
    self.folder, self._keep = pathlib.Path(folder).absolute(), keep
    self._pool = concurrent.futures.ThreadPoolExecutor(1, 'checkpoint')
    self._pending: concurrent.futures.Future | None = None
    self._refused: set[int] = set()  # by restore; may be saved again
    logging.get_absl_logger().addFilter(_without_orbax_threads)

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, kind, *_) -> None:
    if kind is None or jax.process_count() == 1:
      self.close()
    else:
      self._pool.shutdown(wait=False)  # the others may not be here

  def close(self) -> None:
    try:
      self.wait()
    finally:
      self._pool.shutdown()

  def steps(self) -> list[int]:
    """Lists complete steps, oldest first; does not check their content."""
    if not self.folder.is_dir():
      return []
    names = [path.name for path in self.folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

  def best(self) -> int | None:
    """Returns the newest step saved as best that restore can use."""
    for step in reversed(self._usable()):
      try:
        if read_manifest(self._path(step)).best:
          return step
      except Corrupt as error:
        logging.warning('%s; whether it is the best is not known', error)
    return None

  def save(
    self, step: int, arrays: Any, facts: dict[str, Any], *, best: bool = False
  ) -> None:
    """Returns once the arrays may be donated; goes on writing behind. Raises
    Unsaved if this save or the one before it could not be written.

    step: larger than every step here, those refused by `restore` aside.
    arrays: a pytree of jax and numpy arrays.
    facts: JSON: config, metrics, the data iterator's state.
    best: keeps this step until a later one is marked best.
    """
    self.wait()
    newest = max(hosts.from_first(self._usable), default=-1)
    assert step > newest, (step, newest)  # which would be restored instead
    leaves = _named(arrays)
    facts = json.loads(json.dumps(facts))  # a copy, as restore returns it
    content = Manifest(step, best, facts, _kinds(leaves), files={})
    self._refused.discard(step)
    with _unsaved_if_it_fails(self._part(step)), _orbax():
      hosts.from_first(lambda: self._make_room(step))
      path = str(self._part(step) / ARRAYS)
      response = ocp.save_async(path, list(leaves.values()))
    self._pending = self._pool.submit(self._finish, content, response)

  def wait(self) -> None:
    """Waits until the last save is complete; raises Unsaved if it failed."""
    pending, self._pending = self._pending, None
    if pending and hosts.anywhere(pending.exception() is not None):
      pending.result()
      raise Unsaved(f'{self.folder}: another process could not save its part')

  def restore(self, like: Any, step: int | None = None) -> Restored | None:
    """Returns the newest valid step, or the one given; None if there is none.
    Passes over an invalid newer step with a warning; it may be saved again.

    like: a pytree of jax.ShapeDtypeStruct; a leaf without a sharding goes to
      the first device.

    Raises:
      Corrupt: the step given is not valid, or none is.
      Unsaved: the save before this could not be written.
    """
    self.wait()
    if step is not None:
      return self._restore(step, like)
    first = None
    for step in reversed(hosts.from_first(self.steps)):
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
    raise Corrupt(f'{first}; no valid step is left in {self.folder}')

  def _path(self, step: int) -> pathlib.Path:
    return self.folder / str(step)

  def _part(self, step: int) -> pathlib.Path:
    return self.folder / f'{step}.part'

  def _usable(self) -> list[int]:
    """Lists the steps that restore has not refused."""
    return [s for s in self.steps() if s not in self._refused]

  def _make_room(self, step: int) -> None:
    """Removes interrupted steps, and the invalid one that this replaces."""
    self.folder.mkdir(parents=True, exist_ok=True)
    for path in self.folder.glob('*.part'):
      if _NUMBER.fullmatch(path.stem):
        shutil.rmtree(path)
    if self._path(step).exists():
      self._remove(step)
    self._part(step).mkdir()

  def _remove(self, step: int) -> None:
    os.rename(self._path(step), self._part(step))
    shutil.rmtree(self._part(step))

  def _finish(self, content: 'Manifest', response: ocp.AsyncResponse) -> None:
    part = self._part(content.step)
    with _unsaved_if_it_fails(part):
      response.result()  # of the first, after those of all
      if not hosts.is_first():
        return
      write_manifest(part, content)
      os.rename(part, self._path(content.step))
    try:
      newest, best = self._usable()[-self._keep :], self.best()
      for step in self.steps():
        # An invalid step ahead of this one stays until its turn comes again.
        if step < newest[-1] and step not in newest and step != best:
          self._remove(step)
    except OSError as error:
      logging.warning('%s: old steps cannot be removed: %s', self.folder, error)

  def _restore(self, step: int, like: Any) -> Restored:
    wanted, folder = _named(like), self._path(step)
    content = hosts.from_first(lambda: _valid(folder, wanted))
    # In the order in which they were saved.
    ordered = [_with_sharding(wanted[name]) for name in content.leaves]
    with _orbax():
      found = ocp.load(str(folder / ARRAYS), ordered)
    arrays = dict(zip(content.leaves, found, strict=True))
    tree = jax.tree.structure(like).unflatten(arrays[x] for x in wanted)
    return Restored(step, tree, content.facts)


@contextlib.contextmanager
def _orbax():
  context = ocp.Context()
  # Otherwise an array that Orbax refuses leaves threads that wait 5 minutes.
  context.asynchronous.create_directories_asynchronously = False
  with context, jax.transfer_guard('allow'):
    yield


def _without_orbax_threads(record: python_logging.LogRecord) -> bool:
  """Drops the stacks that its threads print; `result` raises them again."""
  return not record.pathname.endswith('orbax/checkpoint/_src/futures/future.py')


@contextlib.contextmanager
def _unsaved_if_it_fails(part: pathlib.Path):
  """Turns a writing error into one sentence, and frees the space."""
  try:
    yield
  # What Python, Orbax and tensorstore raise when they cannot write.
  except (OSError, ValueError, RuntimeError) as e:
    shutil.rmtree(part, ignore_errors=True)
    reason = ' '.join(str(e).split())[:300]
    raise Unsaved(
      f'{part.parent}: step {part.stem} could not be saved: {reason}; free '
      'space there or give another folder, earlier steps are untouched'
    ) from e


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
  # Never the sharding that was saved: its devices may not be here.
  first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  sharding = getattr(leaf, 'sharding', None) or first
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


# --- the manifest ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Manifest:
  """A step without its arrays.

  leaves: name -> [dtype, shape].
  files: path below the step's folder -> [bytes, SHA-256].
  """

  step: int
  best: bool
  facts: dict[str, Any]
  leaves: dict[str, list]
  files: dict[str, list]
  format: int = 1


def write_manifest(folder: pathlib.Path, content: Manifest) -> None:
  """Hashes every file below a folder into its manifest."""
  content = dataclasses.replace(content, files=_hashes(folder))
  files.write(folder / MANIFEST, _encode(dataclasses.asdict(content)))


def read_manifest(folder: pathlib.Path) -> Manifest:
  """Reads and checks a step's manifest, but not its files."""
  path = folder / MANIFEST
  if not folder.is_dir():
    raise Corrupt(f'{folder}: no such step')
  try:
    content = path.read_bytes()
    body = json.loads(content)
    body.pop('sha256')
    # The only bytes that mean this body, so no bit of the file is free.
    if f'{_encode(body)}\n'.encode() != content:
      raise ValueError('its SHA-256 is not its own')
    if (body['format'], str(body['step'])) != (1, folder.name):
      raise ValueError(f'format {body["format"]}, step {body["step"]}')
    return Manifest(**body)
  # What reading, JSON, and a body of another shape raise.
  except (
    *(OSError, ValueError, LookupError, TypeError, AttributeError),
    RecursionError,
  ) as e:
    raise Corrupt(f'{path}: not the manifest that was written: {e}') from e


def _valid(folder: pathlib.Path, wanted: dict[str, Any]) -> Manifest:
  """Returns a valid step's manifest, if its tree is the wanted one."""
  content = read_manifest(folder)
  saved, asked = content.leaves, _kinds(wanted)
  differ = [k for k in saved | asked if saved.get(k) != asked.get(k)]
  if differ:
    text = lambda kind: f'{kind[0]}{kind[1]}' if kind else 'nothing'
    have, want = (text(x.get(differ[0])) for x in (saved, asked))
    more = f' (and {len(differ) - 1} more leaves)' if differ[1:] else ''
    raise Corrupt(
      f'{folder / MANIFEST}: leaf {differ[0]} is saved as {have}, asked for as '
      f'{want}{more}: give the configuration it was saved with, or another '
      'folder'
    )
  try:
    found = _hashes(folder)
  except OSError as e:
    where = e.filename or folder
    raise Corrupt(f'{where}: cannot be read: {e.strerror}') from e
  for name in content.files | found:
    if found.get(name) != content.files.get(name):
      why = 'is not what was saved' if name in found else 'is missing'
      raise Corrupt(f'{folder / name}: {why}')
  return content


def _named(tree: Any) -> dict[str, Any]:
  """Names a pytree's leaves by path, such as "['params'].w[0]"."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _kinds(leaves: dict[str, Any]) -> dict[str, list]:
  return {k: [str(x.dtype), list(x.shape)] for k, x in leaves.items()}


def _hashes(folder: pathlib.Path) -> dict[str, list]:
  """Returns {path: [bytes, SHA-256]} for the files below a step's folder."""
  paths = [p for p in sorted(folder.rglob('*')) if not p.is_dir()]
  each = {p.relative_to(folder).as_posix(): p for p in paths}
  each.pop(MANIFEST, None)
  return {k: [p.stat().st_size, files.sha256(p)] for k, p in each.items()}


def _encode(body: dict[str, Any]) -> str:
  digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
  return json.dumps({'sha256': digest} | body, indent=1)
