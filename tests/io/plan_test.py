"""What a plan says of every parameter, before any is read."""

import pathlib

import gguf
import pytest

import specdec_jax
from specdec_jax.io import names, plan, sources
from tests.io import tiny

ROOT = pathlib.Path(specdec_jax.__file__).parent


def test_a_row_says_where_a_matrix_lies_and_what_it_becomes(tmp_path):
  tiny.needs_kernels('Q4_1', 'Q8_0')
  c = tiny.config(width=64, head_dim=16, mlp=96, tied=True)
  kind = gguf.GGMLQuantizationType.Q4_1
  path = tiny.write_gguf(tmp_path / 'a.gguf', c, quantise=kind)
  opened, name = sources.open_source(str(path)), 'layers/1/mlp/up/kernel'
  up = names.Place(name, 'blk.1.ffn_up.weight', 0, 'Q4_1')
  row = lambda *how, **more: {
    x.name: x for x in plan.make(opened, *how, **more).rows
  }
  stored = row()[name]
  assert (stored.held, stored.kept, stored.places) == ('Q4_1', True, (up,))
  assert stored.bytes == stored.beside == 64 * 96 * 20 / 32
  again = row('int8')[name]
  assert (again.held, again.kept, again.beside) == ('Q8_0', False, 4 * 64 * 96)
  # Layers that are stacked lie in as many places.
  stack = row('float32', scan_layers=True)['layers/mlp/up/kernel']
  assert (stack.shape, stack.held, len(stack.places)) == ((2, 64, 96), '', 2)
  assert stack.places[1] == up


@pytest.mark.parametrize('kind', ['granite', 'olmo2'])
def test_a_dense_family_is_named_in_one_module(kind):
  files = [x.name for x in ROOT.rglob('*.py') if f"'{kind}'" in x.read_text()]
  assert files == ['families.py']


@pytest.mark.parametrize('form', ['fp8', 'mlx'])
def test_a_stored_format_is_a_module_and_its_row(form):
  files = [
    x.name for x in ROOT.rglob('*.py') if f'{form}.plan' in x.read_text()
  ]
  assert files == ['reader.py']
