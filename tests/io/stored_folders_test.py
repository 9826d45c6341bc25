"""Quantised folders as they are stored, beside the same ones dequantised."""

import ml_dtypes
import numpy as np
import pytest

from specdec_jax.io import load, plan, sources
from specdec_jax.kernels import quantised
from specdec_jax.models import convert, lm, weights, work
from tests.io import quantised_test, stored_test, tiny


@pytest.fixture(autouse=True, scope='module')
def compiled():
  tiny.needs_kernels()


SMALL = dict(width=64, head_dim=16, mlp=96)
LARGE = dict(width=128, head_dim=32, mlp=256)
SORTED = dict(group=32, mixed=False)
# Family, how it is quantised, sizes, and how its matrices are kept. One scale
# of 96 inputs is that of three groups of 32.
CASES = {
  'gptq': ('gptq', SORTED, SMALL, 'U4_32'),
  'act-order': ('gptq', dict(group=32), SMALL, 'U4_32'),
  'orders of their own': ('compressed', dict(group=32), SMALL, ''),
  'phi3': ('gptq', SORTED, SMALL | dict(arch='phi3'), 'U4_32'),
  'awq': ('awq', dict(group=64), LARGE, 'U4_64'),
  'compressed': (
    *('compressed', dict(group=96, mixed=False)),
    *(dict(width=192, head_dim=48, mlp=192), 'U4_32'),
  ),
  'mlx': ('mlx', dict(group=32), SMALL, 'U8_32'),
  'int8': ('int8', {}, LARGE, 'U8_128'),
  'nf4': ('nf4', dict(block=64, table=quantised.NF4), LARGE, 'NF4_64'),
}


DEAR = 'awq', 'compressed'


@pytest.mark.parametrize(
  'case',
  [pytest.param(x, marks=[pytest.mark.more] * (x in DEAR)) for x in CASES],
)
def test_has_the_values_and_nearly_the_logits_of_float32(case, tmp_path):
  family, how, sizes, kind = CASES[case]
  folder = quantised_test.write(tmp_path / 'model', family, how=how, **sizes)
  other = quantised_test.dequantised(folder, sizes.get('arch', 'llama'))
  opened = sources.open_source(str(folder))
  said = plan.make(opened, 'stored').bytes()
  stored, plain = load.load(opened, dtype='stored'), load.load(str(other))
  label = quantised_test.FAMILIES[family][2]
  assert stored.label == f'model ({label}, stored)'
  for key, x in lm.flatten(stored.params).items():
    quantised = key.endswith('kernel') or (key == 'head' and family == 'mlx')
    if kind and quantised:
      assert isinstance(x, weights.Quantised) and x.kind == kind, key
  taken = work.tree_bytes(stored.params)
  if kind and 'act-order' not in case:  # an order is not counted
    assert said == pytest.approx(taken, rel=0.01)
  values = [convert.plain(m.config, m.params)[1] for m in (stored, plain)]
  for name, x in values[1].items():
    # A float32 scale rounds what it multiplies.
    atol = 1e-6 if family == 'int8' else 0
    np.testing.assert_allclose(values[0][name], x, rtol=0, atol=atol)
  assert 0 < stored_test.apart(stored, plain) < 2e-4


def finer(weights):
  """One matrix in groups that no kernel reads."""
  parts = quantised_test.gptq(np.random.default_rng(1), 96, 64)
  weights.update({quantised_test.UP + k: x for k, x in parts.items()})


def narrow(weights):
  for name in 'model.embed_tokens.weight', 'lm_head.weight':
    weights[name] = weights[name].astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize('all_kept', [True, False])
def test_what_is_not_quantised_stays_bfloat16(tmp_path, all_kept):
  """But not beside what is dequantised, which would be rounded again."""
  change = lambda weights: (narrow(weights), all_kept or finer(weights))
  folder = quantised_test.write(
    tmp_path / 'model', 'gptq', change, how=SORTED, **SMALL
  )
  plain = load.load(str(quantised_test.dequantised(folder)), dtype='float32')
  m = load.load(str(folder))
  assert m.dtype == ('bfloat16' if all_kept else 'float32')
  said = plan.make(sources.open_source(str(folder)), 'stored').bytes()
  assert said == pytest.approx(work.tree_bytes(m.params), rel=0.01)
  assert 0 < stored_test.apart(m, plain) < 2e-4


@pytest.mark.parametrize(
  'family, change, how, kinds',
  [
    ('awq', None, dict(group=16), 'AWQ 4-bit in groups of 16'),
    ('fp8', None, {}, 'FP8'),
    ('nf4', None, {}, 'bitsandbytes nf4'),
    ('nf4', None, dict(block=64), 'bitsandbytes nf4'),  # of another table
    ('gptq', finer, SORTED, 'GPTQ 4-bit in groups of 16'),  # one alone
  ],
)
def test_matrices_that_cannot_be_kept_are_dequantised_and_named(
  tmp_path, caplog, family, change, how, kinds
):
  how = dict(how=how, **SMALL)
  folder = quantised_test.write(tmp_path / 'model', family, change, **how)
  with caplog.at_level('WARNING'):
    m = load.load(str(folder), dtype='stored')
  (line,) = (x for x in caplog.messages if 'kernel' in x)
  assert line == (
    f'{folder}: no kernel here reads {kinds}: these matrices are read as '
    'float32'
  )
  assert m.label.endswith(', stored)' if change else ', dequantised)')
