"""Several processes in one job: how they meet, and what they tell each other.

All run the same program on the same requests. `put` and `fetch` move arrays
between hosts and a mesh that spans them; `from_first` gives all what only
process 0 can know.
"""

import contextlib
import faulthandler
import glob
import hashlib
import importlib.util
import os
import pathlib
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from absl import flags as absl_flags
from jax.experimental import multihost_utils

from specdec_jax import fields

_SILENCE = 15  # seconds without a word after which JAX ends the others
_START = 120  # seconds for all processes to meet
_NAMED = 30  # seconds in which JAX names a process that is gone
_LEAVE = 5  # seconds that a failed process gives the others to fail alike

T = TypeVar('T')


@contextlib.contextmanager
def job(given: str, works: bool) -> Iterator[None]:
  """Joins a job's processes, if there are several, while a program runs.

  Only process 0 has a stdout. One that fails ends, whatever the others do.
  given: as for join. works: the program works in several processes.

  Raises ValueError as join; for several, if the program does not work in them;
  for one that was started in another way than process 0.
  """
  if given != 'auto':
    faulthandler.disable()  # JAX's word on one that is gone should be the last
  if not join(given):
    yield
    return
  faulthandler.disable()
  if not is_first():
    sys.stdout = open(os.devnull, 'w')
  try:
    _check_alike(works)
    yield
  except BaseException as error:
    if isinstance(error, RuntimeError):
      # A collective fails at once if a process dies, but does not say which.
      words = f'{fields.first_line(error)}; if a process is gone, JAX names it'
      print(f'{words} within {_NAMED} s', file=sys.stderr, flush=True)
      time.sleep(_NAMED)
    # JAX would wait for the others when it ends, and they for its arrays.
    status = 2 if isinstance(error, ValueError | OSError) else 1
    timer = threading.Timer(_LEAVE, os._exit, (status,))
    timer.daemon = True
    timer.start()
    raise


def _check_alike(works: bool) -> None:
  """Raises ValueError unless all processes run the same, which can be split."""
  if not works:
    raise ValueError(
      f'{jax.process_count()} processes: this program runs in one; start one, '
      'with --distributed=off'
    )
  given = absl_flags.FLAGS.flag_values_dict()
  del given['distributed']
  run = hashlib.sha256(f'{jax.__version__} {sorted(given.items())}'.encode())
  package = pathlib.Path(__file__).parent
  for path in (pathlib.Path(sys.argv[0]), *sorted(package.rglob('*.py'))):
    run.update(path.read_bytes())
  if other := differing(run.hexdigest()):
    raise ValueError(
      f'process {other}: its flags, config, code or version of jax are not '
      'those of process 0; start all with the same'
    )


def join(given: str) -> bool:
  """Joins this process to a job, before JAX touches a device.

  Returns whether there are several. If one then dies, or does not answer for
  some seconds, JAX ends all others and says which it was.

  given: 'off'; 'ADDRESS,N,I': process I of N, of which process 0 listens at
    ADDRESS (host:port); 'auto': as a TPU pod, srun or mpirun has set it up,
    found without a network where there is none of those.

  Raises ValueError for another form, or if the processes did not meet.
  """
  if given == 'off' or (given == 'auto' and not _in_cluster()):
    return False
  # It would swallow SIGTERM while a program loads; `interrupts` takes the rest.
  jax.config.update('jax_enable_preemption_service', False)
  where: Any = (None,) * 3 if given == 'auto' else _place(given)
  # JAX would abort, with a stack, and not say who is missing.
  late = threading.Timer(_START, _end_late, (given,))
  late.daemon = True
  late.start()
  try:
    jax.distributed.initialize(
      *where,
      cluster_detection_method=None if given == 'auto' else 'deactivate',
      initialization_timeout=2 * _START,
      heartbeat_timeout_seconds=_SILENCE,
      # All wait there for a process 0 that still writes a model.
      shutdown_timeout_seconds=3600,
    )
  except ValueError:
    if given == 'auto':  # no cluster, whatever it looked like
      return False
    raise
  except (OSError, RuntimeError) as error:
    raise ValueError(
      f'distributed={given}: the processes did not meet where process 0 can be '
      f'reached ({str(error).splitlines()[0]})'
    ) from error
  finally:
    late.cancel()
  return jax.process_count() > 1


def _end_late(given: str) -> None:
  print(
    f'{os.path.basename(sys.argv[0])}: distributed={given}: not all processes '
    f'met within {_START} s; start every one, where it can reach process 0',
    file=sys.stderr,
    flush=True,
  )
  os._exit(2)


def _place(given: str) -> tuple[str, int, int]:
  """Splits ADDRESS,N,I into (address, processes, this one's number)."""
  match given.rsplit(',', 2):
    case [address, count, index] if count.isdecimal() and index.isdecimal():
      host, _, port = address.rpartition(':')
      if host and port.isdecimal() and int(index) < int(count):
        return address, int(count), int(index)
  raise ValueError(
    f'distributed={given}: allowed are auto, off, or ADDRESS,N,I, such as '
    '10.0.0.2:8476,4,0 in the first of 4 processes'
  )


def _in_cluster() -> bool:
  """Tells whether this may be one of several processes; asks no network."""
  counts = ('SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE')
  return any(int(os.environ.get(x) or 1) > 1 for x in counts) or has_tpu()


def has_tpu() -> bool:
  """Tells whether JAX will find a TPU; touches no device and no network."""
  return _has('tpu', '/dev/accel*', '/dev/vfio/[0-9]*', plugins=('libtpu',))


def has_gpu() -> bool:
  """Tells whether JAX will find an NVIDIA GPU; touches no device."""
  plugins = 'jax_cuda13_plugin', 'jax_cuda12_plugin'
  return _has('cuda,gpu', '/dev/nvidia[0-9]*', plugins=plugins)


def _has(platforms: str, *devices: str, plugins: tuple[str, ...]) -> bool:
  """Tells whether a platform is wanted, and has a device and a plugin."""
  wanted = os.environ.get('JAX_PLATFORMS') or platforms
  return (
    bool({*wanted.split(',')} & {*platforms.split(',')})
    and any(map(glob.glob, devices))
    and any(map(importlib.util.find_spec, plugins))
  )


# --- between processes --------------------------------------------------


def is_first() -> bool:
  """Tells whether this is process 0, which alone prints and writes results."""
  return jax.process_index() == 0


def put(tree: Any, where: jax.sharding.Sharding | None) -> Any:
  """Puts arrays on the devices of all; a host array is the same in all."""
  if where is None or where.is_fully_addressable:
    return jax.device_put(tree, where)

  def one(x):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      return jax.jit(lambda x: x, out_shardings=where)(x)
    x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.make_array_from_callback(x.shape, where, lambda i: x[i])

  return jax.tree.map(one, tree)


def fetch(tree: Any) -> Any:
  """Copies arrays to the host of every process; all have to call it."""

  def one(x):
    spread = isinstance(x, jax.Array) and not (
      x.is_fully_addressable or x.is_fully_replicated
    )
    return multihost_utils.process_allgather(x, tiled=True) if spread else x

  return jax.device_get(jax.tree.map(one, tree))


def from_first(make: Callable[[], T]) -> T:
  """Shares process 0's make(), or its ValueError; all have to call this."""
  if jax.process_count() == 1:
    return make()
  content, error = b'', None
  if is_first():
    try:
      content = pickle.dumps((make(), None))
    except ValueError as e:
      content, error = pickle.dumps((None, e)), e
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
  # A power of two: each size is a program.
  wide = np.zeros(1 << max(8, (size - 1).bit_length()), np.uint8)
  wide[: len(content)] = np.frombuffer(content, np.uint8)
  wide = multihost_utils.broadcast_one_to_all(wide)
  made, wrong = pickle.loads(wide[:size].tobytes())
  if wrong:
    raise error or wrong
  return made


def anywhere(flags: Any) -> Any:
  """Tells which flags are true in any process; all have to call it."""
  if jax.process_count() == 1:
    return flags
  return multihost_utils.process_allgather(np.asarray(flags)).any(0)


def differing(text: str) -> int | None:
  """Finds the first process whose text is not process 0's; None: no such."""
  same = from_first(lambda: text) == text
  every_P = multihost_utils.process_allgather(np.array(same))
  return None if every_P.all() else int(np.argmin(every_P))
