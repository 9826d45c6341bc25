"""Stores a model's matrices, and computes with them as they are stored.

A matrix [K, N], which multiplies x [..., K], is a jax.Array or a type in
STORED, such as Panels: pytree nodes whose children are their arrays, so that
jit, tree.map and device_put act on these; other fields are static. A model's
parameters hold either under one name ('layers/0/attn/o/kernel'), and no other
module knows which: `of` gives its methods.

shape: (K, N). dense(): the matrix as one array.
linear(x, bias, **more): x @ matrix (+ bias), [..., N]. For a packed model, bias
  comes from `pad`, and more are norm, add, act and gated of calls.linear; else
  more is the result's dtype (None: x's).
columns(ids): these columns, clipped to N: [K, *ids.shape].
take(ids_R): the matrix with these columns alone, for the same kernels.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.kernels import calls, quantised
from specdec_jax.models import attention

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Dense:
  """Gives one array a matrix's methods: parameters hold the array."""

  array: Array

  @property
  def shape(self) -> tuple[int, ...]:
    return self.array.shape

  def linear(self, x: Array, bias: Array | None = None, **more) -> Array:
    return _plus(matmul(x, self.array, **more), bias)

  def columns(self, ids: Array) -> Array:
    return jnp.asarray(self.array).at[:, ids].get(mode='clip')

  def take(self, ids_R: Array) -> Array:
    return self.columns(ids_R)

  def dense(self) -> Array:
    return self.array


def _plus(y: Array, bias: Array | None) -> Array:
  return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


_static = functools.partial(dataclasses.field, metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Panels:
  """A packed matrix as the CPU kernels read it (kernels.calls), [P, K, WIDE]: N
  columns, from `parts` matrices side by side, each in its own panels."""

  array: Array
  N: int = _static()
  parts: int = _static(default=1)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.array.shape[1], self.N

  def linear(
    self, x: Array, bias: Array | None = None, gated: bool = False, **more
  ) -> Array:
    columns = self.N // (2 if gated else 1)
    return calls.linear(x, self.array, columns, bias=bias, gated=gated, **more)

  def columns(self, ids: Array) -> Array:
    return calls.columns_of(self.array, ids)

  def take(self, ids_R: Array) -> 'Panels':
    return pack(self.columns(ids_R))

  def dense(self) -> Array:
    wide = len(self.array) * calls.WIDE
    return self.columns(calls.places(self.N, self.parts, wide))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised:
  """A file's quantised numbers as they are (kernels.quantised), packed.

  array: uint8 panels of a kind in quantised.KINDS; N, parts: as in Panels.
  order: [K] row k of the panels is this row of the matrix; None: row k.
  bits: width of the whole numbers that a product rounds rows of x to.
  """

  array: Array
  kind: str = _static()
  N: int = _static()
  parts: int = _static(default=1)
  bits: int = _static(default=16)
  order: Any = None

  @property
  def shape(self) -> tuple[int, ...]:
    return self.array.shape[1] * quantised.KINDS[self.kind].depth, self.N

  def linear(self, x: Array, bias: Array | None = None, **more) -> Array:
    return self.shared(x, bias, **more)[0]

  def shared(
    self, x: Array, bias: Array | None = None, gated: bool = False, **more
  ) -> list[Array]:
    """Returns [linear's result, x as it was rounded]; see quantised.shared."""
    columns = self.N // (2 if gated else 1)
    more |= dict(bias=bias, gated=gated, bits=self.bits, order=self.order)
    return quantised.shared(x, self.array, self.kind, columns, **more)

  def columns(self, ids: Array) -> Array:
    x = quantised.columns_of(self.array, self.kind, ids)
    return x if self.order is None else x[jnp.argsort(self.order)]

  def take(self, ids_R: Array) -> 'Quantised':
    some = quantised.take(self.array, self.kind, ids_R)
    return dataclasses.replace(self, array=some, N=len(ids_R), parts=1)

  def dense(self) -> Array:
    wide = len(self.array) * quantised.WIDE
    return self.columns(calls.places(self.N, self.parts, wide))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beside:
  """Packed matrices side by side, stored differently. Those in their file's
  order share one rounding of x."""

  each: tuple[Any, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    return self.each[0].shape[0], sum(x.shape[1] for x in self.each)

  def linear(
    self,
    x: Array,
    bias: Array | None = None,
    gated: bool = False,
    act: str = 'none',
    **more,
  ) -> Array:
    biases = [None] * len(self.each)
    if bias is not None:
      ends = list(itertools.accumulate(m.shape[1] for m in self.each))
      biases = jnp.split(bias, ends[:-1])
      biases = [pad(b, m) for b, m in zip(biases, self.each, strict=True)]
    acts = [act, *len(self.each[1:]) * ['none' if gated else act]]
    parts, rows = [], None
    for m, b, a in zip(self.each, biases, acts, strict=True):
      if isinstance(m, Quantised) and m.order is None:
        y, made = m.shared(x, b, act=a, rows=rows, **more)
        rows = made if rows is None else rows
      else:
        y = m.linear(x, b, act=a, **more)
      parts.append(y)
    return parts[0] * parts[1] if gated else jnp.concatenate(parts, -1)

  def columns(self, ids: Array) -> Array:
    return self.dense()[:, ids]

  def take(self, ids_R: Array) -> Panels:
    return pack(self.columns(ids_R))

  def dense(self) -> Array:
    return jnp.concatenate([x.dense() for x in self.each], -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table:
  """A table [V, D] whose rows are the columns of `matrix` [D, V]."""

  matrix: Any

  @property
  def shape(self) -> tuple[int, ...]:
    return of(self.matrix).shape[::-1]

  def dense(self) -> Array:
    return of(self.matrix).dense().T


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
  """A matrix [K, N]: codes * scale + offset, in groups of C rows.

  codes: [G, C, N], int8 or int4; stacked layers come first. Not [K, N]: a
    reshape before a product would copy a scan's layer.
  scale, offset: [G, N], float32.
  """

  codes: Any  # arrays, their shapes or their shardings
  scale: Any
  offset: Any

  @property
  def shape(self) -> tuple[int, ...]:
    *depth, G, C, N = self.codes.shape
    return *depth, G * C, N

  def linear(self, x: Array, bias: Array | None = None, dtype=None) -> Array:
    G, C, N = self.codes.shape
    x_GRC = jnp.swapaxes(x.reshape(-1, G, C), 0, 1)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y_GRN = jnp.matmul(
      x_GRC,
      self.codes.astype(x.dtype),
      preferred_element_type=wide,
      precision=attention.precision(x.dtype),
    )
    sums_GR1 = x_GRC.sum(-1, keepdims=True, dtype=wide)
    y_GRN = y_GRN * self.scale[:, None] + sums_GR1 * self.offset[:, None]
    y = y_GRN.sum(0).astype(dtype or x.dtype)
    return _plus(y.reshape(*x.shape[:-1], N), bias)

  def columns(self, ids: Array) -> Array:
    return self.take(ids.reshape(-1)).dense().reshape(-1, *ids.shape)

  def take(self, ids_R: Array) -> 'Grouped':
    return jax.tree.map(lambda x: jnp.take(x, ids_R, -1, mode='clip'), self)

  def dense(self) -> Array:
    scale, offset = self.scale[..., None, :], self.offset[..., None, :]
    wide = self.codes.astype(scale.dtype) * scale + offset
    return wide.reshape(self.shape)


STORED = (Panels, Quantised, Beside, Table, Grouped)
# Parameters whose rows are looked up, and multiplied with nothing.
TABLES = 'embed', 'positions'
# Those of Grouped, by the dtype that is asked for.
INTEGERS = 'int8', 'int4'


def of(matrix: Any) -> Any:
  """Returns a parameter matrix with its methods."""
  return matrix if is_stored(matrix) else Dense(matrix)


def is_stored(x: Any) -> bool:
  """Tells whether x is in STORED: one parameter with one or more arrays."""
  return isinstance(x, STORED)


def rows(table: Any, ids: Array) -> Array:
  """Looks up rows in an array or Table by number, clipped: [..., D]."""
  if isinstance(table, Table):
    return jnp.moveaxis(of(table.matrix).columns(ids), 0, -1)
  return jnp.asarray(table).at[ids].get(mode='clip')


def pack(matrix_KN: Array, parts: int = 1) -> Panels:
  """Packs a matrix, or `parts` of equal width side by side, into panels."""
  return Panels(calls.pack(matrix_KN, parts), matrix_KN.shape[1], parts)


def coarsest(tree: Any) -> str:
  """Returns the float dtype in a tree that rounds most. But panels are
  multiplied in float32, whatever they hold; rows of TABLES are read as is."""
  panels = lambda x: isinstance(x, Panels)
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=panels)
  name = lambda path: getattr(path[-1], 'key', '') if path else ''
  read = [x for path, x in leaves if name(path) not in TABLES]
  kinds = {jnp.dtype('float32') if panels(x) else x.dtype for x in read}
  floats = [x for x in kinds if jnp.issubdtype(x, jnp.floating)]
  floats += [jnp.result_type(float)] * (not floats)
  return str(max(floats, key=lambda x: float(jnp.finfo(x).eps)))


def pad(bias_N: Array, matrix: Any, parts: int = 1) -> Array:
  """Pads a packed matrix's bias with zeros where the matrix is padded."""
  if isinstance(matrix, Beside):
    return bias_N.astype(jnp.float32)
  wide = quantised.WIDE if isinstance(matrix, Quantised) else calls.WIDE
  return calls.pad(bias_N, parts, wide)


def join(matrices: Sequence[Any], parts: int = 1) -> Any:
  """Joins matrices side by side, or their biases, before they are packed. The
  result has `parts`: all that there are, or 1."""
  assert not any(isinstance(x, Panels) for x in matrices)
  if not any(isinstance(x, Quantised) for x in matrices):
    return jax.tree.map(lambda *x: jnp.concatenate(x, -1), *matrices)
  out = [matrices[0]]
  for x in matrices[1:]:
    last = out[-1]
    codes = isinstance(last, Quantised) and isinstance(x, Quantised)
    alike = (
      codes and last.kind == x.kind and np.array_equal(last.order, x.order)
    )
    if alike and (parts > 1 or last.N % quantised.WIDE == 0):
      panels, width = jnp.concatenate([last.array, x.array]), last.N + x.N
      out[-1] = dataclasses.replace(last, array=panels, N=width, parts=parts)
    else:
      out.append(x)
  each = tuple(x if is_stored(x) else pack(x) for x in out)
  return each[0] if len(each) == 1 else Beside(each)


def matmul(x: Array, kernel: Array, dtype=None) -> Array:
  """Returns x @ kernel in dtype (None: x's), summed in float32 or wider."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  dot = functools.partial(
    jnp.matmul,
    preferred_element_type=wide,
    precision=attention.precision(x.dtype),
  )
  rows = x.shape[:-1]
  x = x.reshape(-1, x.shape[-1])
  one = x.shape[0] == 1 and x.dtype == jnp.bfloat16
  if one and jax.default_backend() == 'cpu':
    # For one bf16 row XLA CPU takes a path 10 to 20 times slower than for two.
    y = dot(jnp.pad(x, ((0, 1), (0, 0))), kernel)[:1]
  else:
    y = dot(x, kernel)
  return y.astype(dtype or x.dtype).reshape(*rows, kernel.shape[1])
