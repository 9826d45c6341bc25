"""Strict switches for every test; see style R16."""

import functools
import gc
import os
import pathlib
import tempfile

# Before jax is imported: tests run on eight fake CPU devices, and jaxlib 0.10.2
# miscompiles a narrow matvec + reduce without this flag (jax#39103).
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

gc.set_threshold(100_000, 20, 100)  # tracing makes many objects that stay
flags.FLAGS.mark_as_parsed()
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_default_matmul_precision', 'highest')
jax.config.update('jax_debug_nans', True)

# What a worker, or a program that it starts, compiled is not compiled again.
_CACHE = 'JAX_COMPILATION_CACHE_DIR'
if _CACHE not in os.environ:
  _compiled = tempfile.TemporaryDirectory()
  os.environ[_CACHE] = _compiled.name
jax.config.update('jax_compilation_cache_dir', os.environ[_CACHE])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)


@pytest.fixture
def x64():
  """Runs one test in float64, where speculation is exact token for token."""
  with jax.enable_x64(True):
    yield


# Nearly all of a test is compiling. Loops that these passes clone took a sixth
# of it, a module of MLIR for each fusion a half of what was left.
_LOOPS = (
  'while-loop-invariant-code-motion',
  'simplify-while-loops',
  'while-loop-trip-count-annotator',
)
_LESS = [
  ('xla_disable_hlo_passes', ','.join(_LOOPS)),
  ('xla_cpu_parallel_codegen_split_count', 1),
]
if jax.__version_info__ < (0, 11):
  _LESS.append(('xla_cpu_use_fusion_emitters', False))
_options = compiler.get_compile_options


@functools.wraps(_options)
def _less_optimised(*args, **kwargs):
  options = _options(*args, **kwargs)
  options.env_option_overrides = [*options.env_option_overrides, *_LESS]
  return options


def _optimise(whole: bool) -> None:
  """Compiles as users do, or in less time: no public switch does all of it."""
  jax.config.update('jax_disable_most_optimizations', not whole)
  compiler.get_compile_options = _options if whole else _less_optimised


_optimise(False)


@pytest.fixture
def optimised():
  """For tests of what XLA makes, and of those that compute for long."""
  _optimise(True)
  yield
  _optimise(False)


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
