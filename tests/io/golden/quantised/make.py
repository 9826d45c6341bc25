"""Writes matrices as each format's own package stores them (extra `parity`).

  python tests/io/golden/quantised/make.py [FAMILY ...]

FAMILY.safetensors has the parts of a few small matrices, CASE.PART, and under
CASE in its metadata the settings, and the shape and SHA-256 of what the package
makes of them in float32. Of autoawq 0.2.9 and gptqmodel 7.7.0, which install
with a GPU only, unpacked source distributions are wanted in PYTHONPATH; what is
imported of them needs torch alone.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import pathlib
import sys
import tempfile
import types

import numpy as np
import safetensors.torch
import torch

HERE = pathlib.Path(__file__).parent


def digest(x) -> str:
  """Of the values in float32; both zeros are one."""
  x = np.asarray(x, np.float32) + np.float32(0)
  return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


@contextlib.contextmanager
def bare(package: str, *names: str, **stubs):
  """Imports below a package whose own __init__ files are not run.

  names: its packages. stubs: of its modules, by names with _ for a dot.
  """
  spec = importlib.util.find_spec(package)
  if spec is None:
    raise ModuleNotFoundError(f'{package} is not in PYTHONPATH', name=package)
  before = dict(sys.modules)
  root = pathlib.Path(spec.origin).parent.parent
  for name in (package, *names):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(root / name.replace('.', '/'))]
  for name, content in stubs.items():
    full = f'{package}.{name.replace("_", ".")}'
    sys.modules[full] = types.ModuleType(full)
    vars(sys.modules[full]).update(content)
  try:
    yield
  finally:
    for name in set(sys.modules) - set(before):
      del sys.modules[name]
    sys.modules.update(before)


def case(settings, parts, want):
  return settings, parts, np.asarray(want, np.float32)


def codes(bits, *shape):
  return torch.randint(0, 1 << bits, shape, dtype=torch.int32)


def scales(*shape):
  """Around 0.01, in half precision."""
  return (torch.rand(shape) * 0.02 + 0.001).half()


# --- GPTQ ---------------------------------------------------------------------


def gptq():
  """Version 1 and 2, symmetric or not, mixed inputs, and false labels.

  Zeros are lessened code by code here, as GPTQModel itself does not: those that
  are lessened by words are in quantised_test.py.
  """
  O, I, g = 32, 64, 16
  out = {}
  idle = types.SimpleNamespace(debug=print, info=print, warn=print)
  stubs = dict(
    utils_logger=dict(setup_logger=lambda: idle),
    utils_torch=dict(HAS_NPU=False),
  )
  names = ('gptqmodel.utils', 'gptqmodel.quantization')
  with bare('gptqmodel', *names, **stubs):
    of = importlib.import_module('gptqmodel.utils.model_dequant')
    for name, bits, version, sym, label in (
      ('2 bits', 2, 1, False, 'gptq'),
      ('3 bits', 3, 1, False, 'gptq'),
      ('4 bits, symmetric', 4, 1, True, 'gptq'),
      ('4 bits, mixed', 4, 2, False, 'gptq_v2'),
      ('8 bits, symmetric, mixed', 8, 2, True, 'gptq_v2'),
      ('4 bits, version 2 called 1', 4, 2, True, 'gptq'),
      ('3 bits, version 1 called 2', 3, 1, True, 'gptq_v2'),
    ):
      groups = torch.arange(I, dtype=torch.int32) // g
      if 'mixed' in name:
        groups = groups[torch.randperm(I)]
      zeros = codes(bits, I // g, O)
      zeros = torch.full_like(zeros, 1 << (bits - 1)) if sym else zeros
      stored = (zeros - 1) & ((1 << bits) - 1) if version == 1 else zeros
      packed = dict(bits=bits, pack_dtype=torch.int32)
      weight = of.pack_cols(codes(bits, I, O).T.contiguous(), **packed)
      parts = dict(
        qweight=weight.T.contiguous(),
        qzeros=of.pack_cols(stored, **packed),
        scales=scales(I // g, O),
        g_idx=groups,
      )
      settings = dict(quant_method='gptq', bits=bits, group_size=g, sym=sym)
      true = 'gptq' if version == 1 else 'gptq_v2'
      with tempfile.TemporaryDirectory() as there:
        path = pathlib.Path(there) / 'a.safetensors'
        file = {f'x.{k}': x for k, x in parts.items()}
        safetensors.torch.save_file(file, path)
        stated = settings | dict(checkpoint_format=true)
        done = of.convert_gptq_file(path, torch.float32, stated, 'cpu')
      settings['checkpoint_format'] = label
      out[name] = case(settings, parts, done['x.weight'])
  return out


# --- AWQ ----------------------------------------------------------------------


def awq():
  """Its layouts, each with groups that fill their words and that do not."""
  O, out = 32, {}
  stubs = dict(utils_utils=dict(get_best_device=lambda: 'cpu'))
  names = ('awq.utils', 'awq.modules', 'awq.modules.linear')
  with bare('awq', *names, **stubs):
    of = lambda x: importlib.import_module(f'awq.{x}')
    gemm = of('modules.linear.gemm').WQLinear_GEMM
    gemv = of('modules.linear.gemv').WQLinear_GEMV
    fast = of('modules.linear.gemv_fast').WQLinear_GEMVFast
    back = of('utils.packing_utils').dequantize_gemm
    for name, layout, g, I in (
      ('gemm', gemm, 16, 64),
      ('gemv', gemv, 32, 64),
      ('gemv', gemv, 128, 256),
      ('gemv_fast', fast, 64, 128),
      ('llm-awq', fast, 32, 64),
    ):
      scale, zero = scales(O, I // g), codes(4, O, I // g)
      q, each = codes(4, O, I), (scale.float(), zero.float())
      s, z = (x.repeat_interleave(g, 1) for x in each)
      linear = torch.nn.Linear(I, O, bias=False)
      linear.weight.data = want = (q - z) * s
      at = (scale.T, zero.T) if layout is gemm else (scale, zero)
      made = layout.from_linear(linear, 4, g, False, *at)
      parts = {k: getattr(made, k) for k in ('qweight', 'qzeros', 'scales')}
      if layout is gemm:
        packed = parts['qweight'], parts['qzeros'], parts['scales'].float()
        want = back(*packed, 4, g).T
      if layout is fast:
        # It adds what is stored in half precision.
        stored = parts['qzeros'][: I // g].float().T
        want = q * s + stored.repeat_interleave(g, 1)
      if name == 'llm-awq':
        parts['scaled_zeros'] = parts.pop('qzeros')
      settings = dict(quant_method='awq', bits=4, group_size=g, version=name)
      out[f'{name}, {g}'] = case(settings, parts, want)
  return out


# --- compressed-tensors, FP8 --------------------------------------------------


def compressed():
  """Packed and whole integers, and floats; scales of groups, rows, blocks."""
  from compressed_tensors import compressors, quantization

  O, out = 40, {}
  for name, form, bits, strategy, sym, I in (
    ('4 bits, groups', 'pack', 4, dict(group_size=16), True, 64),
    ('3 bits, groups', 'pack', 3, dict(group_size=16), False, 64),
    ('3 bits, old words', 'pack', 3, dict(group_size=16), False, 64),
    ('2 bits, rows', 'pack', 2, dict(strategy='channel'), False, 24),
    ('8 bits, whole', 'pack', 8, dict(strategy='tensor'), True, 24),
    ('int8', 'int', 8, dict(strategy='channel'), True, 24),
    ('int8, zeros', 'int', 8, dict(strategy='channel'), False, 24),
    ('int8, whole', 'int', 8, dict(strategy='tensor'), True, 24),
    ('float8, rows', 'float', 8, dict(strategy='channel'), True, 24),
    ('float8, blocks', 'float', 8, dict(block_structure=[16, 16]), True, 24),
  ):
    kind = 'float' if form == 'float' else 'int'
    own = dict(strategy='block' if 'block_structure' in strategy else 'group')
    own |= dict(num_bits=bits, type=kind, symmetric=sym) | strategy
    scheme = quantization.QuantizationScheme(
      targets=['Linear'], weights=quantization.QuantizationArgs(**own)
    )
    grid = {'channel': (O, 1), 'tensor': (1,), 'block': (3, 2)}
    grid = grid.get(own['strategy']) or (O, I // own['group_size'])
    parts = dict(
      weight=torch.randn(O, I), weight_scale=scales(*grid).bfloat16() * 30
    )
    middle = 1 << (bits - 1)
    if not sym:
      zeros = torch.randint(-middle, middle, grid, dtype=torch.int8)
      parts['weight_zero_point'] = zeros
    of = dict(pack='Packed', int='Int', float='Float')[form]
    of = getattr(compressors, f'{of}QuantizationCompressor')
    parts = of.compress(parts, scheme)
    wide = parts | dict(weight_scale=parts['weight_scale'].float())
    want = of.decompress(wide, scheme)['weight']
    if 'old' in name:
      parts |= old_words(parts, bits, (O, I), compressors)
    weights = {k: x for k, x in own.items() if k != 'symmetric'}
    groups = dict(group_0=dict(targets=['Linear'], weights=weights))
    settings = dict(quant_method='compressed-tensors', config_groups=groups)
    settings['format'] = f'{form}-quantized'
    out[name] = case(settings, parts, want)
  return out


def old_words(parts, bits, shape, compressors):
  """As versions before 0.13 packed: no value in two words (seen in 0.11)."""
  count = 32 // bits

  def pack(x, full, dim):
    x = compressors.unpack_from_int32(x, bits, full, dim).int()
    x = (x.T if dim == 0 else x) + (1 << (bits - 1))
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % count))
    shifts = torch.arange(count, dtype=torch.int32) * bits
    x = (x.reshape(len(x), -1, count) << shifts).sum(2, dtype=torch.int32)
    return x.T if dim == 0 else x

  groups = (shape[0], parts['weight_scale'].shape[1])
  return dict(
    weight_packed=pack(parts['weight_packed'], shape, 1),
    weight_zero_point=pack(parts['weight_zero_point'], groups, 0),
  )


def fp8():
  """Blocks as published, with smaller ones at the edges; one scale; rows."""
  out = {}
  for name, shape, grid, block, part in (
    ('blocks', (72, 40), (3, 2), (32, 32), 'weight_scale_inv'),
    ('blocks of 128', (130, 24), (2, 1), (128, 128), 'weight_scale_inv'),
    ('whole', (16, 24), (), (16, 24), 'weight_scale'),
    ('rows', (16, 24), (16, 1), (1, 24), 'scale'),
  ):
    weight = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(grid) * 0.01 + 0.001
    each = scale.reshape(grid or (1, 1))
    for axis in (0, 1):
      each = each.repeat_interleave(block[axis], axis)
    want = weight.float() * each[: shape[0], : shape[1]]
    settings = dict(quant_method='fp8', activation_scheme='dynamic')
    if name == 'blocks':
      settings['weight_block_size'] = list(block)
    out[name] = case(settings, {'weight': weight, part: scale}, want)
  return out


# --- bitsandbytes, MLX --------------------------------------------------------


def bnb():
  """Blocks that cross rows, a last one that is short, and two of scales."""
  from bitsandbytes import functional

  out = {}
  for name, kind, nested, shape, storage in (
    ('nf4', 'nf4', False, (10, 23), torch.uint8),
    ('fp4', 'fp4', False, (10, 24), torch.bfloat16),
    ('nf4, double', 'nf4', True, (137, 122), torch.uint8),
    ('fp4, double', 'fp4', True, (3, 50), torch.uint8),
  ):
    x = torch.randn(shape)
    q, state = functional.quantize_4bit(
      x, None, None, 64, nested, kind, quant_storage=storage
    )
    parts = {f'weight.{k}': x for k, x in state.as_dict(packed=True).items()}
    want = functional.dequantize_4bit(q, state)
    settings = dict(quant_method='bitsandbytes', load_in_4bit=True)
    out[name] = case(settings, {'weight': q, **parts}, want)
  q = torch.randint(-127, 128, (12, 20), dtype=torch.int8)
  scale = torch.rand(12) * 3
  parts = dict(weight=q, SCB=scale, weight_format=torch.tensor(0).byte())
  want = functional.int8_vectorwise_dequant(q, scale)
  settings = dict(quant_method='bitsandbytes', load_in_8bit=True)
  return out | {'int8': case(settings, parts, want)}


def mlx():
  """All bits, in halves of both kinds."""
  import mlx.core as mx

  out = {}
  for bits, group, dtype in (
    (2, 32, mx.float16), (3, 64, mx.bfloat16), (4, 32, mx.bfloat16),
    (5, 32, mx.float16), (6, 64, mx.float16), (8, 128, mx.bfloat16),
  ):  # fmt: skip
    x = mx.array(torch.randn(6, 128).numpy()).astype(dtype)
    made = mx.quantize(x, group_size=group, bits=bits)
    wide = [made[0], *(y.astype(mx.float32) for y in made[1:])]
    want = mx.dequantize(*wide, group_size=group, bits=bits)
    half = dict(float16=torch.float16, bfloat16=torch.bfloat16)
    half = half[str(dtype).removeprefix('mlx.core.')]
    of = lambda y, kind: torch.from_numpy(np.array(y)).view(kind)
    parts = dict(weight=of(made[0], torch.uint32))
    for name, y in zip(('scales', 'biases'), made[1:], strict=True):
      parts[name] = of(y.view(mx.uint16), half)
    settings = dict(group_size=group, bits=bits)
    out[f'{bits} bits'] = case(settings, parts, np.array(want))
  return out


FAMILIES = dict(
  gptq=gptq, awq=awq, compressed=compressed, fp8=fp8, bnb=bnb, mlx=mlx
)


def make(family: str):
  """{case: (settings, parts, values)}, the same at every call."""
  torch.manual_seed(0)
  return FAMILIES[family]()


def main():
  for family in sys.argv[1:] or FAMILIES:
    arrays, about = {}, {}
    for name, (settings, parts, want) in make(family).items():
      arrays |= {f'{name}.{k}': x.contiguous() for k, x in parts.items()}
      facts = dict(shape=want.shape, sha256=digest(want))
      about[name] = json.dumps(facts | dict(settings=settings))
    path = HERE / f'{family}.safetensors'
    safetensors.torch.save_file(arrays, path, metadata=about)
    print(path, path.stat().st_size)


if __name__ == '__main__':
  main()
