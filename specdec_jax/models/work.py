"""Counts what a pass reads and computes: bytes, products with parameters."""

import math
from typing import Any

import jax
import numpy as np

from specdec_jax import types
from specdec_jax.models import lm, weights

_MANY = 1024  # slots: a cache may round them up to whole panels


def tree_bytes(tree: Any) -> int:
  """Counts all arrays' bytes, over all devices, each shard once."""
  bits = lambda x: x.size * jax.dtypes.itemsize_bits(x.dtype)
  return sum(map(bits, jax.tree.leaves(tree))) // 8


def step_parameters(params: types.Params) -> int:
  """Counts parameters that one forward pass reads whole (lm.every_pass)."""
  return sum(math.prod(weights.of(x).shape) for _, x in _read_whole(params))


def row_products(params: types.Params, length: int, source: int) -> float:
  """Counts a training row's products, one for each parameter and token;
  `source` tokens are those that its encoder reads."""
  encoder = jax.tree.leaves(params.get('encoder', {}))
  passed = step_parameters(params) * length
  return float(passed + sum(x.size for x in encoder) * source)


def step_bytes(params: types.Params) -> int:
  """Counts the bytes in step_parameters."""
  return tree_bytes(dict(_read_whole(params)))


def slot_bytes(model: types.Model, rows: int) -> float:
  """Counts a cache's bytes for each of its slots, in all rows together."""
  cache = jax.eval_shape(lambda: model.init_cache(rows, _MANY))
  return tree_bytes(cache) / _MANY


def source_bytes(model: types.Model, params: types.Params, rows: int) -> float:
  """Counts the bytes that an encoder leaves for each source token, or 0."""
  if (encode := model.encode) is None:
    return 0.0
  source = types.Source(np.zeros((rows, _MANY), int), np.zeros(rows, int))
  left = lambda: encode(params, source, model.init_cache(rows, 0))
  return tree_bytes(jax.eval_shape(left)) / _MANY


def _read_whole(params: types.Params) -> list[tuple[str, Any]]:
  """Lists the parameters that a pass reads whole, by flat name."""
  return [x for x in lm.flatten(params).items() if lm.every_pass(x[0])]


def own_leaves(params: types.Params, other: types.Params) -> list[types.Array]:
  """Returns the arrays that are not shared with the other, each once."""
  own = {id(x): x for x in jax.tree.leaves(params)}
  for x in jax.tree.leaves(other):
    own.pop(id(x), None)
  return list(own.values())


def layers_share(params: types.Params, count: int) -> float:
  """Estimates time: the first `count` layers' bytes over step_bytes."""
  if not count:
    return 0.0
  total = 0.0
  for name, x in _read_whole(params):
    group, _, rest = name.partition('/')
    if group == 'layers' and rest[0].isdecimal():
      total += tree_bytes(x) * (int(rest.partition('/')[0]) < count)
    elif group == 'layers':  # scanned: depth is the first axis
      total += tree_bytes(x) * count / jax.tree.leaves(x)[0].shape[0]
  return total / step_bytes(params)
