"""Compiles the CPU kernels, once a machine, with the system's C compiler."""

import atexit
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from typing import NamedTuple

import jax
from absl import logging

from specdec_jax import program

_HERE = pathlib.Path(__file__).parent
_SHARED = _HERE / 'shared.h'
CHOICES = ('auto', 'int8', 'xla')
# No -ffast-math: sums must keep their order.
_FLAGS = ['-O3', '-ffp-contract=fast', '-fno-math-errno', '-shared', '-fPIC']


# Columns of a panel. Six rows of 16 fill AVX's registers, so that one pass over
# a weight serves a window of five drafts; AVX-512 has room for twelve of 32.
WIDE = 32 if 'avx512f' in program.cpu() else 16


class Library(NamedTuple):
  """A C source, its compiled file's name, and compiler flags; handlers are
  (name for XLA, symbol) for each function that XLA calls."""

  name: str
  source: str
  flags: tuple[str, ...]
  handlers: tuple[tuple[str, str], ...]


ROWS = Library(
  'rows',
  'rows.c',
  (f'-DWIDE={WIDE}',),
  (
    ('specdec_linear', 'SpecdecLinear'),
    ('specdec_norm', 'SpecdecNorm'),
    ('specdec_attend', 'SpecdecAttend'),
  ),
)


def quantised(kind: str, lanes: int = 0) -> Library:
  """Returns the library that multiplies by one kind (kernels.quantised).
  `lanes` is 16, 8 or 4, for AVX-512, AVX2 or plain C, under a name of their
  own, 'specdec_q4_1_8'; 0: the best on this CPU."""
  name = kind.lower() + (f'_{lanes}' if lanes else '')
  flags = '-DWIDE=32', f'-DKIND={kind}'
  flags += (f'-DLANES={lanes}',) if lanes else ()
  handlers = ((f'specdec_{name}', 'SpecdecQuantised'),)
  return Library(name, 'quantised.c', flags, handlers)


def check(kernels: str) -> None:
  """Raises ValueError if this is none of CHOICES."""
  if kernels not in CHOICES:
    raise ValueError(f'kernels={kernels!r}: allowed are {", ".join(CHOICES)}')


def ready(
  kernels: str, folder: pathlib.Path, kinds: Collection[str] = ()
) -> bool:
  """Tells whether the kernels run here, for these kinds too; one line in the
  log says why not."""
  if kernels == 'xla' or jax.default_backend() != 'cpu':
    return False
  for library in (ROWS, *map(quantised, sorted(set(kinds)))):
    if why := load(folder, library):
      _warn(why)
      return False
  return True


@functools.cache
def _warn(why: str) -> None:  # once, however often it is asked
  logging.warning('%s; decoding with XLA', why)


# XLA takes a library once in a process; it stays loaded.
_loaded: dict[Library, ctypes.CDLL] = {}


@functools.cache
def load(folder: pathlib.Path, library: Library = ROWS) -> str:
  """Makes a library's kernels known to XLA; `folder` keeps it compiled. Returns
  '' if they can be called, else one sentence: why not."""
  if library in _loaded:
    return ''
  compiler = _compiler()
  if not compiler:
    return (
      'no C compiler; install one (gcc, clang) or pip install ziglang for '
      'faster decoding on this CPU'
    )
  try:
    path = _built(compiler, folder, library)
    try:
      made = ctypes.CDLL(str(path))
    except OSError:  # a damaged file
      path.unlink(missing_ok=True)
      made = ctypes.CDLL(str(_built(compiler, folder, library)))
  except (OSError, subprocess.SubprocessError) as error:
    said = (getattr(error, 'stderr', '') or str(error)).strip().splitlines()
    # gcc first says where: "rows.c: In function 'norm':".
    why = next((line for line in said if 'error' in line), said[0])
    return f'{compiler[0]} failed: {why}'
  for name, symbol in library.handlers:
    handler = jax.ffi.pycapsule(getattr(made, symbol))
    jax.ffi.register_ffi_target(name, handler, platform='cpu')
  _loaded[library] = made
  return ''


def _compiler() -> list[str]:
  """Returns a C compiler's command; [] if there is none."""
  named = os.environ.get('CC', '').split()
  for command in (named, ['cc'], ['gcc'], ['clang']):
    if command and shutil.which(command[0]):
      return command
  if importlib.util.find_spec('ziglang'):
    return [sys.executable, '-m', 'ziglang', 'cc']
  return []


def _built(
  compiler: list[str], folder: pathlib.Path, library: Library = ROWS
) -> pathlib.Path:
  """Returns the library for this machine, compiled if the cache has none. Where
  the folder cannot be written, compiles it for this process alone, and logs
  that in one line."""
  native = '-mcpu=native' if platform.machine() == 'arm64' else '-march=native'
  if program.plain_cpu():
    native = '-march=haswell'
  source = _HERE / library.source
  command = [*compiler, *_FLAGS, *library.flags, native]
  key = hashlib.sha256(
    '\n'.join(
      [*command, program.cpu(), importlib.metadata.version('jaxlib')]
    ).encode()
    + source.read_bytes()
    + _SHARED.read_bytes()
  ).hexdigest()
  path = folder / f'{library.name}-{key[:16]}.so'
  command += ['-I', jax.ffi.include_dir(), str(source), '-lm']
  try:
    if path.exists():
      return path
    folder.mkdir(parents=True, exist_ok=True)
    part = tempfile.TemporaryDirectory(dir=folder)
  except OSError as error:
    logging.warning(
      'the compiled CPU kernels cannot be kept in %s (%s) and are compiled at '
      'every start; set SPECDEC_JAX_CACHE to a folder that can be written',
      *(folder, error.strerror or error),
    )
    # Loaded from there, it must stay until the process ends.
    own = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    path = pathlib.Path(own) / path.name
    part = tempfile.TemporaryDirectory(dir=own)
  with part:
    made = pathlib.Path(part.name) / 'made.so'
    command += ['-o', str(made)]
    subprocess.run(
      command, check=True, capture_output=True, text=True, timeout=120
    )
    # A library that is cut would end the process with SIGBUS, at every start.
    with open(made, 'rb') as f:
      os.fsync(f.fileno())
    return made.replace(path)
