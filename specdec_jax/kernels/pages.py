"""Puts weights in huge pages, for in those of 4 KB a pass also waits for
addresses; and frees what loading left."""

import ctypes
import sys

import jax
from jax import core

_SIZE = 2**21
_HUGEPAGE, _COLLAPSE = 14, 25  # of Linux' madvise; the second since 6.1


def enlarge(x: jax.Array) -> jax.Array:
  """Moves an array to huge pages and returns it: same address, same values.
  Acts only on one CPU under Linux, where the kernel does not refuse."""
  traced = isinstance(x, core.Tracer)
  if traced or sys.platform != 'linux' or jax.default_backend() != 'cpu':
    return x
  advise = ctypes.CDLL(None).madvise
  advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
  if len(x.devices()) == 1:
    first = x.unsafe_buffer_pointer()
    for page in range(first // _SIZE, -(-(first + x.nbytes) // _SIZE)):
      for advice in (_HUGEPAGE, _COLLAPSE):
        advise(page * _SIZE, _SIZE, advice)
  return x


def trim() -> None:
  """Gives freed memory back to the system: glibc keeps holes between arrays."""
  if sys.platform == 'linux':
    # Another C library, such as musl, has no such function.
    getattr(ctypes.CDLL(None), 'malloc_trim', lambda pad: None)(0)
