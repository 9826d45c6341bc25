"""Compiling the CPU kernels: what is cached, and what happens without."""

import stat
import subprocess

import jax
import pytest

from configs import default
from specdec_jax import settings, sharding
from specdec_jax.io import files, load
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
  monkeypatch.setattr(library, '_loaded', [])
  monkeypatch.setattr(library, '_compiler', lambda: [])
  with caplog.at_level('WARNING'):
    model = load.load('random:tiny')
  assert not model.config.packed
  (line,) = caplog.messages
  assert 'no C compiler' in line and 'XLA' in line


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
  monkeypatch.setattr(library, '_loaded', [])
  failing = 'echo "rows.c: In function f:\nrows.c:1: error: no" >&2; exit 1'
  monkeypatch.setenv('CC', compiler(tmp_path, failing))
  why = library.load(tmp_path)
  assert why.endswith('my_cc failed: rows.c:1: error: no')
  assert not list(tmp_path.glob('rows-*'))


def test_each_cpu_and_compiler_has_its_own_library(monkeypatch, tmp_path):
  touch = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
  monkeypatch.setenv('CC', compiler(tmp_path, touch))
  names = set()
  for cpu in ('one', 'another'):
    monkeypatch.setattr(library, '_cpu', lambda cpu=cpu: cpu)
    names.add(library._built(library._compiler(), tmp_path))
  assert len(names) == 2 and all(path.exists() for path in names)

  def refuse(*args, **named):
    raise AssertionError('compiled again')

  monkeypatch.setattr(subprocess, 'run', refuse)
  assert library._built(library._compiler(), tmp_path) in names


def test_kernels_can_be_turned_off():
  assert not load.load('random:tiny', kernels='xla').config.packed
  with pytest.raises(ValueError, match="kernels='gpu': allowed are auto, xla"):
    load.load('random:tiny', kernels='gpu')


def test_only_a_single_cpu_gets_them(monkeypatch, tmp_path):
  mesh = sharding.make_mesh(data=2, model=1)
  assert not load.load('random:tiny', mesh=mesh).config.packed
  monkeypatch.setattr(jax, 'default_backend', lambda: 'tpu')
  assert not library.ready('auto', tmp_path)
  assert not list(tmp_path.glob('rows-*'))


def test_a_draft_follows_its_target():
  for kernels in library.CHOICES:
    c = default.get_config()
    c.target.source, c.draft.source = 'random:tiny', 'random:tiny:1'
    c.target.kernels, c.decode.methods = kernels, ('lm',)
    e = settings.load(settings.settings(c))
    draft = settings.engine(e, 'lm', 2).draft
    packed = kernels == 'auto' and library.ready(kernels, files.cache_folder())
    assert e.target.config.packed == draft.config.packed == packed
