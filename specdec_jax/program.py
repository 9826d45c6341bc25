"""A program: its flags and config, how it starts, is stopped, and ends."""

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import io
import itertools
import logging
import os
import pathlib
import platform
import re
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

# Of the process, but for a fraction of a second: JAX takes one to import.
_STARTED = time.monotonic()

import jax  # noqa: E402
from absl import app, flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from specdec_jax import fields  # noqa: E402
from specdec_jax import hosts as hosts_lib  # noqa: E402

flags.disclaim_key_flags()  # those defined here are the program's: --help
# Loops in CUDA graphs.
_LOOPS = re.compile(r'command_buffer=\S*(WHILE|CONDITIONAL)')
_YNN = '--xla_cpu_experimental_ynn_fusion_type=-reduce'
_ISA = 'SPECDEC_JAX_ISA'
_MOST = 2**31  # bytes of compiled programs that are kept
# The folders that open_workdir made, innermost first.
_made: list[pathlib.Path] = []


def elapsed() -> float:
  """Returns the seconds since the process began."""
  return time.monotonic() - _STARTED


def set_xla_flags(*, trains: bool = False) -> None:
  """Sets the XLA flags that this version of jaxlib needs.

  The package calls it on import; it has no effect after the first computation.
  Flags for other regressions belong here too; none is known for TPUs.

  trains: for large products, which XLA's own CPU kernels compute on one core
    each, and its others on all. Raises ValueError for a flag with which texts
    on this GPU are wrong, and for an unknown SPECDEC_JAX_ISA.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  if plain_cpu() and 'xla_cpu_max_isa' not in flags:
    os.environ['XLA_FLAGS'] = flags = f'{flags} --xla_cpu_max_isa=AVX2'.strip()
  if _LOOPS.search(flags) and hosts_lib.has_gpu():
    raise ValueError(
      'XLA_FLAGS: xla_gpu_enable_command_buffer with WHILE or CONDITIONAL: '
      'generations end early in jaxlib 0.11.2 (experiments/gpu); leave them out'
    )
  if importlib.metadata.version('jaxlib') != '0.10.2':
    return
  if _YNN.partition('=')[0] not in flags:
    # jaxlib 0.10.2 miscompiles a narrow matvec + reduce on CPU (jax#39103).
    # The minus disables one pattern only; without it the fast kernels go too.
    os.environ['XLA_FLAGS'] = flags = f'{flags} {_YNN}'.strip()
  if trains and flags.endswith(_YNN):  # as set here, not by the user
    os.environ['XLA_FLAGS'] = f'{flags},-dot,-individual_dot'


def config_flag(
  default: str, *, keys: str = 'configs/default.py'
) -> flags.FlagHolder:
  """Defines --config; its --help names `keys`, the file that lists its keys."""
  about = (
    f'FILE or FILE:ARGUMENT, as in FILE:tiny; its keys, listed in {keys}, '
    'which says where they are explained, are changed by '
    '--config.SECTION.KEY=VALUE'
  )
  _check_config(default)
  return config_flags.DEFINE_config_file('config', default, about)


def launch(
  run: Callable[..., bool], *, positional: bool = False, hosts: bool = False
) -> None:
  """Parses flags, calls run and exits with status 0 if it is true, else 1.

  A ValueError is the user's mistake: one sentence on stderr, and status 2. So
  is an OSError about a file that a setting names.

  positional: run takes the list of arguments that are not flags, which are
    refused without it.
  hosts: run works in several processes. Then all call it; hosts.from_first and
    hosts.fetch keep them together.
  """
  flags.DEFINE_string(
    'distributed',
    'auto',
    'how processes join: auto, off, or ADDRESS,N,I (docs/many_hosts.md)',
  )

  def main(argv):
    if len(argv) > 1 and not positional:
      _refuse(f'unexpected argument {argv[1]!r}: want --NAME=VALUE, see --help')
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors='backslashreplace')  # no lost results
    for name in ('xla_bridge', 'distributed'):  # on what is missing
      logging.getLogger(f'jax._src.{name}').setLevel(logging.WARNING)
    try:
      with hosts_lib.job(flags.FLAGS.distributed, hosts):
        keep_programs(flags.FLAGS.flag_values_dict().get('workdir', ''))
        if not (run(argv[1:]) if positional else run()):
          sys.exit(1)
    except (ValueError, OSError) as error:
      if not (sentence := surroundings(error)):
        raise
      _refuse(sentence)

  app.run(main, flags_parser=_parse)


def plain_cpu() -> bool:
  """Tells whether SPECDEC_JAX_ISA=avx2 asks to compute as a CPU does that has
  AVX2 alone; raises ValueError for another value."""
  asked = os.environ.get(_ISA, '')
  if asked not in ('', 'avx2'):
    raise ValueError(f'{_ISA}={asked}: allowed is avx2; or leave it out')
  return bool(asked)


@functools.cache
def cpu(path: pathlib.Path = pathlib.Path('/proc/cpuinfo')) -> str:
  """Returns this CPU's model and instruction sets, or those of plain_cpu."""
  try:
    lines = path.read_text().splitlines()
  except OSError:
    return f'{platform.machine()} {platform.processor()}'
  wanted = ('model name', 'flags', 'Features', 'CPU part')
  text = '\n'.join(dict.fromkeys(x for x in lines if x.startswith(wanted)))
  return re.sub(r' (avx512|avx_vnni|amx)\w*', '', text) if plain_cpu() else text


def cache_folder() -> pathlib.Path:
  """Returns $SPECDEC_JAX_CACHE, else specdec_jax in the user's cache folder."""
  own = os.environ.get('SPECDEC_JAX_CACHE')
  if own:
    return pathlib.Path(own)
  shared = os.environ.get('XDG_CACHE_HOME')
  root = pathlib.Path(shared) if shared else pathlib.Path.home() / '.cache'
  return root / 'specdec_jax'


def keep_programs(workdir: str) -> None:
  """Keeps compiled programs for the next run, unless JAX is told where.

  On a TPU or GPU with a workdir, in it; else in the cache folder, under a name
  made of all that they depend on. There the oldest go once they fill 2 GB.
  """
  if jax.config.jax_compilation_cache_dir:  # pyright: ignore
    return
  if workdir and (hosts_lib.has_tpu() or hosts_lib.has_gpu()):
    folder = pathlib.Path(workdir) / 'compiled'
  else:
    versions = map(importlib.metadata.version, ('jax', 'jaxlib'))
    parts = [*versions, os.environ.get('XLA_FLAGS', ''), cpu()]
    for path in sorted(pathlib.Path(__file__).parent.glob('kernels/*.[ch]')):
      parts.append(path.read_text())
    name = hashlib.sha256('\n'.join(parts).encode()).hexdigest()[:16]
    folder = cache_folder() / 'compiled' / name
    try:
      folder.mkdir(parents=True, exist_ok=True)
      with tempfile.TemporaryFile(dir=folder):
        pass
      _prune(folder.parent)
    except OSError as error:
      print(
        f'compiled programs cannot be kept in {folder} ({error.strerror}): '
        'set SPECDEC_JAX_CACHE to a folder that can be written',
        file=sys.stderr,
      )
      return
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def _prune(folder: pathlib.Path) -> None:
  """Removes the oldest files below a folder until the others fit."""
  left, found = _MOST, []
  for path in folder.glob('*/*'):
    with contextlib.suppress(FileNotFoundError):  # another run removed it
      about = path.stat()
      found.append((about.st_mtime, about.st_size, path))
  for _, size, path in sorted(found, reverse=True):
    left -= size
    if left < 0:
      path.unlink(missing_ok=True)


def open_workdir(path: str) -> pathlib.Path | None:
  """Creates the folder for results; None for ''. ValueError: not writable.

  What it creates is removed if the program then refuses and left it empty.
  """
  if not path:
    return None
  folder = pathlib.Path(path)
  missing = [x for x in (folder, *folder.parents) if not x.exists()]
  _made.extend(missing)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise ValueError(
      f'workdir {path}: cannot be written ({error.strerror}): name another'
    ) from error
  return folder


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
  """Yields a list that gets the first SIGINT (Ctrl-C) or SIGTERM.

  The first does not end the process: a loop must check the list. A second does.
  """
  caught: list[int] = []

  def note(number, _):
    caught.append(number)
    # Not print(): the signal may have interrupted one, which is not reentrant.
    os.write(2, b'\nstopping soon; once more stops at once\n')
    restore()

  before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}

  def restore():
    for number, handler in before.items():
      signal.signal(number, handler)

  try:
    yield caught
  finally:
    restore()


# --- flags and refusals ------------------------------------------------------


def _check_config(path: str) -> None:
  """Refuses a config, `path` or --config's, that is missing or lacks a key."""
  options = sys.argv[1:]
  for option, following in itertools.pairwise([*options, '']):
    if given := re.fullmatch('--?config(=.*)?', option):
      path = given[1][1:] if given[1] else following
  file, _, argument = path.partition(':')
  if not pathlib.Path(file).is_file():
    _refuse(f'config {file}: no such file')
  make = runpy.run_path(file).get('get_config')
  if make is None:
    _refuse(f'config {file}: has no get_config')
  try:
    config = make(argument) if argument else make()
  except ValueError as error:
    _refuse(str(error))
  for option in options:
    if not re.match(r'--?(no)?config[.]', option):
      continue
    where, known = 'config', config
    for key in option.partition('=')[0].split('.')[1:]:
      names = [*known] if hasattr(known, 'keys') else []
      if key not in names:
        _refuse(f'{where}.{key}: no such key; {fields.choices(key, names)}')
      where, known = f'{where}.{key}', known[key]


def _parse(argv: list[str]) -> list[str]:
  """Reads the flags; returns the arguments that are left."""
  try:
    return flags.FLAGS(argv)
  except (flags.Error, ValueError) as error:
    while error.args and isinstance(error.args[0], Exception):
      error = error.args[0]
    _refuse(f'{" ".join(str(error).split())}; --help lists all')


def _refuse(sentence: str) -> NoReturn:
  for folder in _made:
    with contextlib.suppress(OSError):  # it has something
      folder.rmdir()
  print(f'{os.path.basename(sys.argv[0])}: {sentence}', file=sys.stderr)
  sys.exit(2)


def surroundings(error: ValueError | OSError) -> str:
  """Says what the user did wrong, or what is wrong around them; '' if nothing.

  Any other OSError is a mistake of this program: its traceback is wanted.
  """
  if isinstance(error, ValueError):
    return str(error)
  if isinstance(error, BrokenPipeError):
    # What is still to be written would be another error at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 'the reader of its output has ended'
  why, file = error.strerror or str(error), error.filename
  full = errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG
  if error.errno in full:
    return f'{file}: {why}' if file else why
  if not isinstance(file, str | bytes | os.PathLike):
    return ''
  path = pathlib.Path(os.path.abspath(os.fsdecode(file)))
  if not any(path.is_relative_to(os.path.abspath(x)) for x in _named()):
    return ''
  return f'{os.fsdecode(file)}: {why}'


def _named() -> list[str]:
  """Lists the texts of flags and settings, and folders of the environment."""
  given = flags.FLAGS.flag_values_dict().values()
  plain = [x.to_dict() if hasattr(x, 'to_dict') else x for x in given]
  caches = ('SPECDEC_JAX_CACHE', 'XDG_CACHE_HOME', 'HF_HOME', 'TMPDIR')
  found = [*jax.tree.leaves(plain), *map(os.environ.get, caches), *sys.argv[1:]]
  # Without '', which would be the working folder.
  return [os.fspath(x) for x in found if isinstance(x, str | os.PathLike) and x]
