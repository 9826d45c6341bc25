"""Huge pages: the arrays stay what they are."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.kernels import pages


def huge() -> int:
  """Kilobytes of this process on huge pages."""
  text = pathlib.Path('/proc/self/smaps_rollup').read_text()
  (found,) = re.findall(r'AnonHugePages: *([0-9]+)', text)
  return int(found)


@pytest.mark.skipif(sys.platform != 'linux', reason='huge pages of Linux')
def test_an_array_moves_to_huge_pages_and_keeps_its_values():
  setting = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
  if not setting.exists() or '[never]' in setting.read_text():
    pytest.skip('this machine has no transparent huge pages')
  x = jnp.arange(2**23, dtype=jnp.float32) + 1
  address, before = x.unsafe_buffer_pointer(), huge()
  assert pages.enlarge(x) is x and x.unsafe_buffer_pointer() == address
  assert huge() > before or '[always]' in setting.read_text()
  np.testing.assert_array_equal(x, np.arange(2**23, dtype=np.float32) + 1)


def test_shapes_have_no_pages():
  assert jax.eval_shape(pages.enlarge, jnp.ones(3)).shape == (3,)
