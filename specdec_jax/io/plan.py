"""Decides what each parameter becomes, before any is read: one row each.
Summing the rows gives a model's memory; their kinds give its label and codes; a
loop over them reads it."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from absl import logging

from specdec_jax import program, sharding, types
from specdec_jax.io import names, sources
from specdec_jax.io.quantised import rounded
from specdec_jax.kernels import blocks, library, quantised
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm, weights, work


class Row(NamedTuple):
  """A parameter that is about to be read.

  name: its flat name. shape, dtype: in memory, as numbers.
  places: where it is stored; if several, one per index on the first axis: a
    layer in a stack, or an expert.
  where: how it is split over a mesh; None: one device.
  held: codes in memory, in quantised.KINDS or, off the CPU kernels, in
    weights.INTEGERS; '': numbers. kept: whether they are the file's own.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  places: tuple[names.Place, ...]
  where: jax.sharding.NamedSharding | None = None
  held: str = ''
  kept: bool = False

  @property
  def bytes(self) -> float:
    """Its arrays' bytes, without an order of inputs."""
    if kind := quantised.KINDS.get(self.held):
      return math.prod(self.shape) * kind.size / kind.depth
    numbers = jax.ShapeDtypeStruct(self.shape, self.dtype)
    return work.tree_bytes(rounded.grouped(numbers, self.held))

  @property
  def beside(self) -> float:
    """Bytes beside these while it is placed: its blocks, or its numbers."""
    return self.bytes if self.kept else 4 * math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """A model that is about to be read.

  dtype: as asked for, in convert.DTYPES. rows: in reading order.
  config: before it is fused or packed. layout, kernels: as in `make`.
  packs: whether the CPU kernels will read it.
  again: again(dtype) plans the same model in another dtype.
  """

  source: sources.Source
  dtype: str
  config: model_config.LMConfig
  rows: list[Row]
  packs: bool
  layout: sharding.Layout | None
  kernels: str
  again: Callable[[str], 'Plan']

  @property
  def kept(self) -> bool:
    """Whether any matrix stays as it is stored."""
    return any(row.kept for row in self.rows)

  @property
  def codes(self) -> str:
    """How matrices are held, as in 'stored, int8 rows'; '': as numbers."""
    kinds = sorted({row.held for row in self.rows} - {''})
    found = convert.STORED if self.kept else ' and '.join(kinds)
    found = self.dtype if self.dtype in kinds else found  # XLA's own groups
    return ', '.join(filter(None, (found, found and self._coarse)))

  @property
  def _coarse(self) -> str:
    return 'int8 rows' * (self.kernels == 'int8')

  @property
  def label(self) -> str:
    """Its name in tables: '1.5b (Q4_K, again int4)', but '135m (int4)'."""
    form, how, narrow = self.source.form, '', self.config.dtype == 'bfloat16'
    if self.dtype in weights.INTEGERS:
      how = f'again {self.dtype}' if form else self.dtype
    elif form and self.kept:
      how = 'stored'
    elif form:
      how = 'again bfloat16' if narrow else 'dequantised'
    elif narrow and not self.kept and any(x.places[0].kind for x in self.rows):
      how = 'bfloat16'  # of codes, though most are numbers
    found = ', '.join(filter(None, (form, how, self._coarse)))
    return f'{self.source.label} ({found})' if found else self.source.label

  def bytes(self) -> float:
    """Counts its parameters' bytes."""
    return sum(row.bytes for row in self.rows)

  def most(self) -> float:
    """Counts the most bytes that its parameters take while they are read."""
    held = itertools.accumulate(row.bytes for row in self.rows)
    pairs = zip(held, self.rows, strict=True)
    return max(size + row.beside for size, row in pairs)

  def step_bytes(self) -> float:
    """Counts the bytes that each pass reads, as work.step_bytes does."""
    return sum(row.bytes for row in self.rows if lm.every_pass(row.name))


def make(
  source: sources.Source,
  dtype: str = convert.STORED,
  *,
  layout: sharding.Layout | None = None,
  scan_layers: bool | None = None,
  kernels: str = 'auto',
) -> Plan:
  """Plans how to read an open source.

  'stored' keeps every matrix as it is for the kernels on one CPU, where they
  have one for it. Else all is read as float32; on accelerators a quantised
  model as bfloat16, another one in the dtype of the source.

  dtype, scan_layers, kernels: as in load.load. layout: None: one device.
  """
  if scan_layers is None:
    scan_layers = jax.default_backend() == 'tpu'
  alone = layout is None and not scan_layers
  ready = lambda kinds: (
    alone and library.ready(kernels, program.cache_folder(), kinds)
  )
  packs = dtype != 'float64' and ready(rounded.KINDS.get(dtype, ()))
  every = {at.kind for at in source.places.values()} - {''}
  kept, floats = set(), dtype
  if dtype in weights.INTEGERS:
    floats = activations()
  elif dtype == convert.STORED:
    kept = every & blocks.KEPT.keys()
    kept = kept if ready([blocks.KEPT[x].kind for x in kept]) else set()
    here = packs or jax.default_backend() != 'cpu'
    own = 'bfloat16' if source.reader.narrow else 'float32'
    floats = own if here and kept == every else activations()
  config = source.config.running(dtype=floats, scan_layers=scan_layers)
  rows = []
  for name, x in lm.shapes(config).items():
    at = tuple(source.places[n] for n in lm.unscanned(config, name, x))
    vector = packs and name.rpartition('/')[2] in convert.VECTORS
    wide = 'float32' if vector else str(x.dtype)
    where = layout and layout.parameter(name, len(x.shape))
    if stays := at[0].kind in kept:
      held = blocks.KEPT[at[0].kind].kind
    else:
      held = rounded.kind_of(dtype, name, x.shape, packs)
    rows.append(Row(name, x.shape, wide, at, where, held, stays))
  again = functools.partial(
    make, source, layout=layout, scan_layers=scan_layers, kernels=kernels
  )
  return Plan(source, dtype, config, rows, packs, layout, kernels, again)


def read(plan: Plan) -> types.Params:
  """Reads lm.make(plan.config)'s parameters, nested, each to its place."""
  reader: Any = plan.source.reader
  numbers = (x for row in plan.rows if not row.kept for x in row.places)
  codes = sorted({x.kind for x in numbers} - {''})
  if codes and plan.dtype == convert.STORED:
    logging.warning(
      '%s: no kernel here reads %s: these matrices are read as %s',
      *(plan.source.name, ', '.join(codes), plan.config.dtype),
    )
  out, bits = {}, 8 if plan.kernels == 'int8' else 16
  for row in plan.rows:
    table = row.name == 'embed'
    if row.kept:
      x = reader.codes(plan.config, row)
    else:
      x = reader.floats(plan.config, row)
      x = rounded.put(x, row.held, row.where, table)
    if x is None:
      raise ValueError(
        f'{plan.source.name}: {row.name} is too large for {plan.dtype}; give '
        "dtype='float32'"
      )
    if isinstance(x, weights.Quantised):
      x = dataclasses.replace(x, bits=bits)
      x = weights.Table(x) if table else x
    out[row.name] = x
  return lm.nest(out)


def activations() -> str:
  """Returns the dtype for activations beside integer matrices."""
  return 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
