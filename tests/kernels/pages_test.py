"""Huge pages: the arrays stay what they are."""

import pathlib
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.kernels import pages


def huge(address: int) -> int:
  """Kilobytes on huge pages of the mapping that holds an address."""
  text = pathlib.Path('/proc/self/smaps').read_text()
  for found in re.finditer(
    r'^([0-9a-f]+)-([0-9a-f]+) (?:.*\n)+?AnonHugePages: *([0-9]+)', text, re.M
  ):
    if int(found[1], 16) <= address < int(found[2], 16):
      return int(found[3])
  return 0


@pytest.mark.skipif(sys.platform != 'linux', reason='huge pages of Linux')
def test_an_array_moves_to_huge_pages_and_keeps_its_values():
  half = 2**14  # of 32 MB
  theirs = np.ones(2**23, np.float32)  # NumPy asks for them too
  if huge(theirs.ctypes.data + 2**22) < half:
    pytest.skip('this machine gives no huge pages now')
  x = jnp.arange(2**23, dtype=jnp.float32) + 1
  address = x.unsafe_buffer_pointer()
  assert pages.enlarge(x) is x and x.unsafe_buffer_pointer() == address
  assert huge(address + 2**22) >= half
  np.testing.assert_array_equal(x, np.arange(2**23, dtype=np.float32) + 1)


def held() -> int:
  text = pathlib.Path('/proc/self/status').read_text()
  return int(re.findall(r'RssAnon:\s+(\d+) kB', text)[0])


@pytest.mark.skipif(sys.platform != 'linux', reason='memory of Linux')
def test_what_is_freed_between_arrays_is_given_back():
  """Arrays of 100 KB, of which every 50th stays: 80 MB of 82."""
  every = [np.ones(100_000, np.uint8) for _ in range(820)]
  stay, before = every[::50], held()
  del every
  pages.trim()
  assert before - held() > 60_000
  assert all(x.all() for x in stay)
