"""Compiling the CPU kernels: what is cached, and what happens without."""

import importlib.util
import platform
import stat
import subprocess
import sys

import jax
import pytest

from specdec_jax import program
from specdec_jax.io import load
from specdec_jax.kernels import library


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
  library.load.cache_clear()
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path))
  yield
  library.load.cache_clear()


def compiler(tmp_path, script: str) -> str:
  path = tmp_path / 'my_cc'
  path.write_text(f'#!/bin/sh\n{script}\n')
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  return str(path)


def test_without_a_compiler_xla_decodes_and_one_line_says_so(
  monkeypatch, caplog
):
  monkeypatch.setattr(library, '_loaded', {})
  monkeypatch.setattr(library, '_compiler', lambda: [])
  with caplog.at_level('WARNING'):
    model = load.load('random:tiny')
  assert not model.config.run.packed
  (line,) = caplog.messages
  assert 'no C compiler' in line and 'XLA' in line


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
  monkeypatch.setattr(library, '_loaded', {})
  failing = 'echo "rows.c: In function f:\nrows.c:1: error: no" >&2; exit 1'
  monkeypatch.setenv('CC', compiler(tmp_path, failing))
  why = library.load(tmp_path)
  assert why.endswith('my_cc failed: rows.c:1: error: no')
  assert not list(tmp_path.glob('rows-*'))


def test_each_cpu_and_compiler_has_its_own_library(monkeypatch, tmp_path):
  touch = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
  monkeypatch.setenv('CC', compiler(tmp_path, touch))
  names = set()
  for cpu, isa in (('one', ''), ('another', ''), ('one', 'avx2')):
    monkeypatch.setenv('SPECDEC_JAX_ISA', isa)
    monkeypatch.setattr(program, 'cpu', lambda cpu=cpu: cpu)
    names.add(library._built(library._compiler(), tmp_path))
  assert len(names) == 3 and all(path.exists() for path in names)

  def refuse(*args, **named):
    raise AssertionError('compiled again')

  monkeypatch.setattr(subprocess, 'run', refuse)
  assert library._built(library._compiler(), tmp_path) in names


@pytest.mark.parametrize('cache', ['a file/cache', 'a file', '/proc/cache'])
def test_where_nothing_can_be_kept_the_kernels_still_load(
  monkeypatch, tmp_path, caplog, cache
):
  """As in a home that cannot be written; a line says what it costs."""
  (tmp_path / 'a file').write_text('')
  touch = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
  monkeypatch.setenv('CC', compiler(tmp_path, touch))
  path = library._built(library._compiler(), tmp_path / cache)
  assert path.read_text() == 'made\n' and tmp_path not in path.parents
  (line,) = caplog.messages
  assert str(tmp_path / cache) in line and 'set SPECDEC_JAX_CACHE to' in line


# Lanes, flags of a compiler, and an instruction that only this path has, of
# vectors of this size.
PATHS = {
  'AVX-512 VNNI': (16, 'avx512f avx512bw avx512vnni', 'vpdpbusd', 'zmm'),
  'AVX-512': (16, 'avx512f avx512bw', 'vpmaddubsw', 'zmm'),
  'AVX-VNNI': (8, 'avx2 fma f16c avxvnni', 'vpdpbusd', 'ymm'),
  'AVX2': (8, 'avx2 fma f16c', 'vpmaddubsw', 'ymm'),
  'AVX': (8, 'avx', '', ''),
  'plain C': (4, '', '', ''),
  'ARM': (4, '', '', ''),
}


@pytest.mark.parametrize(
  'kind', ['Q4_1', pytest.param('Q6_K', marks=pytest.mark.more)]
)
@pytest.mark.parametrize('path', PATHS)
def test_every_path_compiles_whatever_this_cpu_has(tmp_path, path, kind):
  """Only compiled: tests of products run those that this CPU has."""
  lanes, flags, instruction, vector = PATHS[path]
  command = library._compiler()
  if path == 'ARM':
    if not importlib.util.find_spec('ziglang'):
      pytest.skip('needs ziglang, which compiles for other CPUs')
    command = [sys.executable, '-m', 'ziglang', 'cc']
    command += ['-target', 'aarch64-linux-gnu']
  elif not command or platform.machine() != 'x86_64':
    pytest.skip('needs a compiler on x86')
  # Not optimised, in a seventh of the time: intrinsics are what they are.
  command += ['-O0', '-S', '-I', jax.ffi.include_dir()]
  command += [f'-m{x}' for x in flags.split()]
  rows = f'-DWIDE={32 if lanes == 16 else 16}', f'-DLANES={lanes}'
  made = tmp_path / 'made.s'
  for one in (
    library.ROWS._replace(flags=rows),
    library.quantised(kind, lanes),
  ):
    source = str(library._HERE / one.source)
    subprocess.run([*command, *one.flags, source, '-o', made], check=True)
  text = made.read_text()
  for name in ('vpdpbusd', 'pmaddubsw'):
    lines = [line for line in text.splitlines() if name in line]
    assert bool(lines) == (name in instruction)
    assert all(vector in line for line in lines)
