"""Local files: atomic writes, JSON, digests and the cache folder."""

import contextlib
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any


def read_json(
  path: pathlib.Path, missing: dict[str, Any] | None = None
) -> dict[str, Any]:
  """Reads a JSON object; returns `missing`, if given, for an absent file."""
  try:
    return _object(path.read_bytes(), str(path))
  except FileNotFoundError as e:
    if missing is not None:
      return missing
    raise ValueError(
      f'{path}: no such file; a model folder needs config.json, '
      "tokenizer.json and *.safetensors, a draft's config.json and its weights"
    ) from e
  except OSError as e:
    raise ValueError(f'{path}: cannot be read ({e.strerror})') from e


def read_jsonl(
  path: str | os.PathLike, *, finished: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields ('path:line', object) for each line that is not blank. finished:
  skip a last line without newline, from a process killed or still writing."""
  try:
    # In bytes: JSON allows a bare U+2028 in a string; text would split there.
    lines = pathlib.Path(path).read_bytes().split(b'\n')
  except OSError as e:
    raise ValueError(f'{path}: cannot be read ({e.strerror})') from e
  for number, line in enumerate(lines[:-1] if finished else lines, 1):
    if line.strip():
      where = f'{path}:{number}'
      yield where, _object(line, where)


def _object(content: bytes, where: str) -> dict[str, Any]:
  """Parses a JSON value that must be an object."""
  try:
    text = content.decode('utf-8-sig')
    value = json.loads(text)
  # Also raised for nesting, or numbers, too long for Python's parser.
  except (ValueError, RecursionError) as e:
    reason = str(e).replace(': line 1 column', ' at column')
    raise ValueError(
      f'{where}: not JSON ({reason}): one JSON object is needed, in UTF-8'
    ) from e
  if not isinstance(value, dict):
    raise ValueError(
      f'{where}: a JSON object is needed, not {type(value).__name__}'
    )
  if re.search(r'\\u[dD][89a-fA-F]', text):
    check_unicode(value, where)
  return value


def check_unicode(value: Any, what: str) -> None:
  """Refuses a JSON value with half a surrogate pair in a string. JSON may spell
  one ("\\ud83d"), as a program that cuts UTF-16 writes it. It is no character:
  no tokenizer, file or terminal takes it."""
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError as e:
    half = ord(e.object[e.start])
    raise ValueError(
      f'{what}: \\u{half:04x} is half of a UTF-16 surrogate pair, which is no '
      'character: write the text anew from where it was cut, or remove it'
    ) from e


def head(path: pathlib.Path) -> bytes:
  """Reads a weights file's first bytes; refuses a Git LFS pointer."""
  try:
    with open(path, 'rb') as f:
      found = f.read(32)
  except OSError as e:
    raise ValueError(f'{path}: cannot be read: {e.strerror or e}') from e
  if found.startswith(b'version https://git-lfs'):
    raise ValueError(
      f'{path}: a Git LFS pointer; fetch the weights with `git lfs pull`'
    )
  return found


def torn(file: Any) -> bytes:
  """Returns what follows a binary file's last newline; reads its tail only."""
  found, at = b'', file.seek(0, os.SEEK_END)
  while at and b'\n' not in found:
    at -= (size := min(at, 1 << 16))
    file.seek(at)
    found = file.read(size) + found
  return found.rpartition(b'\n')[-1]


class Lines:
  """A JSONL file to append to. A killed process leaves a last line without its
  newline: it counts if it is JSON, and is cut off if not."""

  def __init__(self, path: str | os.PathLike, refusal: str, start: str = '{"'):
    """Raises ValueError(refusal) if the last line has no newline and is no part
    of a line that begins with `start`."""
    self._path, self._part, self._whole = pathlib.Path(path), b'', False
    with contextlib.suppress(FileNotFoundError), open(path, 'rb') as file:
      self._part = torn(file)
    if not start.encode().startswith(self._part[: len(start)]):
      raise ValueError(refusal)
    with contextlib.suppress(ValueError):
      self._whole = bool(json.loads(self._part))

  def read(self) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields as read_jsonl does; nothing without a file."""
    if self._path.exists():
      yield from read_jsonl(self._path, finished=not self._whole)

  def open(self) -> io.FileIO:
    """Opens the file behind its last line."""
    # Not buffered: an answer that was given is in the file.
    file = open(self._path, 'ab', buffering=0)
    if self._whole:
      file.write(b'\n')
    else:
      file.truncate(file.tell() - len(self._part))
    return file


def write(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file atomically; ends a str with a newline."""
  if isinstance(content, str):
    content = f'{content}\n'.encode()
  part = path.with_name(f'{path.name}.{os.getpid()}.part')
  try:
    with naming(path):
      part.write_bytes(content)
      os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
  """Names this file in an OSError that names none, as those from writing do."""
  try:
    yield
  except OSError as error:
    if error.errno and not error.filename:
      error.filename = os.fspath(path)
    raise


def sweep(folder: pathlib.Path) -> None:
  """Removes partial files that killed processes left in a folder. `write` and
  io.export name them NAME.NUMBER.part, in the folder and its direct subfolders.
  No other process may be writing there."""
  for path in [*folder.glob('*.part'), *folder.glob('*/*.part')]:
    if not re.fullmatch(r'.+\.\d+\.part', path.name):
      continue
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink()


def sha256(path: pathlib.Path) -> str:
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def digest(paths: Sequence[pathlib.Path]) -> str:
  """Returns one SHA-256 for a set of files; for a single file, its own."""
  if len(paths) == 1:
    return sha256(paths[0])
  lines = [f'{sha256(p)}  {p.name}\n' for p in sorted(paths)]
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def stamp(
  paths: Sequence[pathlib.Path],
) -> tuple[tuple[pathlib.Path, int], ...]:
  """Returns what differs once files have other content; reads none."""
  return tuple((path, path.stat().st_mtime_ns) for path in paths)
