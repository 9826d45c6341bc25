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
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.models import layers

# K of x_1K @ w_KN; N fills the bytes. Some shapes stream slower than others.
_ROWS = (1536, 4096, 8192)
# Far beyond any last-level cache, some of which hold more than 100 MB.
_BYTES = {'cpu': 2**28, 'other': 2**30}


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

  paths: git pathspecs, from the root, of the files to look at; () for all.
  """
  changed = _git('status', '--porcelain', '--', *paths)
  return _git('rev-parse', 'HEAD') or 'unknown', bool(changed)


def made_by(commit: str, changed: bool) -> str:
  """The two values of `commit` as pages print them."""
  return f'Commit {commit[:12]}{" with changes" if changed else ""}'


def ceiling(dtype: str, *, small: bool = False) -> dict[str, Any]:
  """Memory bandwidth of one device, by program, and the most of them.

  Returns {'matvec KxN': GB/s, 'sum': GB/s, 'sustained': GB/s, 'best': GB/s}:
  medians over calls, the largest of them, and the best single call. small:
  arrays that fit into a cache, for a smoke test; no longer a bound.
  """
  kind = 'cpu' if jax.default_backend() == 'cpu' else 'other'
  size = (2**20 if small else _BYTES[kind]) // jnp.dtype(dtype).itemsize
  reads = {}
  for K in _ROWS[:1] if small else _ROWS:
    N = size // K // 128 * 128
    x_1K, w_KN = jnp.ones((1, K), dtype), _filled(K, N, dtype=dtype)
    reads[f'matvec {K}x{N}'] = w_KN.nbytes, _seconds(_matvec, x_1K, w_KN)
  x = _filled(size, dtype=dtype)
  reads['sum'] = x.nbytes, _seconds(_sum, x)
  of = lambda kind: {k: n / kind(s) / 1e9 for k, (n, s) in reads.items()}
  sustained = of(statistics.median)
  most = {'sustained': max(sustained.values()), 'best': max(of(min).values())}
  return sustained | most


def matmul_flops(dtype: str) -> float:
  """Floating-point operations a second of one device in a large matmul."""
  size = 1024 if jax.default_backend() == 'cpu' else 8192
  x = _filled(size, size, dtype=dtype)
  return 2.0 * size**3 / min(_seconds(_matvec, x, x))


@jax.jit
def _matvec(x_1K, w_KN):
  # The model's own matmul, with its bf16 row padding: the same work.
  return layers.matmul(x_1K, w_KN)


@jax.jit
def _sum(x):
  return jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32))


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=('dtype',))
def _filled(*shape, dtype):
  return jnp.full(shape, 0.5, dtype)


def _seconds(f, *args) -> list[float]:
  """Seconds of each call, over at least 5 calls and 0.4 seconds in all."""
  jax.block_until_ready(f(*args))
  took: list[float] = []
  while len(took) < 5 or sum(took) < 0.4:
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    took.append(time.perf_counter() - start)
  return took


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
