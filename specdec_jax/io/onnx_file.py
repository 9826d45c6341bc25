"""Reads Flan-T5-small from the two int8 ONNX files of a title writer.

The graphs are not run. Their kernels are named by number, in order of use; they
are given the names of Hugging Face's T5 here.
"""

import pathlib
import re

import numpy as np

from specdec_jax.io import names
from specdec_jax.models import config as model_config

# Modules with a kernel, in order of use, of a layer of each file.
_SELF = [f'attn/{x}' for x in 'qkvo']
_MLP = [f'mlp/{x}' for x in ('gate', 'up', 'down')]
_LAYER = {
  'encoder': _SELF + _MLP,
  'decoder': _SELF + [f'cross_attn/{x}' for x in 'qkvo'] + _MLP,
}
_NUMBERED = re.compile(r'onnx::MatMul_(\d+)')
_PREFIXES = {'enc.': 'encoder.', 'm.': ''}  # theirs -> Hugging Face's


def open_pair(
  decoder: pathlib.Path, source: str
) -> tuple[model_config.LMConfig, names.Reader, list[pathlib.Path]]:
  """(settings, weights, paths) of decoder.onnx and encoder.onnx beside it."""
  config = model_config.sized('t5_small')
  stored: dict[str, np.ndarray] = {}
  paths = {part: decoder.with_name(f'{part}.onnx') for part in _LAYER}
  for part, order in _LAYER.items():
    path = paths[part]
    arrays = _arrays(path)
    stack = config if part == 'decoder' else config.encoder
    assert stack is not None
    stored |= _named(path, arrays, part, order, stack.depth)
  shapes = {name: x.shape for name, x in stored.items()}
  reader = names.Reader(source, names.HF_T5_GATED, shapes, stored.__getitem__)
  return config, reader, list(paths.values())


def _named(path, arrays, part: str, order, depth: int) -> dict[str, np.ndarray]:
  """The arrays of a file by Hugging Face's names, kernels as [out, in]."""
  start = 'encoder/' if part == 'encoder' else ''
  wanted = [
    f'{start}layers/{i}/{x}/kernel' for i in range(depth) for x in order
  ]
  wanted += ['head'] if part == 'decoder' else []
  numbered = {int(m[1]): x for x in arrays if (m := _NUMBERED.fullmatch(x))}
  kernels = [arrays.pop(numbered[number]) for number in sorted(numbered)]
  if len(kernels) != len(wanted):
    raise ValueError(
      f'{path}: {len(kernels)} kernels, where Flan-T5-small has {len(wanted)}'
    )
  whole = lambda name: re.sub(r'^(enc|m)\.', lambda m: _PREFIXES[m[0]], name)
  theirs = map(names.HF_T5_GATED.stored, wanted)
  named = {whole(name): x for name, x in arrays.items()}
  return named | {n: x.T for n, x in zip(theirs, kernels, strict=True)}


def _arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
  """The floating-point arrays of a file, dequantised, by their names."""
  try:
    import onnx
    from onnx import numpy_helper
  except ImportError as e:
    raise ValueError(f'{path}: reading it needs onnx: pip install onnx') from e
  try:
    graph = onnx.load(str(path)).graph
    raw = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
  except Exception as e:  # onnx and protobuf raise errors of many kinds
    raise ValueError(f'{path}: not a whole ONNX file: {e}') from e
  out = {}
  for name, x in raw.items():
    stem = name.removesuffix('_quantized')
    if stem != name:
      scale, zero = raw[f'{stem}_scale'], raw[f'{stem}_zero_point']
      out[stem] = (x.astype(np.float32) - zero.astype(np.float32)) * scale
    elif x.dtype == np.float32 and x.ndim and not name.endswith('_scale'):
      out[name] = x
  return out
