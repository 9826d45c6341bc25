"""Reads Flan-T5-small from a title writer's two int8 ONNX files. io.download
pins them by digest. Does not run their graphs, which number kernels in order of
use; gives these Hugging Face's T5 names. Each matrix has one scale."""

import pathlib
import re

import numpy as np

from specdec_jax.io import names
from specdec_jax.io.arrays.stored import Stored
from specdec_jax.io.quantised import form
from specdec_jax.io.quantised import reader as quantised
from specdec_jax.models import config as model_config

# Each file's modules with a kernel, in the order a layer uses them.
_SELF = [f'attn/{x}' for x in 'qkvo']
_MLP = [f'mlp/{x}' for x in ('gate', 'up', 'down')]
_LAYER = {
  'encoder': _SELF + _MLP,
  'decoder': _SELF + [f'cross_attn/{x}' for x in 'qkvo'] + _MLP,
}
_NUMBERED = re.compile(r'onnx::MatMul_(\d+)')
_PREFIXES = {'enc.': 'encoder.', 'm.': ''}  # theirs -> Hugging Face's
_Array = np.ndarray | form.Form


def open_pair(
  decoder: pathlib.Path, source: str
) -> tuple[model_config.LMConfig, names.Reader, list[pathlib.Path]]:
  """Returns (settings, weights, paths); encoder.onnx is beside decoder.onnx."""
  config = model_config.sized('t5_small')
  plans: dict[str, form.Plan] = {}
  plain: dict[str, Stored] = {}
  paths = {part: decoder.with_name(f'{part}.onnx') for part in _LAYER}
  for part, order in _LAYER.items():
    arrays = _arrays(paths[part])
    stack = config if part == 'decoder' else config.encoder
    assert stack is not None
    for name, x in _named(arrays, part, order, stack.depth).items():
      if isinstance(x, form.Form):
        (O, I), read = x.codes.shape, lambda x=x: x
        plans[name] = form.integers('int8', (O, I), (), read, 8, I)
      else:
        plain[name] = Stored('F32', x.shape, lambda x=x: x)
  reader = quantised.opened(source, names.HF_T5_GATED, plans, plain)
  return config, reader, list(paths.values())


def _named(arrays, part: str, order, depth: int) -> dict[str, _Array]:
  """Gives a file's arrays Hugging Face's names; makes kernels [out, in]."""
  start = 'encoder/' if part == 'encoder' else ''
  wanted = [
    f'{start}layers/{i}/{x}/kernel' for i in range(depth) for x in order
  ]
  wanted += ['head'] if part == 'decoder' else []
  numbered = {int(m[1]): x for x in arrays if (m := _NUMBERED.fullmatch(x))}
  kernels = [arrays.pop(numbered[number]) for number in sorted(numbered)]
  whole = lambda name: re.sub(r'^(enc|m)\.', lambda m: _PREFIXES[m[0]], name)
  theirs = map(names.HF_T5_GATED.stored, wanted)
  named = {whole(name): x for name, x in arrays.items()}
  turned = map(_turned, kernels)
  return named | dict(zip(theirs, turned, strict=True))


def _turned(x: _Array) -> _Array:
  """Transposes a matrix."""
  if isinstance(x, form.Form):
    return x._replace(codes=x.codes.T, block=x.block[::-1])
  return x.T


def _arrays(path: pathlib.Path) -> dict[str, _Array]:
  """Reads a file's float arrays and its matrices of codes, by name."""
  try:
    import onnx
    from onnx import numpy_helper
  except ImportError as e:
    raise ValueError(f'{path}: reading it needs onnx: pip install onnx') from e
  graph = onnx.load(str(path)).graph
  raw = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
  out = {}
  for name, x in raw.items():
    stem = name.removesuffix('_quantized')
    if stem != name:
      scale, zero = raw[f'{stem}_scale'], raw[f'{stem}_zero_point']
      each = scale.reshape(1, 1), x.shape, zero.reshape(1, 1)
      out[stem] = form.Form(x, *each)
    elif x.dtype == np.float32 and x.ndim and not name.endswith('_scale'):
      out[name] = x
  return out
