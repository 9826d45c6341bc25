"""Strict switches for every test; see style R16."""

import contextlib
import functools
import os
import pathlib

# Before jax is imported: tests run on eight fake CPU devices, and jaxlib 0.10.2
# miscompiles a narrow matvec + reduce without the second flag (jax#39103).
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_cpu_experimental_ynn_fusion_type=-reduce',
  ]
).strip()

import jax
import pytest
from absl import flags
from jax._src import compiler

flags.FLAGS.mark_as_parsed()
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')
jax.config.update('jax_debug_nans', True)


@pytest.fixture
def x64():
  """Runs one test in float64, where speculation is exact token for token."""
  with jax.enable_x64(True):
    yield


@contextlib.contextmanager
def _less_optimised():
  name = 'jax_disable_most_optimizations'
  before, made = jax.config.read(name), compiler.get_compile_options

  # A module of MLIR for every fusion is half of what is left. No public switch
  # turns that off for some programs only, and jaxlib 0.11 has none at all.
  @functools.wraps(made)
  def plainer(*args, **kwargs):
    options = made(*args, **kwargs)
    options.env_option_overrides = [
      *options.env_option_overrides,
      ('xla_cpu_use_fusion_emitters', False),
    ]
    return options

  jax.config.update(name, True)
  if jax.__version_info__ < (0, 11):
    compiler.get_compile_options = plainer
  yield
  compiler.get_compile_options = made
  jax.config.update(name, before)


@pytest.fixture
def compile_in_less_time():
  """For tests of what is reported or compared; programs run slower."""
  with _less_optimised():
    yield


@pytest.fixture(scope='module')
def all_compile_in_less_time():
  """The same for a file with the fixtures that its tests share."""
  with _less_optimised():
    yield


@pytest.fixture(autouse=True, scope='module')
def few_programs():
  """Drops compiled programs before the kernel's 65,530 maps are used up."""
  yield
  maps = pathlib.Path('/proc/self/maps')
  if maps.exists() and maps.read_text().count('\n') > 20_000:
    jax.clear_caches()


def pytest_collection_modifyitems(items):
  for item in items:
    if item.get_closest_marker('slow'):
      item.add_marker(pytest.mark.timeout(3600))
