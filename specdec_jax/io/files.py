"""Local files: written whole, read as JSON, digests, the cache folder."""

import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

# No config.json is near this; a weights file under that name is far above.
MOST_JSON_BYTES = 1 << 28


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The JSON object in a file.

  Raises:
    ValueError: no such file, not JSON, or not an object.
  """
  try:
    if path.stat().st_size > MOST_JSON_BYTES:
      raise ValueError(f'it is larger than {MOST_JSON_BYTES} bytes')
    value = json.loads(path.read_text('utf-8'))
  except FileNotFoundError as e:
    raise ValueError(
      f'{path}: no such file; a model folder needs config.json, '
      'tokenizer.json and *.safetensors'
    ) from e
  except (OSError, ValueError, RecursionError) as e:
    raise ValueError(f'{path}: not readable as JSON: {e}') from e
  if not isinstance(value, dict):
    raise ValueError(
      f'{path}: a JSON object is needed, not {type(value).__name__}'
    )
  return value


def write(path: pathlib.Path, content: str | bytes) -> None:
  """Writes a file whole or not at all; a text gets a newline at its end."""
  if isinstance(content, str):
    content = f'{content}\n'.encode()
  part = path.with_name(f'{path.name}.{os.getpid()}.part')
  try:
    part.write_bytes(content)
    os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)


def sweep(folder: pathlib.Path) -> None:
  """Removes what killed writers left in a folder and in those in it.

  That is NAME.NUMBER.part and NAME.NUMBER.old, of `write` and io/export.py; no
  other process may be writing there.
  """
  for path in [*folder.glob('*.*.*'), *folder.glob('*/*.*.*')]:
    if not re.fullmatch(r'.+\.\d+\.(part|old)', path.name):
      continue
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink()


def sha256(path: pathlib.Path) -> str:
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def digest(paths: Sequence[pathlib.Path]) -> str:
  """One SHA-256 for a set of files: the file's own where there is one."""
  if len(paths) == 1:
    return sha256(paths[0])
  lines = [f'{sha256(p)}  {p.name}\n' for p in sorted(paths)]
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def cache_folder() -> pathlib.Path:
  """$SPECDEC_JAX_CACHE, else specdec_jax under the user's cache folder."""
  own = os.environ.get('SPECDEC_JAX_CACHE')
  if own:
    return pathlib.Path(own)
  shared = os.environ.get('XDG_CACHE_HOME')
  root = pathlib.Path(shared) if shared else pathlib.Path.home() / '.cache'
  return root / 'specdec_jax'
