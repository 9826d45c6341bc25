"""Compiles rows.c, once a machine, with the system's C compiler; loads it."""

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

import jax
from absl import logging

SOURCE = pathlib.Path(__file__).parent / 'rows.c'
CHOICES = ('auto', 'xla')
_HANDLERS = {
  'specdec_linear': 'SpecdecLinear',
  'specdec_norm': 'SpecdecNorm',
  'specdec_attend': 'SpecdecAttend',
}
# No -ffast-math: sums must keep their order.
_FLAGS = ['-O3', '-ffp-contract=fast', '-fno-math-errno', '-shared', '-fPIC']


@functools.cache
def _cpu() -> str:
  """Model and instruction sets of this CPU."""
  try:
    lines = pathlib.Path('/proc/cpuinfo').read_text().splitlines()
  except OSError:
    return f'{platform.machine()} {platform.processor()}'
  wanted = ('model name', 'flags', 'Features', 'CPU part')
  return '\n'.join(dict.fromkeys(x for x in lines if x.startswith(wanted)))


# Columns of a panel. Six rows of 16 fill AVX's registers, so that one pass over
# a weight serves a window of five drafts; AVX-512 has room for twelve of 32.
WIDE = 32 if 'avx512f' in _cpu() else 16


def check(kernels: str) -> None:
  """ValueError if this is none of CHOICES."""
  if kernels not in CHOICES:
    raise ValueError(f'kernels={kernels!r}: allowed are {", ".join(CHOICES)}')


def ready(kernels: str, folder: pathlib.Path) -> bool:
  """Whether the kernels can run here; one line of the log if they fail to."""
  if kernels == 'xla' or jax.default_backend() != 'cpu':
    return False
  why = load(folder)
  if why:
    logging.warning('%s; decoding with XLA', why)
  return not why


# XLA takes one library in a process; it stays loaded.
_loaded: list[ctypes.CDLL] = []


@functools.cache
def load(folder: pathlib.Path) -> str:
  """Makes the kernels known to XLA.

  Args:
    folder: keeps the compiled library.

  Returns:
    '' if they can be called, else one sentence: why not.
  """
  if _loaded:
    return ''
  compiler = _compiler()
  if not compiler:
    return (
      'no C compiler; install one (gcc, clang) or pip install ziglang for '
      'faster decoding on this CPU'
    )
  try:
    path = _built(compiler, folder)
    library = ctypes.CDLL(str(path))
  except (OSError, subprocess.SubprocessError) as error:
    said = (getattr(error, 'stderr', '') or str(error)).strip().splitlines()
    # gcc first says where: "rows.c: In function 'norm':".
    why = next((line for line in said if 'error' in line), said[0])
    return f'{compiler[0]} failed: {why}'
  for name, symbol in _HANDLERS.items():
    handler = jax.ffi.pycapsule(getattr(library, symbol))
    jax.ffi.register_ffi_target(name, handler, platform='cpu')
  _loaded.append(library)
  return ''


def _compiler() -> list[str]:
  """The command of a C compiler; [] if there is none."""
  named = os.environ.get('CC', '').split()
  for command in (named, ['cc'], ['gcc'], ['clang']):
    if command and shutil.which(command[0]):
      return command
  if importlib.util.find_spec('ziglang'):
    return [sys.executable, '-m', 'ziglang', 'cc']
  return []


def _built(compiler: list[str], folder: pathlib.Path) -> pathlib.Path:
  """The library for this machine, compiled if the cache has none."""
  native = '-mcpu=native' if platform.machine() == 'arm64' else '-march=native'
  command = [*compiler, *_FLAGS, f'-DWIDE={WIDE}', native]
  key = hashlib.sha256(
    '\n'.join([*command, _cpu(), importlib.metadata.version('jaxlib')]).encode()
    + SOURCE.read_bytes()
  ).hexdigest()
  path = folder / f'rows-{key[:16]}.so'
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
      made = pathlib.Path(temporary) / 'rows.so'
      include = ['-I', jax.ffi.include_dir()]
      subprocess.run(
        [*command, *include, str(SOURCE), '-o', str(made), '-lm'],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
      )
      made.replace(path)
  return path
