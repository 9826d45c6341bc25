"""The machine's name and its measured memory bandwidth.

One autoregressive step reads every weight once, so weight bytes over bandwidth
bound its time from below. Bandwidth is measured, not taken from a data sheet.
"""

import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import sharding
from specdec_jax.kernels import calls, pages
from specdec_jax.models import layers

# A call that reads memory once and returns gigabytes a second.
Read = functools.partial[float]

# K of x_1K @ w_KN; N fills the bytes. Some shapes stream slower than others.
_ROWS = (1536, 4096, 8192)
# Far beyond any last-level cache, some of which hold more than 100 MB.
_BYTES = {'cpu': 2**28, 'other': 2**30}


class Ceiling(NamedTuple):
  """Memory bandwidth, and the speed that it allows.

  gb_s: by dtype, see bandwidth; before anything else ran.
  devices: devices that read at once.
  tok_s: upper bound on plain decoding, from the bytes that it reads at the
    sustained bandwidth; once the judged prompts have run, at `between`.
  between: GB/s of the fastest read between two judged prompts, the median.
  """

  gb_s: dict[str, dict[str, float]]
  devices: int
  tok_s: float
  between: float | None = None

  def beside(self, dtype: str, gb_s: Sequence[float]) -> 'Ceiling':
    """The ceiling by reads of this dtype made while the prompts were run."""
    between = statistics.median(gb_s)
    tok_s = self.tok_s * between / self.gb_s[dtype]['sustained']
    return self._replace(tok_s=tok_s, between=between)


def describe() -> dict[str, Any]:
  """Names of the hardware and versions of the software."""
  device = jax.devices()[0]
  head, dirty = commit()
  version = importlib.metadata.version
  return {
    'platform': device.platform,
    'device': device.device_kind,
    'devices': jax.device_count(),
    'cpu': _cpu_name(),
    'cores': _cores(),
    'python': platform.python_version(),
    'jax': jax.__version__,
    'jaxlib': version('jaxlib'),
    'flax': version('flax'),
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
    'commit': head,
    'dirty': dirty,
  }


def commit(*paths: str) -> tuple[str, bool]:
  """The commit of this code, and whether files have changed since.

  paths: git pathspecs, from the root, of the files to look at: the commit is
    the last that changed one of them; () for all.
  """
  changed = _git('status', '--porcelain', '--', *paths)
  head = _git('log', '-1', '--format=%H', '--', *paths)
  return head or 'unknown', bool(changed)


def made_by(commit: str, changed: bool) -> str:
  """The two values of `commit` as pages print them."""
  return f'Commit {commit[:12]}{" with changes" if changed else ""}'


def reads(
  dtype: str, *, packed: bool = False, small: bool = False
) -> dict[str, Read]:
  """Programs that read 256 MB on CPU, else 1 GB: x_1K @ w_KN, and a sum.

  packed: also by the CPU kernels, which read faster than XLA.
  small: arrays that fit into a cache, for a smoke test; no bound.
  """
  kind = 'cpu' if jax.default_backend() == 'cpu' else 'other'
  size = (2**20 if small else _BYTES[kind]) // jnp.dtype(dtype).itemsize
  filled = lambda *shape: pages.enlarge(_filled(shape, dtype))
  out = {}
  for K in _ROWS[:1] if small else _ROWS:
    N = size // K // 128 * 128
    x_1K, w_KN = jnp.ones((1, K), dtype), filled(K, N)
    out[f'matvec {K}x{N}'] = functools.partial(_read, _matvec, x_1K, w_KN)
  if packed:
    x_1K = jnp.ones((1, _ROWS[0]))
    panels = filled(size // x_1K.size // calls.WIDE, x_1K.size, calls.WIDE)
    out['kernel'] = functools.partial(_read, _kernel, x_1K, panels)
  out['sum'] = functools.partial(_read, _sum, filled(size))
  return out


def _read(program, *args) -> float:
  """Gigabytes a second of one call, which reads the last of args."""
  start = time.perf_counter()
  jax.block_until_ready(program(*args))
  return args[-1].nbytes / (time.perf_counter() - start) / 1e9


def bandwidth(programs: Mapping[str, Read]) -> dict[str, float]:
  """Gigabytes a second of one device, by program, and the most of them.

  Returns GB/s of each: medians over calls; with their largest as 'sustained'
  and the best single call as 'best'.
  """
  found = {name: _repeated(read) for name, read in programs.items()}
  sustained = {name: statistics.median(x) for name, x in found.items()}
  best = max(map(max, found.values()))
  return sustained | {'sustained': max(sustained.values()), 'best': best}


def kept(programs: Mapping[str, Read], found: Mapping[str, float]):
  """The reads to repeat later: all on CPU, else the fastest, for their memory.

  found: of bandwidth.
  """
  fastest = max(programs, key=found.__getitem__)
  cpu = jax.default_backend() == 'cpu'
  return [x for name, x in programs.items() if cpu or name == fastest]


def reading(blocks: Iterable, reads: Sequence[Read], gb_s: list[float]):
  """The blocks; before each the GB/s of the fastest read joins the list.

  The memory of a shared machine is not as fast a minute later.
  """
  fastest = lambda: max(read() for read in reads)
  for block in blocks:
    gb_s.append(sharding.from_first(fastest))
    yield block


def matmul_flops(dtype: str) -> float:
  """Floating-point operations a second of one device in a large matmul."""
  size = 1024 if jax.default_backend() == 'cpu' else 8192
  x = _filled((size, size), dtype)
  fastest = max(_repeated(functools.partial(_read, _matvec, x, x)))
  return 2.0 * size**3 * fastest * 1e9 / x.nbytes


@jax.jit
def _matvec(x_1K, w_KN):
  # The model's own matmul, with its bf16 row padding: the same work.
  return layers.matmul(x_1K, w_KN)


@jax.jit
def _kernel(x_1K, panels):
  return calls.linear(x_1K, panels, len(panels) * calls.WIDE)


@jax.jit
def _sum(x):
  return jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _filled(shape, dtype):
  return jnp.full(shape, 0.5, dtype)


def _repeated(read: Read) -> list[float]:
  """GB/s of each call, over at least 5 calls and 0.4 seconds in all."""
  read()
  found: list[float] = []
  start = time.monotonic()
  while len(found) < 5 or time.monotonic() - start < 0.4:
    found.append(read())
  return found


def _cpu_name() -> str:
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    return platform.processor() or platform.machine()
  names = re.findall(r'model name\s*: (.+)', text)
  return names[0] if names else platform.machine()


def _cores() -> int:
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _git(*args: str) -> str:
  root = str(pathlib.Path(__file__).parents[2])
  try:
    done = subprocess.run(
      ['git', '-C', root, *args], capture_output=True, text=True, timeout=10
    )
  except (OSError, subprocess.TimeoutExpired):
    return ''
  return done.stdout.strip() if done.returncode == 0 else ''
