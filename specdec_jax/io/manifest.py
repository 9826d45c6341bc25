"""What a folder must hold: SHA-256 and size of each file, and its leaves.

It knows no array format: io/checkpoint.py writes the files and reads them.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import jax

from specdec_jax.io import files

NAME = 'manifest.json'
FORMAT = 1


class Corrupt(ValueError):
  """A step that cannot be used. path: the file; wrong: what is the matter."""

  def __init__(self, path: pathlib.Path, wrong: str):
    super().__init__(f'{path}: {wrong}')
    self.path, self.wrong = path, wrong


class Missing(Corrupt):
  """A file, or a whole step, that is not there."""


class Truncated(Corrupt):
  """A file shorter than it was."""


class Changed(Corrupt):
  """A file with other bytes than were saved."""


class Unexpected(Corrupt):
  """A file that was not saved."""


class Foreign(Corrupt):
  """A tree of other leaves, shapes or types than asked for."""


@dataclasses.dataclass(frozen=True)
class Manifest:
  """leaves: name -> [dtype, shape]; files: path -> [bytes, SHA-256]."""

  step: int
  best: bool
  facts: dict[str, Any]
  leaves: dict[str, list]
  files: dict[str, list]
  format: int = FORMAT


def named(tree: Any) -> dict[str, Any]:
  """The leaves of a pytree by their paths, such as "['params'].w[0]"."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def kinds(leaves: dict[str, Any]) -> dict[str, list]:
  return {k: [str(x.dtype), list(x.shape)] for k, x in leaves.items()}


def write(folder: pathlib.Path, content: Manifest) -> None:
  """Hashes every file below a folder into its manifest."""
  hashes = {name: _hash(folder / name) for name in sorted(_names(folder))}
  whole = dataclasses.replace(content, files=hashes)
  files.write(folder / NAME, _encode(dataclasses.asdict(whole)))


def read(folder: pathlib.Path) -> Manifest:
  """The manifest of a step's folder, itself intact; its files unchecked.

  Raises:
    Corrupt: no such folder or manifest, or not the one that was written there.
  """
  path = folder / NAME
  if not folder.is_dir():
    raise Missing(folder, 'no such step')
  try:
    content = path.read_bytes()
    body = json.loads(content)
    body.pop('sha256')
    # The only bytes that mean this body, so no bit of the file is free.
    if f'{_encode(body)}\n'.encode() != content:
      raise ValueError('its SHA-256 is not its own')
    if (body['format'], str(body['step'])) != (FORMAT, folder.name):
      raise ValueError(f'format {body["format"]}, step {body["step"]}')
    return Manifest(**body)
  except FileNotFoundError as e:
    raise Missing(path, 'no such file') from e
  except OSError as e:
    raise Corrupt(path, f'cannot be read: {e}') from e
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
    raise Changed(path, f'not the manifest that was written: {e}') from e


def check_files(folder: pathlib.Path, content: Manifest) -> None:
  """Reads every file below the folder once.

  Raises:
    Corrupt: names the first that is missing, changed or was not saved.
  """
  for name, (size, digest) in content.files.items():
    path = folder / name
    try:
      found, found_digest = _hash(path)
    except FileNotFoundError as e:
      raise Missing(path, 'no such file') from e
    except OSError as e:
      raise Corrupt(path, f'cannot be read: {e}') from e
    if found < size:
      raise Truncated(path, f'{found} bytes of {size}')
    if (found, found_digest) != (size, digest):
      raise Changed(path, 'its SHA-256 is not that of the file that was saved')
  for name in sorted(_names(folder) - content.files.keys()):
    raise Unexpected(folder / name, 'this file was not saved')


def check_leaves(
  folder: pathlib.Path, content: Manifest, wanted: dict[str, Any]
) -> None:
  """Raises:
  Foreign: names the first leaf that differs, and both its forms.
  """
  saved, asked = content.leaves, kinds(wanted)
  differ = [k for k in saved | asked if saved.get(k) != asked.get(k)]
  if differ:
    name = differ[0]
    more = f' (and {len(differ) - 1} more leaves)' if differ[1:] else ''
    raise Foreign(
      folder / NAME,
      f'leaf {name} is saved as {_text(saved.get(name))}, asked for as '
      f'{_text(asked.get(name))}{more}: give the configuration it was saved '
      'with, or another folder',
    )


def _text(kind: list | None) -> str:
  return f'{kind[0]}{kind[1]}' if kind else 'nothing'


def _names(folder: pathlib.Path) -> set[str]:
  paths = [p for p in folder.rglob('*') if not p.is_dir()]
  return {p.relative_to(folder).as_posix() for p in paths} - {NAME}


def _hash(path: pathlib.Path) -> list:
  return [path.stat().st_size, files.sha256(path)]


def _encode(body: dict[str, Any]) -> str:
  digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
  return json.dumps({'sha256': digest} | body, indent=1)
