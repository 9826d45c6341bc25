"""Reads of memory: how often a call of an accelerator repeats them."""

import itertools
import os

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import machine, program
from tests import fakes


def test_every_turn_of_an_accelerators_read_is_needed():
  x_1K, w_KN = jnp.ones((1, 32)), jnp.ones((32, 64))
  turns = jax.make_jaxpr(machine._turns, static_argnums=0)
  jaxpr = turns(machine.matvec, x_1K, w_KN).jaxpr
  found = fakes.matmul_flops(jaxpr, itertools.repeat(machine.TURNS))
  assert found == machine.TURNS * 2 * 32 * 64
  # The compiler cannot know that each turn begins with a 1.
  assert machine._turns(machine.matvec, x_1K, w_KN) == 1


@pytest.mark.parametrize('backend, turns', [('cpu', 1), ('gpu', machine.TURNS)])
def test_bytes_of_all_turns_count(monkeypatch, backend, turns):
  clock = iter([1.0, 3.0])
  monkeypatch.setattr(machine.time, 'perf_counter', lambda: next(clock))
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  x_1K, w_KN = jnp.ones((1, 8)), jnp.ones((8, 16))
  gb_s = machine.read(machine.matvec, x_1K, w_KN)
  assert gb_s == pytest.approx(turns * 8 * 16 * 4 / 2e9)


@pytest.mark.parametrize(
  'text, name',
  [
    (
      'model name : A\nflags : fpu avx2 avx512f avx512_vnni\n',
      'A (AVX-512 VNNI)',
    ),
    ('model name : A\nflags : fpu avx2\nmodel name : A\n', 'A (AVX2)'),
    ('model name : A\nflags : fpu avx\n', 'A'),
    ('Processor : B\n', machine.platform.machine()),
  ],
)
def test_a_cpu_is_named_with_what_kernels_can_use(text, name):
  assert machine._cpu_name(text) == name


def test_a_cpu_that_is_to_do_with_less_says_so(monkeypatch, tmp_path):
  monkeypatch.setenv('SPECDEC_JAX_ISA', 'avx2')
  text = 'model name : A\nflags : avx2 avx_vnni avx512f avx512_vnni amx_int8'
  path = tmp_path / 'cpuinfo'
  path.write_text(text)
  found = program.cpu(path)
  assert found == 'model name : A\nflags : avx2'
  assert machine._cpu_name(found) == 'A (AVX2 alone, by SPECDEC_JAX_ISA)'
  monkeypatch.setenv('XLA_FLAGS', '')
  program.set_xla_flags()
  assert '--xla_cpu_max_isa=AVX2' in os.environ['XLA_FLAGS']
  monkeypatch.setenv('SPECDEC_JAX_ISA', 'sse')
  with pytest.raises(ValueError, match='SPECDEC_JAX_ISA=sse: allowed is avx2'):
    program.set_xla_flags()
