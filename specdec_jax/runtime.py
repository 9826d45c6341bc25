"""Start-up, output and error exits of programs; does not import JAX."""

import contextlib
import faulthandler
import functools
import hashlib
import importlib
import importlib.metadata
import io
import json
import logging
import math
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import rich.console
import rich.progress
from absl import app, flags
from ml_collections import config_flags

from specdec_jax import fields

# Of the process, but for a fraction of a second.
_STARTED = time.monotonic()
# Seconds, of several processes: until JAX has named one that is gone; that one
# which failed gives the others, to fail in the same way.
_NAMED, _LEAVE = 30, 5
_silent = False  # as all of them but process 0


def elapsed() -> float:
  """Seconds since the process began."""
  return time.monotonic() - _STARTED


_YNN = '--xla_cpu_experimental_ynn_fusion_type=-reduce'


def set_xla_flags(*, trains: bool = False) -> None:
  """Sets the XLA flags that this version of jaxlib needs.

  The package calls it on import; it has no effect after the first computation.
  Flags for other regressions belong here too; none is known for TPUs.

  trains: for large products, which XLA's own CPU kernels compute on one core
    each, and its others on all.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  if importlib.metadata.version('jaxlib') != '0.10.2':
    return
  if _YNN.partition('=')[0] not in flags:
    # jaxlib 0.10.2 miscompiles a narrow matvec + reduce on CPU (jax#39103).
    # The minus disables one pattern only; without it the fast kernels go too.
    os.environ['XLA_FLAGS'] = flags = f'{flags} {_YNN}'.strip()
  if trains and flags.endswith(_YNN):  # as set here, not by the user
    os.environ['XLA_FLAGS'] = f'{flags},-dot,-individual_dot'


def prepare() -> None:
  """Makes JAX refuse rank promotion, and hides its start-up warnings."""
  import jax

  jax.config.update('jax_numpy_rank_promotion', 'raise')
  # It logs every kind of accelerator that is missing.
  logging.getLogger('jax._src.xla_bridge').setLevel(logging.WARNING)
  logging.getLogger('jax._src.distributed').setLevel(logging.WARNING)


def config_flag(default: str) -> flags.FlagHolder:
  """Defines --config=FILE[:ARGUMENT] and --config.KEY=VALUE for its keys."""
  try:
    return config_flags.DEFINE_config_file('config', default)
  except (AttributeError, KeyError, ValueError) as error:
    _refuse_config(error)  # a --config.KEY that the default config lacks


def launch(
  run: Callable[..., bool], *, positional: bool = False, hosts: bool = False
) -> None:
  """Parses flags, calls run and exits with status 0 if it is true, else 1.

  A ValueError is the user's mistake: one sentence on stderr, and status 2. So
  is what a config raises, and an OSError about a file that a setting names.

  Args:
    run: the program; without arguments unless `positional`.
    positional: run takes the list of arguments that are not flags. If False,
      such arguments are refused.
    hosts: whether run works in several processes. Then all of them call it;
      hosts_lib.from_first and hosts_lib.fetch keep them together.
  """
  flags.DEFINE_string(
    'distributed', 'auto', 'auto, off, or ADDRESS,N,I: docs/many_hosts.md'
  )

  def main(argv):
    if len(argv) > 1 and not positional:
      _refuse(f'unexpected argument {argv[1]!r}')
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors='backslashreplace')  # no lost results
    prepare()
    several, status = False, 1
    try:
      several = _join(flags.FLAGS.distributed)
      if several:
        _check_alike(hosts)
      keep_programs(flags.FLAGS.flag_values_dict().get('workdir', ''))
      status = 0 if (run(argv[1:]) if positional else run()) else 1
    except (ValueError, OSError) as error:
      if not (sentence := fields.surroundings(error)):
        raise
      status = 2
      _refuse(sentence)
    except RuntimeError as error:
      if several:
        _explain(error)
      raise
    finally:
      if several and status:
        _leave_soon(status)
    sys.exit(status)

  app.run(main, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
  """Reads flags and the config; the arguments that are left."""
  try:
    left = flags.FLAGS(argv)
  except OSError as error:  # the last line names the config file
    _refuse('config: ' + str(error).strip().rpartition('] ')[2])
  except (AttributeError, KeyError, flags.Error, ValueError) as error:
    _refuse_config(error)
  except fields.OF_CODE as error:  # a config is code
    _refuse(f'config: {first_line(error)}{fields.place(error)}')
  if 'config' in flags.FLAGS:
    path = config_flags.get_config_filename(flags.FLAGS['config'])
    path = path.partition(':')[0]  # its argument is after the colon
    if not pathlib.Path(path).is_file():
      _refuse(f'config {path}: no such file')
    if flags.FLAGS['config'].value is None:
      _refuse(f'config {path}: its get_config returns None')
  return left


def keep_programs(workdir: str) -> None:
  """On a TPU, keeps what it compiles in a workdir, if nothing else is set."""
  import jax

  from specdec_jax import hosts as hosts_lib

  known = jax.config.jax_compilation_cache_dir  # pyright: ignore
  if workdir and not known and hosts_lib.has_tpu():
    path = pathlib.Path(workdir) / 'compiled'
    jax.config.update('jax_compilation_cache_dir', str(path))


def _join(given: str) -> bool:
  """Whether this is one of several processes; others have no stdout."""
  global _silent
  from specdec_jax import hosts as hosts_lib

  if given != 'auto':
    faulthandler.disable()  # JAX's word on one that is gone should be the last
  several = hosts_lib.join(given)
  if several:
    faulthandler.disable()
    _silent = not hosts_lib.is_first()
  if _silent:
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115
  return several


def _check_alike(hosts: bool) -> None:
  """Raises ValueError unless all processes run the same, which can be split."""
  import jax

  from specdec_jax import hosts as hosts_lib

  if not hosts:
    raise ValueError(
      f'{jax.process_count()} processes: this program runs in one; start one, '
      'with --distributed=off'
    )
  code = hashlib.sha256(pathlib.Path(sys.argv[0]).read_bytes())
  for path in sorted(pathlib.Path(__file__).parent.rglob('*.py')):
    code.update(path.read_bytes())
  given = flags.FLAGS.flag_values_dict()
  del given['distributed']
  facts = {
    'flags and configs': str(sorted(given.items())),
    'code': code.hexdigest(),
    'versions of jax': jax.__version__,
  }
  for name, mine in facts.items():
    if other := hosts_lib.differing(mine):
      raise ValueError(
        f'process {other}: its {name} are not those of process 0; start all '
        'with the same'
      )


def _explain(error: RuntimeError) -> None:
  """Waits for JAX's word, which ends this process, on one that is gone.

  A collective fails at once if a process dies, but does not say which one.
  """
  words = f'{first_line(error)}; if a process is gone, JAX names it'
  print(f'{words} within {_NAMED} s', file=sys.stderr, flush=True)
  time.sleep(_NAMED)


def _leave_soon(status: int) -> None:
  """Ends a process that failed, even if the others do not fail with it.

  JAX would wait for those when it ends, and they for this one's arrays.
  """
  timer = threading.Timer(_LEAVE, os._exit, (status,))
  timer.daemon = True
  timer.start()


def open_workdir(path: str) -> pathlib.Path | None:
  """The folder for results, created if missing; None for an empty path.

  Raises:
    ValueError: the folder is not writable.
  """
  if not path:
    return None
  folder = pathlib.Path(path)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise ValueError(
      f'workdir {path}: cannot be written ({error.strerror}): name another'
    ) from error
  return folder


def console(width: int = 120) -> rich.console.Console:
  """A rich console on stdout; `width` columns in a pipe, which has no width."""
  # 120 hold every table.
  columns = None if sys.stdout.isatty() else width
  return rich.console.Console(width=columns, highlight=False)


def progress_console() -> rich.console.Console:
  """A rich console on stderr, which says nothing but in process 0."""
  return rich.console.Console(stderr=True, quiet=_silent)


def track(
  items: Iterable, description: str, total: int | None = None
) -> Iterable:
  """Iterates over items, with the time that is left on stderr.

  A bar on a terminal; elsewhere a line at most every 15 seconds, but at least
  one. `total` is the number of items that have no length.
  """
  if total is None:
    items = list(items)
    total = len(items)
  console = progress_console()
  if console.is_terminal:
    yield from rich.progress.track(items, description, total, console=console)
    return
  start = said = time.monotonic()
  for done, item in enumerate(items, 1):
    yield item
    now = time.monotonic()
    unsaid = done == total and said == start
    if unsaid or (done < total and now - said >= 15):
      said, left = now, (now - start) / done * (total - done)
      line = f'{description}: {done} of {total}, {time_text(left)} left'
      console.print(line, soft_wrap=True, markup=False, highlight=False)


def time_text(seconds: float) -> str:
  """'40 s', '2 min 05 s' or '3 h 20 min'."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds} s'
  if seconds < 3600:
    return f'{seconds // 60} min {seconds % 60:02} s'
  return f'{seconds // 3600} h {seconds // 60 % 60:02} min'


def compact(document: Any) -> str:
  """A document as one line of JSON.

  Floats are rounded to six significant digits; NaN and infinity become null. A
  NamedTuple becomes an object with its fields as keys.
  """

  def clean(x):
    if hasattr(x, '_asdict'):
      x = x._asdict()
    if isinstance(x, dict):
      return {str(k): clean(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
      return [clean(v) for v in x]
    if isinstance(x, float):
      return float(f'{x:.6g}') if math.isfinite(x) else None
    return x

  return json.dumps(clean(document), separators=(',', ':'), allow_nan=False)


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
  """A list that gets the first SIGINT (Ctrl-C) or SIGTERM.

  That one does not end the process: a loop must check the list. The second one
  acts as usual.
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


def import_name(path: str) -> Any:
  """The object at 'package.module:name'; modules of the working folder count.

  Raises:
    ImportError: another form, a module that fails, or a name that it lacks.
  """
  module, _, name = path.partition(':')
  if not (module and name):
    raise ImportError('want package.module:name')
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    loaded = importlib.import_module(module)
  except Exception as error:  # a user's module may raise anything
    why = first_line(error)
    raise ImportError(f'importing {module} failed: {why}') from error
  if not hasattr(loaded, name):
    raise ImportError(f'{module} has no {name}')
  return getattr(loaded, name)


def first_line(error: BaseException) -> str:
  """The kind of an error and the first line of its message, if it has one."""
  name, lines = type(error).__name__, str(error).splitlines()
  return f'{name}: {lines[0]}' if lines else name


def _refuse_config(error: BaseException) -> NoReturn:
  """Exits with the message of the first error in a chain about flags."""
  unknown = isinstance(error, AttributeError | KeyError)
  while error.args and isinstance(error.args[0], Exception):
    error = error.args[0]
  text = str(error.args[0] if error.args else error)
  if 'Traceback' in text:  # of a config file; the message is its last line
    text = text.strip().rpartition('\n')[2].partition(': ')[2]
  text = ' '.join(text.split())
  _refuse(f'unknown config key {text}' if unknown else text)


def _refuse(sentence: str) -> NoReturn:
  print(f'{os.path.basename(sys.argv[0])}: {sentence}', file=sys.stderr)
  sys.exit(2)


def promoting(function):
  """The function under JAX's default; programs here forbid rank promotion."""

  import jax

  @functools.wraps(function)
  def call(*args, **named):
    with jax.numpy_rank_promotion('allow'):
      return function(*args, **named)

  return call
