"""Quantised checkpoints: their values to the bit, and what is refused."""

import hashlib
import json
import pathlib
import re
import runpy

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from specdec_jax.io import files, hf, names, sources
from specdec_jax.io.arrays import stored as stored_lib
from specdec_jax.io.quantised import form as form_lib
from specdec_jax.io.quantised import reader
from specdec_jax.models import lm
from tests.io import tiny

GOLDEN = tiny.GOLDEN / 'quantised'
TYPES = {
  'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16,
  'I8': np.int8, 'U8': np.uint8, 'I16': np.int16, 'I32': np.int32,
  'U32': np.uint32, 'I64': np.int64, 'F8_E4M3': np.uint8,
}  # fmt: skip

STATE = 'weight.quant_state.bitsandbytes__nf4'


# --- values ------------------------------------------------------------------


def golden(family):
  """{case: (facts, {part: (dtype, array)})} of a file of make.py."""
  path = GOLDEN / f'{family}.safetensors'
  with safetensors.safe_open(path, 'numpy') as f:
    about = {k: json.loads(x) for k, x in f.metadata().items()}
  # In an order of their own: metadata has another in every process.
  out = {case: (about[case], {}) for case in sorted(about)}
  for name, x in safetensors.deserialize(path.read_bytes()):
    case, part = name.split('.', 1)
    array = np.frombuffer(x['data'], TYPES[x['dtype']]).reshape(x['shape'])
    out[case][1][part] = x['dtype'], array
  return out


CASES = {
  f'{path.stem}: {case}': found
  for path in sorted(GOLDEN.glob('*.safetensors'))
  for case, found in golden(path.stem).items()
}


def planned(settings, parts):
  """(reader, plans, other arrays) of one matrix, x.weight, of these parts."""
  checked, _ = reader.settings(
    {'quantization_config': settings}, pathlib.Path('config.json')
  )
  arrays = {
    f'x.{k}': stored_lib.Stored(dtype, x.shape, lambda x=x: x)
    for k, (dtype, x) in parts.items()
  }
  plans, plain = reader.plan('x', checked, arrays)
  return reader.opened('x', names.HF, plans, plain), plans, plain


def opened(settings, parts):
  return planned(settings, parts)[0]


@pytest.mark.parametrize('case', CASES)
def test_values_are_those_of_the_format_s_own_package(case):
  facts, parts = CASES[case]
  plan, _, plain = planned(facts['settings'], parts)
  assert not plain
  x = plan.get('x.weight')
  assert x.dtype == np.float32
  assert list(x.shape) == list(plan.shapes['x.weight']) == facts['shape']
  x = np.ascontiguousarray(x + np.float32(0))
  assert hashlib.sha256(x.tobytes()).hexdigest() == facts['sha256']


@pytest.mark.parametrize('case', CASES)
def test_what_is_kept_has_these_values_too(case):
  """To the bit where scales have 16 bits."""
  facts, parts = CASES[case]
  plan, plans, _ = planned(facts['settings'], parts)
  form, want = plans['x.weight'].form(), plan.get('x.weight')
  if form.table is not None:
    assert plan.kinds == {'x.weight': plan.kind}
    return
  # All groups of four, that each case has some that share a scale.
  x = form_lib.blocks(form, 4)
  scale, least = np.moveaxis(x[..., :8].view(np.float32), -1, 0)[..., None]
  found = (x[..., 8:] * scale + least).reshape(want.shape)
  want = want[:, plan.orders.get('x.weight', np.arange(want.shape[1]))]
  narrow = all(dtype != 'F32' for dtype, _ in parts.values())
  step = 0 if narrow else np.abs(scale).max()
  np.testing.assert_allclose(found, want, rtol=0, atol=2.0**-16 * step)


def damaged(dtype, x):
  """A part that was cut, reshaped, or stored as something else."""
  yield dtype, x[:-1] if x.ndim else x[None]
  yield dtype, x[..., :-1] if x.ndim else x[None, None]
  yield dtype, x.reshape(-1)
  yield dtype, x[..., None]
  yield dtype, x[:0] if x.ndim else x
  yield dtype, np.zeros_like(x)
  yield 'I64', np.zeros(x.shape, np.int64)
  yield 'F32', np.zeros(x.shape, np.float32)


@pytest.mark.parametrize('case', CASES)
def test_whatever_a_part_is_like_nothing_but_a_value_error(case):
  facts, parts = CASES[case]
  for part, (dtype, x) in parts.items():
    others = {k: y for k, y in parts.items() if k != part}
    for found in [{}, *({part: y} for y in damaged(dtype, x))]:
      try:
        plan, plans, _ = planned(facts['settings'], others | found)
        for name in plans:
          plan.get(name)
      except ValueError as error:
        assert str(error).startswith('x: x: '), error


@pytest.mark.parametrize(
  'case, other, kind',
  [
    ('gptq: 8 bits, symmetric, mixed', 4, 'GPTQ 8-bit'),
    ('mlx: 8 bits', 2, 'MLX 8-bit'),
  ],
)
def test_some_matrices_may_have_other_bits_than_are_stated(case, other, kind):
  """The shapes tell."""
  facts, parts = CASES[case]
  plan = opened(facts['settings'] | dict(bits=other), parts)
  assert plan.kind == kind
  want = opened(facts['settings'], parts).get('x.weight')
  np.testing.assert_array_equal(plan.get('x.weight'), want)


def test_inputs_of_compressed_have_the_scales_of_their_groups():
  facts, parts = CASES['compressed: 4 bits, groups']
  dtype, scale = parts['weight_scale']
  groups = np.random.default_rng(0).permutation(64) * scale.shape[1] // 64
  each = {'weight_g_idx': ('I32', groups.astype(np.int32))}
  own = {'weight_scale': (dtype, scale[:, groups])}
  x, y = (opened(facts['settings'], parts | x) for x in (each, own))
  np.testing.assert_array_equal(x.get('x.weight'), y.get('x.weight'))


def test_the_version_of_auto_round_is_its_packing():
  facts, parts = CASES['gptq: 4 bits, mixed']
  own = dict(quant_method='auto-round', packing_format='auto_round:gptqmodel')
  x, y = (opened(s, parts).get('x.weight') for s in (own, facts['settings']))
  np.testing.assert_array_equal(x, y)


# What convert_gptq_v2_to_v1_format_module of GPTQModel's utils/model.py takes
# from each word of zeros, from the first on; of 3 bits before version 7 alone.
LESS = {
  2: [0b01010101010101010101010101010101],
  3: [
    0b00100100100100100100100100100100,
    0b10010010010010010010010010010010,
    0b01001001001001001001001001001001,
  ],
  4: [0b00010001000100010001000100010001],
  8: [0b00000001000000010000000100000001],
}


def packed(codes, bits):
  """Codes [rows, count] as words, the first in the lowest bits."""
  each = (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8)
  flat = each.reshape(len(codes), -1)
  return np.packbits(flat, -1, bitorder='little').view(np.uint32)


def of_zeros(bits, sym=False):
  """(zeros [4, 32], among them each 0 to the last, all in the middle if sym;
  function(words of them) -> parts; what those say), with g_idx."""
  rng = np.random.default_rng(bits)
  zeros = rng.integers(0, 1 << bits, (4, 32))
  zeros[0], zeros[1, :3], zeros[2, ::3] = 0, (0, 0, (1 << bits) - 1), 0
  zeros = np.full_like(zeros, 1 << (bits - 1)) if sym else zeros
  codes = rng.integers(0, 1 << bits, (32, 64))
  scale = np.full((4, 32), 0.5, np.float16)

  def parts(words):
    return dict(
      qweight=('I32', packed(codes, bits).T.view(np.int32)),
      qzeros=('I32', words.view(np.int32)),
      scales=('F16', scale),
      g_idx=('I32', np.arange(64, dtype=np.int32) // 16),
    )

  return zeros, parts, 0.5 * (codes - zeros.T.repeat(16, 1))


@pytest.mark.parametrize('bits', LESS)
@pytest.mark.parametrize('sym', [False, True, None])
@pytest.mark.parametrize(
  'by, words',
  [
    (None, False),
    (dict(quantizer=['auto_gptq:0.7.1']), False),
    (dict(quantizer=['gptqmodel:2.2.0']), True),
    (dict(quantizer='gptqmodel:1.4.1-dev'), True),
    (dict(quantizer=['optimum:1.24.0', 'gptqmodel:6.0.3']), True),
    (dict(damp_percent=0.05, quantizer=['gptqmodel:7.0.0']), 'not 3'),
    (dict(quantizer=['gptqmodel:12.1.0'], group=3), 'not 3'),
  ],
)
def test_zeros_are_lessened_by_words_where_gptqmodel_did(bits, sym, by, words):
  """Its words borrow from one code to the next; others mend each by itself."""
  zeros, parts, want = of_zeros(bits, sym is not False)
  full, less = (1 << bits) - 1, np.array(LESS[bits], np.uint32)
  by_words = words and (bits != 3 or words is True)
  stored = packed(zeros, bits) - np.resize(less, bits)
  stored = stored if by_words else packed(zeros - 1 & full, bits)
  settings = dict(quant_method='gptq', bits=bits, sym=sym, meta=by)
  found = opened(settings, parts(stored)).get('x.weight')
  np.testing.assert_array_equal(found, want)
  # Without a name the data of symmetric ones tell.
  if sym is not False:
    own = opened(dict(settings, meta=None), parts(stored)).get('x.weight')
    np.testing.assert_array_equal(own, want)


@pytest.mark.parametrize('bits', LESS)
@pytest.mark.parametrize('key', ['format', 'checkpoint_format'])
def test_zeros_of_version_2_are_as_they_are_stored(bits, key):
  """Whoever wrote them, and whichever key says so."""
  zeros, parts, want = of_zeros(bits)
  for by in (None, dict(quantizer=['gptqmodel:2.2.0'])):
    settings = dict(quant_method='gptq', bits=bits, sym=False, meta=by)
    settings[key] = 'gptq_v2'
    found = opened(settings, parts(packed(zeros, bits))).get('x.weight')
    np.testing.assert_array_equal(found, want)


@pytest.mark.parity
@pytest.mark.parametrize('family', sorted({x.split(':')[0] for x in CASES}))
def test_the_packages_still_write_the_golden_files(family):
  pytest.importorskip('torch', reason='needs torch (extra parity)')
  make = runpy.run_path(str(GOLDEN / 'make.py'))
  try:
    made = make['make'](family)
  except ModuleNotFoundError as error:
    pytest.skip(f'needs {error.name}')
  have = golden(family)
  assert made.keys() == have.keys()
  for case, (settings, parts, want) in made.items():
    facts, stored = have[case]
    assert facts['settings'] == settings
    assert facts['sha256'] == make['digest'](want)
    assert stored.keys() == parts.keys()
    for part, x in parts.items():
      same = (
        x.contiguous().reshape(-1).view(make['torch'].uint8).numpy().tobytes()
      )
      assert stored[part][1].tobytes() == same, (case, part)


# --- folders -----------------------------------------------------------------


def words(rng, rows, columns):
  """Random codes, whatever their bits."""
  return rng.integers(0, 1 << 32, (rows, columns), np.uint32).view(np.int32)


def scales(rng, rows, columns):
  return (rng.random((rows, columns)) * 0.05).astype(np.float16)


def gptq(rng, O, I, group=16, mixed=True):
  # As matrices of the same inputs have it: one order.
  same = np.random.default_rng(I)
  groups = (same.permutation(I) if mixed else np.arange(I)) // group
  return dict(
    qweight=words(rng, I // 8, O),
    qzeros=words(rng, I // group, O // 8),
    scales=scales(rng, I // group, O),
    g_idx=groups.astype(np.int32),
    bias=np.zeros(O, np.float16),
  )


def awq(rng, O, I, group=16):
  return dict(
    qweight=words(rng, I, O // 8),
    qzeros=words(rng, I // group, O // 8),
    scales=scales(rng, I // group, O),
  )


def compressed(rng, O, I, group=16, mixed=True):
  groups = (rng.permutation(I) if mixed else np.arange(I)) // group
  return dict(
    weight_packed=words(rng, O, I // 8),
    weight_scale=scales(rng, O, I // group).astype(ml_dtypes.bfloat16),
    weight_shape=np.array([O, I]),
    weight_g_idx=groups.astype(np.int32),
    input_scale=np.ones(1, np.float32),
  )


def fp8(rng, O, I):
  x = rng.standard_normal((O, I)).astype(ml_dtypes.float8_e4m3fn)
  scale = rng.random((-(-O // 20), -(-I // 20))).astype(np.float32)
  return dict(weight=x, weight_scale_inv=scale)


def nf4(rng, O, I, block=20, table=None):
  table = rng.standard_normal(16) if table is None else table
  state = dict(quant_type='nf4', blocksize=block, dtype='float32', shape=[O, I])
  return {
    'weight': rng.integers(0, 256, (O * I // 2, 1), np.uint8),
    'weight.absmax': rng.random(-(-O * I // block)).astype(np.float32),
    'weight.quant_map': table.astype(np.float32),
    STATE: np.frombuffer(json.dumps(state).encode(), np.uint8),
  }


def int8(rng, O, I):
  codes = rng.integers(-127, 128, (O, I), np.int8)
  scale = rng.random(O).astype(np.float32)
  return dict(weight=codes, SCB=scale, weight_format=np.array(0, np.uint8))


def mlx(rng, O, I, group=16):
  scale, bias = (scales(rng, O, I // group) - 0.01 for _ in range(2))
  codes = words(rng, O, I * 6 // 32).view(np.uint32)
  return dict(weight=codes, scales=scale, biases=bias)


# Family -> (settings, function(rng, out, in) -> parts, label).
FAMILIES = {
  'gptq': (
    dict(quant_method='gptq', bits=4, group_size=16, sym=False), gptq,
    'GPTQ 4-bit',
  ),
  'awq': (
    dict(quant_method='awq', bits=4, group_size=16, version='GEMM'), awq,
    'AWQ 4-bit',
  ),
  'compressed': (
    dict(
      quant_method='compressed-tensors', format='pack-quantized',
      config_groups=dict(a=dict(weights=dict(num_bits=4))),
    ),
    compressed, 'compressed-tensors 4-bit',
  ),
  'fp8': (
    dict(quant_method='fp8', weight_block_size=[20, 20]), fp8, 'FP8',
  ),
  'nf4': (dict(quant_method='bitsandbytes'), nf4, 'bitsandbytes nf4'),
  'int8': (dict(quant_method='bitsandbytes'), int8, 'bitsandbytes int8'),
  'mlx': (dict(bits=6, group_size=16), mlx, 'MLX 6-bit'),
}  # fmt: skip


def stored(settings, **more):
  return (
    tiny.settings(tiny.config()) | dict(quantization_config=settings) | more
  )


def joined(arrays):
  """Arrays as a Phi-3 has them: q, k and v in one, and gate and up."""
  out = {}
  for name, x in arrays.items():
    name = re.sub('[qkv](?=_proj)', 'qkv', name.replace('gate_proj', 'up_proj'))
    name = name.replace('.up_proj', '.gate_up_proj')
    out[name] = np.concatenate([out[name], x]) if name in out else x
  return out


def write(folder, family, change=None, how=None, arch='llama', **sizes):
  """A folder whose projections are quantised; of MLX the head too, tied.

  Args:
    folder, family: where, and of FAMILIES.
    change: changes what is stored, in place.
    how: what else the family's function takes.
    arch: 'llama' or 'phi3'.
    **sizes: of tiny.config.
  """
  (settings, make, _), how = FAMILIES[family], how or {}
  if 'group' in how:
    settings = settings | dict(group_size=how['group'])
  rng, c = np.random.default_rng(0), tiny.config(tied=family == 'mlx', **sizes)
  ends = '_proj.weight', 'embed_tokens.weight' if c.tied else '_proj.weight'
  weights, arrays = {}, tiny.arrays(c)
  for name, x in (joined(arrays) if arch == 'phi3' else arrays).items():
    start = name.removesuffix('weight')
    parts = make(rng, *x.shape, **how) if name.endswith(ends) else {'weight': x}
    weights |= {start + k: part for k, part in parts.items()}
  if change:
    change(weights)
  tiny.write_folder(folder, c, weights=weights)
  own = tiny.settings(c, arch) | dict(quantization_config=settings)
  (folder / 'config.json').write_text(json.dumps(own))
  return folder


def dequantised(folder, arch='llama'):
  """The folder beside it that has the values of each matrix, tested above."""
  c, reader, _ = hf.open_folder(folder, 'x')
  names = [x for x in reader.shapes if not reader.spare(x)]
  values = {name: np.ascontiguousarray(reader.get(name)) for name in names}
  return tiny.write_folder(folder.with_name('plain'), c, arch, weights=values)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_folder_is_read_as_the_dequantised_one(family, tmp_path):
  folder = write(tmp_path / 'model', family)
  one, two = tiny.read(folder), tiny.read(dequantised(folder))
  assert one.config == two.config
  tiny.check_equal(one.params, two.params)
  assert one.label == f'model ({FAMILIES[family][2]}, dequantised)'
  assert one.digest == files.digest([folder / hf.SINGLE])
  narrow = lm.flatten(tiny.read(folder, dtype='bfloat16').params)
  for name, x in lm.flatten(one.params).items():
    want = np.asarray(x).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(narrow[name], want)


UP = 'model.layers.0.mlp.up_proj.'


def put(part, value):
  """Changes a part of one matrix: to a function of what is there."""
  return lambda weights: weights.update(
    {UP + part: np.ascontiguousarray(value(weights[UP + part]))}
  )


def drop(part):
  return lambda weights: weights.pop(UP + part)


def groups_of(*bits):
  each = {i: dict(weights=dict(num_bits=i)) for i in bits}
  return dict(config_groups=each)


def with_nan(x):
  x = x.copy()
  x.flat[3] = np.nan
  return x


@pytest.mark.parametrize(
  'family, change, message',
  [
    ('gptq', drop('scales'), 'up_proj: no scales beside g_idx, qweight, qzer'),
    ('gptq', drop('qweight'), r'up_proj.\w+ is I32; allowed are F32.*quantiza'),
    ('gptq', put('scales', with_nan), r'up_proj.weight has \d+ values that ar'),
    ('gptq', put('scales', lambda x: x[:1]), 'fit no .*scales F16 .1, 48.'),
    ('gptq', put('qweight', lambda x: x.astype('i8')), 'qweight is I64 .*I32'),
    ('gptq', put('g_idx', np.zeros_like), 'does not give 16 inputs to each'),
    ('gptq', put('bias', np.ones_like), 'no place for .*up_proj.bias'),
    ('awq', put('qzeros', lambda x: x[:1]), 'of 16: .*qzeros I32 .1, 6.'),
    ('compressed', put('weight_shape', lambda x: x[::-1]), '.32, 48. is not'),
    ('compressed', put('weight_packed', lambda x: x[:, 1:]), '0 ways fit'),
    ('compressed', put('weight_scale', lambda x: x[:, [0, 1, 1]]), 'no blocks'),
    ('fp8', drop('weight_scale_inv'), 'no weight_scale of .*: weight F8'),
    ('nf4', put('weight.absmax', lambda x: x[1:]), 'weight.absmax F32 .76.'),
    ('nf4', put(STATE, lambda x: x[:-1]), 'nf4 is damaged, or not'),
    ('int8', put('SCB', lambda x: x[1:]), 'a scale a row: SCB F32 .47.'),
    ('int8', put('weight_format', lambda x: x + x.dtype.type(2)), 'mat 2'),
    ('mlx', put('weight', lambda x: x[:, 5:]), 'bits in groups of'),
  ],
)  # fmt: skip
def test_a_damaged_matrix_is_named(family, change, message, tmp_path):
  folder = write(tmp_path / 'model', family, change)
  with pytest.raises(ValueError, match=message):
    tiny.read(folder)


# How caches and activations may be rounded, by the names of compressed-tensors,
# AutoFP8, ModelOpt and Quark.
IDLE = (
  'k_scale v_scale q_scale kv_scale k_zero_point attn.v_scale k_proj.k_scale '
  'v_proj.v_scale prob_output_scale k_proj.output_scale q_proj.input_scale '
  'v_proj.output_zero_point'.split()
)


@pytest.mark.parametrize('family', ['fp8', 'compressed', 'gptq', 'nf4', ''])
def test_scales_of_caches_and_activations_are_left_out(family, tmp_path):
  """Of a model that is not quantised too: its cache alone may have been."""

  def idle(weights):
    one = np.full(1, 0.03, np.float32)
    start = 'model.layers.1.self_attn.'
    weights |= {start + x: one for x in IDLE}

  if family:
    make = lambda name, **how: write(tmp_path / name, family, **how)
    found, want = make('idle', change=idle), make('without')
  else:
    c = tiny.config()
    weights = tiny.arrays(c)
    want = tiny.write_folder(tmp_path / 'without', c)
    idle(weights)
    found = tiny.write_folder(tmp_path / 'idle', c, weights=weights)
    own = dict(quant_method='compressed-tensors', kv_cache_scheme={})
    (found / 'config.json').write_text(json.dumps(stored(own)))
  tiny.check_equal(tiny.read(found).params, tiny.read(want).params)


@pytest.mark.parametrize('name', ['weight_scale', 'k_scales', 'qk_scale'])
def test_other_scales_have_no_place(name, tmp_path):
  name = f'model.layers.0.self_attn.{name}'
  more = lambda x: x.update({name: np.ones(1, np.float32)})
  folder = write(tmp_path / 'model', 'fp8', more)
  with pytest.raises(ValueError, match=f'no place for .*{name}'):
    tiny.read(folder)


def half(parts):
  """Of 4 bits and 64 inputs those of 32, which may have 3 bits too."""
  cut = {k: (x[0], x[1][:, :32]) for k, x in parts.items() if 'sh' not in k}
  words = 'I32', parts['weight_packed'][1][:, :4]
  shape = 'I64', np.array([40, 32])
  return cut | dict(weight_packed=words, weight_shape=shape)


def three_groups(parts):
  cut = {k: (x[0], x[1][:3]) for k, x in parts.items() if k != 'g_idx'}
  return cut | dict(qweight=parts['qweight'])


GEMV, SYM = 'awq: gemv, 32', 'gptq: 4 bits, symmetric'
GROUPS, MLX = 'compressed: 4 bits, groups', 'mlx: 8 bits'
TWICE = dict(weight=('F16', np.zeros((32, 64), np.float16)))
ODD = lambda x: x | dict(qzeros=('I32', x['qzeros'][1] + 1))


@pytest.mark.parametrize(
  'case, settings, change, message',
  [
    (GEMV, dict(group_size='32'), dict, 'group_size=.32.; a number'),
    (GEMV, dict(group_size=48), dict, 'of 48: qweight I32 .32, 8.'),
    (GROUPS, groups_of(5), dict, r'0 ways fit \[5\] bits, of'),
    (GROUPS, groups_of(3, 4), half, r'2 ways fit \[3, 4\] bits'),
    (MLX, dict(group_size=64), dict, 'groups of 64'),
    (MLX, dict(group_size='32'), dict, 'a number is needed'),
    ('gptq: 2 bits', {}, TWICE.__or__, 'x: it is stored twice.* weight F16'),
    (SYM, {}, three_groups, '64 inputs are not 3 groups of one'),
    (SYM, {}, ODD, 'symmetric, but its zeros are 7 to 8'),
    # Entries of one matrix that are none.
    (SYM, dict(dynamic={'+:(': {}}), dict, '^x: x: its own settings: '),
    (SYM, dict(dynamic=['x']), dict, '^x: x: its own settings: '),
    (SYM, dict(extra_config=3), dict, '^x: x: its own settings: '),
  ],
)
def test_settings_and_parts_that_do_not_fit(case, settings, change, message):
  facts, parts = CASES[case]
  with pytest.raises(ValueError, match=message):
    opened(facts['settings'] | settings, change(parts)).get('x.weight')


def test_settings_tell_bits_where_two_would_fit():
  facts, parts = CASES[GROUPS]
  found = opened(facts['settings'] | groups_of(4), half(parts))
  assert found.kind == 'compressed-tensors 4-bit'


@pytest.mark.parametrize(
  'case, absent, stands_for',
  [
    ('awq: gemv, 128', 'group_size', 128),
    ('awq: gemm, 16', 'version', 'gemm'),
    ('gptq: 4 bits, symmetric', 'checkpoint_format', 'gptq'),
    ('gptq: 4 bits, symmetric', 'bits', 4),
    ('gptq: 2 bits', 'checkpoint_format', 'gptq'),
    ('fp8: blocks of 128', 'weight_block_size', [128, 128]),
  ],
)
def test_an_absent_setting_means_what_its_reader_takes_it_for(
  case, absent, stands_for
):
  facts, parts = CASES[case]
  given = dict(facts['settings'])
  given.pop(absent, None)
  one = opened(given, parts).get('x.weight')
  two = opened(given | {absent: stands_for}, parts).get('x.weight')
  np.testing.assert_array_equal(one, two)
  want = opened(facts['settings'], parts).get('x.weight')
  np.testing.assert_array_equal(one, want)


NAMES = ('x', 'model.x', 'language_model.x', 'model.language_model.x')


@pytest.mark.parametrize('name', NAMES)
def test_an_entry_of_one_matrix_comes_first(name):
  """8 bits in groups of 64 look like 4 in 128 of a matrix twice as wide."""
  facts, parts = CASES['mlx: 8 bits']
  scale = {k: ('F16', parts[k][1].repeat(2, 1)) for k in ('scales', 'biases')}
  parts = parts | scale  # in groups of 64
  all_of = lambda **own: opened(dict(bits=4, group_size=128, **own), parts)
  want = opened(dict(bits=8, group_size=64), parts)
  assert all_of().shapes == all_of(**{name: True}).shapes != want.shapes
  assert all_of(**{f'{name}.y': dict(group_size=64)}).shapes != want.shapes
  # MLX takes 64 where an entry has no group, whatever is said of all.
  for own in (dict(bits=8, group_size=64), dict(bits=8)):
    found = all_of(**{name: own})
    assert found.shapes == want.shapes and found.kind == 'MLX 8-bit'
    np.testing.assert_array_equal(found.get('x.weight'), want.get('x.weight'))


def gemv_settings(**own):
  return CASES['awq: gemv, 32'][0]['settings'] | dict(group_size=128) | own


@pytest.mark.parametrize(
  'own',
  [
    dict(
      dynamic={r'+:.*\.y$': dict(group_size=64), '+:x': dict(group_size=32)}
    ),
    dict(dynamic={r'.*model\.x$': dict(group_size=32), 'x': dict(bits=2)}),
    dict(extra_config={'y': dict(group_size=8), 'x': dict(group_size=32)}),
    dict(extra_config={'^x$': dict(group_size=32)}),
  ],
)
def test_entries_of_gptqmodel_and_auto_round(own):
  """The padded parts of a gemv do not tell its groups."""
  facts, parts = CASES['awq: gemv, 32']
  with pytest.raises(ValueError, match='of 4 bits in groups of 128'):
    opened(gemv_settings(), parts)
  found = opened(gemv_settings(**own), parts).get('x.weight')
  want = opened(facts['settings'], parts).get('x.weight')
  np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize('key', ['dynamic', 'extra_config'])
def test_one_matrix_may_be_asymmetric(key):
  zeros, parts, want = of_zeros(4)
  stored = parts(packed(zeros - 1 & 15, 4))
  settings = dict(quant_method='gptq', bits=4, sym=True)
  with pytest.raises(ValueError, match='symmetric, but its zeros'):
    opened(settings, stored).get('x.weight')
  settings[key] = {'x': dict(sym=False)}
  found = opened(settings, stored).get('x.weight')
  np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
  'targets, blocks',
  [
    ([['Linear'], ['re:.*\\.x$']], 1),
    ([['x'], ['Linear']], 0),
    ([['re:y', 'y'], ['Linear']], 1),
    ([['Linear'], ['y']], 0),
    ([['model.x'], ['re:x']], 0),
  ],
)
def test_a_group_of_compressed_tensors_is_of_its_targets(targets, blocks):
  """Two blocks of 24 or 32 rows are as many scales."""
  rng, sizes = np.random.default_rng(0), (24, 32)
  codes = rng.integers(0, 127, (40, 64)).astype(np.uint8)
  scale = np.array([[1.0], [2.0]], np.float32)
  parts = dict(weight=('F8_E4M3', codes), weight_scale=('F32', scale))
  groups = {
    str(i): dict(targets=x, weights=dict(block_structure=[tall, 64]))
    for i, (x, tall) in enumerate(zip(targets, sizes, strict=True))
  }
  settings = dict(quant_method='compressed-tensors', config_groups=groups)
  values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  want = values * scale.repeat(sizes[blocks], 0)[:40]
  found = opened(settings, parts).get('x.weight')
  np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
  'settings, message',
  [
    ('gptq', "quantization_config='gptq': give an object"),
    (dict(quant_method='hqq', nbits=4), "'hqq' and the keys .'nbits', 'quant"),
    (dict(quant_method='gptq', bits=4.0), 'bits=4.0 of gptq is not supported'),
    (dict(quant_method='gptq', bits=5), 'bits=5 of gptq is not .* allowed: 2,'),
    (dict(quant_method='gptq', format='marlin'), "checkpoint_format='marlin'"),
    (dict(quant_method='gptq', is_marlin_format=True), 'is_marlin_format=True'),
    (dict(quant_method='awq', version='exllama'), "version='exllama' of awq"),
    (
      dict(quant_method='compressed-tensors', format='nvfp4-pack-quantized'),
      "format='nvfp4-pack-quantized' of compressed-tensors is not supported",
    ),
    (
      dict(quant_method='compressed-tensors', transform_config={'R1': {}}),
      'transform_config=.* of compressed-tensors is not supported',
    ),
    (dict(bits=7, group_size=64), 'bits=7 of mlx is not supported; allowed: 2'),
    (dict(bits=4, mode='mxfp4'), "mode='mxfp4' of mlx is not supported"),
    (
      dict(quant_method='auto-round', packing_format='auto_round:exllama'),
      "'auto-round' and the keys .*'packing_format'.*'gptqmodel'",
    ),
  ],
)
def test_settings_that_are_not_read_are_named(settings, message, tmp_path):
  """Before the weights are looked at: there are none."""
  raw = stored(settings)
  (tmp_path / 'config.json').write_text(json.dumps(raw))
  with pytest.raises(ValueError, match=message):
    sources.open_source(str(tmp_path))


FP8 = dict(quant_method='auto-round', weight_block_size=[20, 20])
ROUND = dict(quant_method='auto-round', bits=4, group_size=16, sym=False)


@pytest.mark.parametrize(
  'family, settings, nested',
  [
    ('gptq', dict(quant_method='auto-round', bits=4, sym=False), False),
    ('gptq', dict(quant_method='gptq', bits=4, sym=False), True),
    ('awq', ROUND | dict(packing_format='auto_round:auto_awq'), False),
    ('fp8', FP8 | dict(packing_format='auto_round:fp8'), False),
  ],
)
def test_settings_in_other_places_and_words(family, settings, nested, tmp_path):
  folder = write(tmp_path / 'model', family)
  plain, own = dequantised(folder), stored(settings)
  if nested:
    inner = own | dict(model_type='mistral', sliding_window=None)
    own = dict(model_type='mistral3', text_config=inner)
  (folder / 'config.json').write_text(json.dumps(own))
  tiny.check_equal(tiny.read(folder).params, tiny.read(plain).params)


def test_a_quantised_tensor_without_settings_is_refused(tmp_path):
  folder = write(tmp_path / 'model', 'gptq')
  (folder / 'config.json').write_text(json.dumps(stored(None)))
  with pytest.raises(ValueError, match='g_idx is I32; .* quantization_config'):
    tiny.read(folder)
