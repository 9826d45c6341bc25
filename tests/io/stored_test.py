"""A model from the blocks of a .gguf file, beside the same one in float32."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import specdec_jax
from specdec_jax import sharding
from specdec_jax.io import load
from specdec_jax.models import convert, lm, weights, work
from tests.io import tiny
from tests.kernels import model_test, quantised_test

Kind = gguf.GGMLQuantizationType
SIZES = dict(width=64, head_dim=16, mlp=96, vocab=320)
LARGE = dict(width=256, heads=8, kv_heads=4, head_dim=32, mlp=512)


@pytest.fixture(autouse=True, scope='module')
def compiled():
  tiny.needs_kernels()


def blocks_of(kinds: dict[str, str]):
  """For write_gguf: the kind of the first part of a name that is found in it.

  No package of ours encodes K-quants: their numbers are others, not x.
  """

  def quantise(name, x):
    kind = next(kind for part, kind in kinds.items() if part in name)
    if not kind.endswith('_K'):
      return Kind[kind], gguf.quantize(x, Kind[kind])
    raw = quantised_test.blocks(kind, x.shape[1], x.shape[0], len(name))
    for at in quantised_test.HALVES[kind]:  # a hundredth: as small as others
      raw[..., at + 1] -= 4 * 6
    return Kind[kind], raw.reshape(len(x), -1)

  return quantise


def written(folder, quantise, **changes):
  """A file of a Llama of SIZES: a.gguf."""
  folder.mkdir(exist_ok=True)
  c = tiny.config(**SIZES | changes)
  return tiny.write_gguf(folder / 'a.gguf', c, quantise=quantise)


# Family, sizes, kinds by parts of names, and what is not kept as it is: the
# widths of k and v are no multiple of 32 in the second.
CASES = {
  'one kind': ('llama', SIZES | dict(tied=True), {'': 'Q4_1'}, ''),
  'untied': ('qwen2', SIZES | dict(kv_heads=1, tied=False), {'': 'Q8_0'}, ''),
  'mixed': (
    'qwen2',
    SIZES,
    {'attn_v': 'Q8_0', 'output': 'MXFP4', 'up': 'F16', '': 'Q4_0'},
    'o',
  ),
  'one float': ('qwen2', SIZES, {'attn_k': 'F32', '': 'Q4_1'}, ''),
  'large': (
    *('llama', LARGE),
    {
      **{'attn_q': 'Q3_K', 'attn_output': 'Q5_0'},
      **{'attn_v': 'Q6_K', 'output': 'Q6_K', '': 'Q4_K'},
    },
    '',
  ),
}


def apart(m, n):
  """The largest difference of two models' logits, over n's largest logit."""
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 40)))
  found, wanted = (
    np.asarray(tiny.logits(x.config, x.params, tokens)) for x in (m, n)
  )
  return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.mark.more
@pytest.mark.parametrize('name', CASES)
def test_has_the_values_and_nearly_the_logits_of_float32(tmp_path, name):
  family, sizes, kinds, dense = CASES[name]
  c, path = tiny.config(family, **sizes), tmp_path / f'{name}.gguf'
  tiny.write_gguf(path, c, family, quantise=blocks_of(kinds))
  stored, plain = (load.load(path, dtype=x) for x in ('stored', 'float32'))
  assert stored.label == plain.label.replace('dequantised', 'stored')
  assert stored.digest == plain.digest
  assert work.step_parameters(stored.params) == (
    work.step_parameters(plain.params)
  )
  assert work.step_bytes(stored.params) < 0.7 * work.step_bytes(plain.params)
  for key, x in lm.flatten(stored.params).items():
    if key in ('head', 'embed') or key.endswith('kernel'):
      kept = not isinstance(x, weights.Panels | jax.Array)
      assert kept == (key.split('/')[-2:][0] not in dense.split()), key
  values = [convert.plain(m.config, m.params)[1] for m in (stored, plain)]
  tiny.check_equal(*map(lm.nest, values))
  ids = jnp.array([[0, 31, 32, 319]])
  table = values[0].get('embed', values[0]['head'].T)
  found = stored.model.embed(stored.params, ids, ids)
  np.testing.assert_array_equal(found, table[ids])
  assert 0 < apart(stored, plain) < 2e-4


def test_names_and_arithmetics_tell_every_rounding_apart(tmp_path):
  """Bfloat16 of codes is a second rounding, of floats none."""
  path = written(tmp_path, Kind.Q4_1, depth=1)
  asked = (
    ('float32', 'auto', 'dequantised', 'float32'),
    ('bfloat16', 'auto', 'again bfloat16', 'bfloat16'),
    ('stored', 'auto', 'stored', 'float32, stored'),
    ('stored', 'int8', 'stored, int8 rows', 'float32, stored, int8 rows'),
    ('int8', 'auto', 'again int8', 'float32, Q8_0'),
    ('int4', 'auto', 'again int4', 'float32, Q4_1 and Q8_0'),
    ('int4', 'xla', 'again int4', 'float32, int4'),  # other groups
  )
  for dtype, kernels, name, arithmetic in asked:
    m = load.load(path, dtype=dtype, kernels=kernels)
    assert (m.label, m.arithmetic) == (f'a (Q4_1, {name})', arithmetic)
  # Most of its bytes are numbers.
  mixed = lambda name, x: (
    (Kind.F32, np.float32(x))
    if name.startswith(('token_embd', 'output'))
    else (Kind.Q4_1, gguf.quantize(x, Kind.Q4_1))
  )
  path = written(tmp_path / 'b', mixed, depth=1)
  for dtype, kernels, name in (
    ('float32', 'auto', 'a (F32)'),
    ('bfloat16', 'auto', 'a (F32) (bfloat16)'),
    ('stored', 'int8', 'a (F32) (int8 rows)'),
  ):
    assert load.load(path, dtype=dtype, kernels=kernels).label == name
  floats = load.load('random:tiny', dtype='bfloat16')
  assert floats.label == 'tiny (random weights)'


def broken(name, x):
  raw = gguf.quantize(x, Kind.Q4_1)
  raw[0, 2:4] = 0, 0x7C  # an infinite minimum
  return Kind.Q4_1, raw


@pytest.mark.more
def test_rows_of_int8_are_coarser_and_as_exact(tmp_path):
  path = written(tmp_path, Kind.Q4_1)
  fine, coarse = (
    specdec_jax.load(path, dtype='stored', kernels=x) for x in ('auto', 'int8')
  )
  assert coarse.label == 'a (Q4_1, stored, int8 rows)'
  assert fine.digest == coarse.digest
  assert 1e-3 < apart(coarse, fine) < 0.1
  alone = model_test.logits(coarse.config, coarse.params, 1, 1)
  together = model_test.logits(coarse.config, coarse.params, 1, 5)
  np.testing.assert_array_equal(together, alone)


def test_rows_of_int8_need_codes(tmp_path, monkeypatch):
  """Which is known before any weight is read."""
  other = written(tmp_path, Kind.MXFP4)
  monkeypatch.setattr(load, 'read', None)
  for source, dtype in (('random:tiny', 'float32'), (other, 'stored')):
    with pytest.raises(ValueError) as caught:
      load.load(source, dtype=dtype, kernels='int8')
    assert str(caught.value) == (
      f"{source}: kernels='int8' is for matrices that are codes on one CPU: "
      "dtype='stored', 'int8' or 'int4'; else give kernels='auto'"
    )
  with pytest.raises(ValueError, match='no int8 rows: give'):
    load.load('tests.your_own_model_test:make', kernels='int8')


def test_a_damaged_block_is_refused(tmp_path):
  path = written(tmp_path, broken, tied=True)
  with pytest.raises(ValueError, match='embd.weight has 1 scales that are not'):
    load.load(path)


@pytest.mark.parametrize(
  'options, backend, dtype',
  [
    (dict(kernels='xla'), 'cpu', 'float32'),
    (dict(scan_layers=True), 'cpu', 'float32'),
    (dict(mesh=sharding.make_mesh(1, 2)), 'cpu', 'float32'),
    ({}, 'gpu', 'bfloat16'),
  ],
)
def test_without_kernels_codes_are_numbers_and_said_to_be(
  tmp_path, caplog, monkeypatch, options, backend, dtype
):
  path = written(tmp_path, Kind.Q4_0)
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  with caplog.at_level('WARNING'):
    m = load.load(path, **options)
  assert caplog.messages == [
    f'{path}: no kernel here reads Q4_0: these matrices are read as {dtype}'
  ]
  assert not m.config.run.packed
  again = 'again bfloat16' if dtype == 'bfloat16' else 'dequantised'
  assert (m.label, m.arithmetic) == (f'a (Q4_0, {again})', dtype)


WHOLE = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}


@pytest.mark.parametrize(
  'kind, other', [*((x, x) for x in WHOLE), ('BF16', 'F16')]
)
@pytest.mark.parametrize('form', ['gguf', 'folder'])
def test_floats_stay_as_they_are_stored_where_that_loses_nothing(
  tmp_path, form, kind, other
):
  """Half the bytes of float32, and on the kernels its logits, bit for bit."""
  if form == 'gguf':
    path = written(tmp_path, blocks_of({'down': other, '': kind}))
  else:
    c = tiny.config(**SIZES)
    of = lambda name: WHOLE[other if 'down' in name else kind]
    arrays = {name: x.astype(of(name)) for name, x in tiny.arrays(c).items()}
    path = tiny.write_folder(tmp_path / 'a', c, weights=arrays)
  m, wide = load.load(path), load.load(path, dtype='float32')
  narrow = kind == other == 'BF16'
  assert m.dtype == ('bfloat16' if narrow else 'float32') and not m.codes
  ratio = work.step_bytes(wide.params) / work.step_bytes(m.params)
  assert (ratio > 1.9) if narrow else (ratio == 1)
  assert apart(m, wide) == 0
  scaled = lambda x: dataclasses.replace(
    x, lm_config=dataclasses.replace(x.config, embed_scale=9.8)
  )
  assert apart(scaled(m), scaled(wide)) == 0  # as a Gemma's embedding
  assert load.load(path, kernels='xla').dtype == 'float32'
