"""The machine's name, the commit of this code, and how fast a matmul runs."""

import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import program
from specdec_jax.models import weights

# A call that reads memory once and returns gigabytes a second.
Read = functools.partial[float]
TURNS = 16
# The widest first: flags of a CPU.
_VECTORS = {
  'avx512_vnni': 'AVX-512 VNNI',
  'avx_vnni': 'AVX-VNNI',
  'avx512f': 'AVX-512',
  'avx2': 'AVX2',
}


def describe() -> dict[str, Any]:
  """Names the hardware and the versions of the software."""
  device = jax.devices()[0]
  head, dirty = commit()
  version = importlib.metadata.version
  pinned = hasattr(os, 'sched_getaffinity')
  return {
    'platform': device.platform,
    'device': device.device_kind,
    'devices': jax.device_count(),
    'cpu': _cpu_name(program.cpu()),
    'cores': len(os.sched_getaffinity(0)) if pinned else os.cpu_count(),
    'python': platform.python_version(),
    'jax': jax.__version__,
    'jaxlib': version('jaxlib'),
    'flax': version('flax'),
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
    'commit': head,
    'dirty': dirty,
  }


def commit(*paths: str) -> tuple[str, bool]:
  """Finds this code's commit, and whether files have changed since.

  paths: git pathspecs, from the root: the last commit that changed one of them.
  """
  changed = _git('status', '--porcelain', '--', *paths)
  head = _git('log', '-1', '--format=%H', '--', *paths)
  return head or 'unknown', bool(changed)


def made_by(commit: str, changed: bool) -> str:
  """Says the two values from `commit` as pages print them."""
  return f'Commit {commit[:12]}{" with changes" if changed else ""}'


def matmul_flops(dtype: str) -> float:
  """Measures one device's floating-point operations/s in a large matmul."""
  size = 1024 if jax.default_backend() == 'cpu' else 8192
  x = filled((size, size), dtype)
  fastest = max(repeated(functools.partial(read, matvec, x, x)))
  return 2.0 * size**3 * fastest * 1e9 / x.nbytes


def read(program, *args) -> float:
  """Measures one call, which reads the last of args, in GB/s.

  On an accelerator TURNS times, for a call takes 0.1 ms to begin and to end.
  """
  turns = 1 if jax.default_backend() == 'cpu' else TURNS
  run = program if turns == 1 else functools.partial(_turns, program)
  start = time.perf_counter()
  jax.block_until_ready(run(*args))
  return turns * args[-1].nbytes / (time.perf_counter() - start) / 1e9


@functools.partial(jax.jit, static_argnums=0)
def _turns(program, first, *rest):
  """Runs the program TURNS times, each time after the one before."""

  def body(_, one):
    y = program(first * one.astype(first.dtype), *rest)
    # Still 1, as the compiler cannot know; all of y is needed for it.
    return 1 + 1e-30 * jnp.tanh(jnp.max(y.astype(jnp.float32)))

  return jax.lax.fori_loop(0, TURNS, body, jnp.float32(1))


def repeated(read: Read) -> list[float]:
  """Measures each call's GB/s, over at least 5 calls and 0.4 seconds in all."""
  read()
  found: list[float] = []
  start = time.monotonic()
  while len(found) < 5 or time.monotonic() - start < 0.4:
    found.append(read())
  return found


@jax.jit
def matvec(x_1K, w_KN):
  # The model's own matmul, with its bf16 row padding: the same work.
  return weights.matmul(x_1K, w_KN)


@functools.partial(jax.jit, static_argnums=(0, 1))
def filled(shape, dtype):
  return jnp.full(shape, 0.5, dtype)


def _cpu_name(text: str) -> str:
  """Says 'AMD EPYC (AVX2)' of program.cpu's text: two of one name may differ in
  usable kernels."""
  found = re.search(r'model name\s*: (.+)', text)
  name, known = found[1] if found else platform.machine(), text.split()
  widest = next((x for flag, x in _VECTORS.items() if flag in known), '')
  if program.plain_cpu():
    widest = f'{widest} alone, by SPECDEC_JAX_ISA'
  return f'{name} ({widest})' if widest else name


def _git(*args: str) -> str:
  root = str(pathlib.Path(__file__).parents[1])
  try:
    done = subprocess.run(
      ['git', '-C', root, *args], capture_output=True, text=True, timeout=10
    )
  except (OSError, subprocess.TimeoutExpired):
    return ''
  return done.stdout.strip() if done.returncode == 0 else ''
