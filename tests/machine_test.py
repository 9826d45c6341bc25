"""Reads of memory: how often a call of an accelerator repeats them."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import machine
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
def test_a_cpu_is_named_with_what_kernels_can_use(tmp_path, text, name):
  (tmp_path / 'cpuinfo').write_text(text)
  assert machine._cpu_name(tmp_path / 'cpuinfo') == name
