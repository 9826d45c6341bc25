"""Rounds matrices to groups of integers as they are read, and places them.

As weights.Grouped, int8 has one group per column, int4 one per 128 rows. The
head keeps 8 bits: it makes the logits and, if tied, the embedding. For the CPU
kernels, `pack` rounds blocks of 32 rows as llama.cpp does: there smaller groups
cost no time.
"""

import functools
import math
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from specdec_jax import hosts, program
from specdec_jax.kernels import blocks, library, quantised
from specdec_jax.models import convert, weights

# dtype -> the kinds of a layer's matrices, and of embedding and head.
KINDS = {'int8': ('Q8_0', 'Q8_0'), 'int4': ('Q4_1', 'Q8_0')}
# Columns that are rounded at a time.
_MOST = 4096


def quantise(x: Any, kind: str) -> weights.Grouped:
  """Rounds a matrix, or stacked layers, where it lies. The least number in a
  group gets the lowest code, the greatest the highest.

  x: [K, N], or [layers, K, N], whose integers come back on the host.
  kind: in weights.INTEGERS.
  """
  if x.ndim > 2:
    layers = [quantise(layer, kind) for layer in x]
    return jax.tree.map(lambda *each: np.stack(each), *layers)
  return _matrix(x, kind)


@functools.partial(jax.jit, static_argnames='kind')
def _matrix(x_KN: jax.Array, kind: str) -> weights.Grouped:
  x_GCN = x_KN.astype(jnp.float32).reshape(_sizes(x_KN.shape, kind))
  codes, low_GN, high_GN = jnp.iinfo(kind), x_GCN.min(1), x_GCN.max(1)
  scale_GN = (high_GN - low_GN) / (int(codes.max) - int(codes.min))
  offset_GN = low_GN - int(codes.min) * scale_GN
  codes_GCN = jnp.rint((x_GCN - offset_GN[:, None]) / scale_GN[:, None])
  codes_GCN = codes_GCN.clip(int(codes.min), int(codes.max)).astype(kind)
  return weights.Grouped(codes_GCN, scale_GN, offset_GN)


def _sizes(shape: tuple[int, ...], kind: str) -> tuple[int, int, int]:
  """Returns (G, C, N); C is K; in int4 128, or 64 or 32 if they divide K."""
  K, N = shape[-2:]
  C = math.gcd(K, 128)
  C = C if kind == 'int4' and C >= 32 else K
  return K // C, C, N


def kind_of(
  dtype: str, name: str, shape: tuple[int, ...], packs: bool = False
) -> str:
  """Returns what a parameter is rounded to, by its flat name; '': nothing.

  packs: for the CPU kernels, which round the embedding too. Matrices whose rows
    do not fill whole blocks stay float32.
  """
  ends = name == 'head' or (packs and name == 'embed')
  if dtype not in KINDS or not (ends or name.endswith('/kernel')):
    return ''
  if not packs:
    return 'int8' if ends else dtype
  kind = KINDS[dtype][ends]
  rows = shape[-1 if name == 'embed' else 0]
  return '' if rows % quantised.KINDS[kind].depth else kind


def shapes(flat: dict[str, Any], kind: str) -> dict[str, Any]:
  """Returns what `put` makes, from parameters' shapes by flat name."""
  kinds = {name: kind_of(kind, name, x.shape) for name, x in flat.items()}
  return {name: grouped(x, kinds[name]) for name, x in flat.items()}


def grouped(x: Any, kind: str) -> Any:
  """Returns a parameter's shapes when rounded to `kind`; '': as they are."""
  if not kind:
    return x
  depth, (G, C, N) = x.shape[:-2], _sizes(x.shape, kind)
  scale = jax.ShapeDtypeStruct((*depth, G, N), jnp.float32)
  codes = jax.ShapeDtypeStruct((*depth, G, C, N), jnp.dtype(kind))
  return weights.Grouped(codes, scale, scale)


def put(
  x: Any, kind: str, where: NamedSharding | None = None, table: bool = False
) -> Any:
  """Rounds a parameter to a kind of codes ('': none) and places it. None if a
  number is too large for a block's scale. table: whether the columns of the
  matrix are its rows, as in an embedding."""
  if kind in quantised.KINDS:
    return pack(x if table else x.T, kind)
  x = quantise(x, kind) if kind else x
  if where is None:
    return jax.tree.map(jnp.asarray, x)
  return jax.tree.map(hosts.put, x, shardings(where, x))


def shardings(where: NamedSharding, x: Any) -> Any:
  """Returns where the arrays of a parameter lie; x: it, or its shapes. Splits
  rows between groups if that divides them, else inside each. where: the matrix,
  by Layout.parameter."""
  if not isinstance(x, weights.Grouped):
    return where
  *depth, rows, columns = where.spec
  G, C, _ = x.codes.shape[-3:]
  parts = math.prod(where.mesh.shape[axis] for axis in jax.tree.leaves(rows))
  between = rows if G % parts == 0 else None
  inside = rows if between is None and C % parts == 0 else None
  at = lambda *axes: NamedSharding(where.mesh, PartitionSpec(*depth, *axes))
  scale = at(between, columns)
  return weights.Grouped(at(between, inside, columns), scale, scale)


# --- for the kernels of one CPU ----------------------------------------------


def pack(x_NK: Any, kind: str) -> weights.Quantised | None:
  """Packs columns into blocks; None if a number is too large for a scale."""
  x_NK, raw = np.asarray(x_NK, np.float32), []
  for i in range(0, len(x_NK), _MOST):
    some = np.ascontiguousarray(x_NK[i : i + _MOST])
    with np.errstate(over='ignore'):
      raw += [gguf.quantize(some, gguf.GGMLQuantizationType[kind])]
  count = x_NK.shape[1] // quantised.KINDS[kind].depth
  panels = blocks.pack(np.concatenate(raw).reshape(len(x_NK), count, -1), kind)
  if quantised.broken(panels, kind):
    return None
  return weights.Quantised(jnp.asarray(panels), kind, len(x_NK))


def pack_draft(params: dict[str, Any], name: str = '') -> dict[str, Any]:
  """Packs a draft's own layers for the kernels, in place; float matrices to
  int8 blocks where whole ones fit and a scale can hold their largest number.
  Such rounding changes how many tokens are accepted, and no distribution. name:
  the innermost module that they belong to."""
  if library.ready('auto', program.cache_folder(), KINDS['int8']):
    _round(params, name)
  return convert.pack_params(params, name)


def _round(params: dict[str, Any], name: str) -> None:
  for key, x in params.items():
    codes = weights.is_stored(x) and not isinstance(x, weights.Panels)
    if isinstance(x, dict):
      _round(x, key)
    elif key in ('kernel', 'head') and not codes:
      wide, parts = weights.of(x).dense(), convert.PARTS.get(name, 1)
      if kind := kind_of('int8', 'head', wide.shape, packs=True):
        each = [pack(part.T, kind) for part in jnp.split(wide, parts, -1)]
        params[key] = weights.join(each, parts) if all(each) else x
