"""Shards arrays over a (data, model) mesh, by two tables.

PARAMETERS maps parameter names to logical axes, RULES logical axes to mesh
axes. Models and the decode loop name logical axes only. A mesh may span several
processes: hosts.py moves arrays between them and it.
"""

import dataclasses
import math
import re
from typing import Any

import jax
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specdec_jax import hosts

# Logical axis -> mesh axis.
RULES = {
  'batch': 'data',
  'slots': None,
  'vocab': 'model',
  'embed': None,
  'heads': 'model',
  'kv_heads': 'model',
  'mlp': 'model',
}

# Parameter name -> logical axes of its last dimensions (a leading depth axis of
# scanned layers is never split). The first match counts.
PARAMETERS = (
  (r'(\d+/)?head', ('embed', 'vocab')),
  (r'embed', ('vocab', 'embed')),
  (r'positions', (None, 'embed')),
  (r'(encoder/)?relative', (None, 'heads')),
  (r'.*attn/q/kernel', ('embed', 'heads')),
  (r'.*attn/[kv]/kernel', ('embed', 'kv_heads')),
  (r'.*attn/o/kernel', ('heads', 'embed')),
  (r'.*attn/q/bias', ('heads',)),
  (r'.*attn/[kv]/bias', ('kv_heads',)),
  (r'.*mlp/(gate|up)/kernel', ('embed', 'mlp')),
  (r'.*mlp/down/kernel', ('mlp', 'embed')),
  (r'.*mlp/(gate|up)/bias', ('mlp',)),
  (r'.*(attn/o|mlp/down)/bias', ('embed',)),
  # Fused projections, and those of an EAGLE draft: never split over 'model'.
  (r'.*(attn/qkv|mlp/gate_up)/kernel', ('embed', None)),
  (r'.*(attn/qkv|mlp/gate_up)/bias', (None,)),
  # And those of Medusa's heads.
  (r'(join|fuse|\d+/layers/\d+)/kernel', (None, 'embed')),
  (r'\d+/layers/\d+/bias', ('embed',)),
  (r'.*norm(s/\d+)?/(scale|bias)', (None,)),
)


def make_mesh(
  data: int = 1, model: int = 1, devices=None, tensor_parallel: int = 0
) -> Mesh:
  """Makes a (data, model) mesh from the first data * model devices.

  devices: to take, which may be a topology's; all that are here if None.
  tensor_parallel: devices that share a draft (lay_out). If neither 1 nor all,
    'model' has this size, and an axis 'copies' the rest: neighbours hold one
    part of the draft, and in it their own of the target's logits.

  Raises ValueError: fewer devices than that; several processes, and not all
  devices; tensor_parallel does not divide `model`.
  """
  # Devices that are given may be of a topology that is not there.
  processes = jax.process_count() if devices is None else 1
  devices = jax.devices() if devices is None else list(devices)
  size, count = data * model, len(devices)
  if data < 1 or model < 1 or size > count:
    raise ValueError(
      f'mesh data={data} x model={model} needs {size} devices; there are '
      f'{count}'
    )
  if processes > 1 and size < count:
    raise ValueError(
      f'mesh data={data} x model={model}: {processes} processes have {count} '
      'devices, and mesh.data times mesh.model has to be all of them'
    )
  if tensor_parallel and model % tensor_parallel:
    raise ValueError(
      f'tensor_parallel={tensor_parallel}: mesh.model={model} is no multiple '
      'of it; give a divisor, or 0 for all of them'
    )
  shape, axes = (data, model), ('data', 'model')
  if 1 < tensor_parallel < model:
    shape = data, tensor_parallel, model // tensor_parallel
    axes = 'data', 'model', 'copies'
  kinds = (AxisType.Auto,) * len(axes)
  return jax.make_mesh(shape, axes, kinds, devices=devices[:size])


def check(mesh: Any) -> None:
  """Raises ValueError for what is neither a make_mesh mesh nor None."""
  axes = mesh.axis_names[:2] if isinstance(mesh, Mesh) else ()
  if mesh is not None and axes != ('data', 'model'):
    raise ValueError(
      f'mesh={mesh!r}: give sharding.make_mesh(data=..., model=...), or None'
    )


def mesh_of(
  data: int, model: int, rows: int, tensor_parallel: int = 0
) -> Mesh | None:
  """Calls make_mesh; None for 1 x 1: one device needs no mesh.

  data: -1 is all devices that 'model' leaves: in one process at most one a row,
    for more would idle, and on CPU one, whose cores compute together. Several
    processes need all.
  """
  several = jax.process_count() > 1
  if data == -1:
    left = max(jax.device_count() // model, 1)
    alone = 1 if jax.default_backend() == 'cpu' else min(left, rows)
    data = left if several else alone
  if data == model == 1 and not several:
    return None
  return make_mesh(data, model, tensor_parallel=tensor_parallel)


@dataclasses.dataclass(frozen=True)
class Layout:
  """The sharding of one model."""

  mesh: Mesh  # of make_mesh
  whole: frozenset[str] = frozenset()  # axes that are replicated nevertheless
  # Mesh axes over which parameters in training are split where they are stored,
  # along 'embed' (FSDP); see gather.
  stored: tuple[str, ...] = ()
  copied: bool = False  # split over 'model', but not over 'copies' too

  def spec(self, *axes: str | None) -> PartitionSpec:
    over: dict[Any, Any] = {None: None, 'data': 'data', 'model': 'model'}
    if 'copies' in self.mesh.axis_names and not self.copied:
      over['model'] = 'model', 'copies'
    split = [None if a is None or a in self.whole else RULES[a] for a in axes]
    named = [over[m] for m in split]
    used = [m for m in named if m]
    assert len(used) == len(set(used)), f'{axes} share a mesh axis: {named}'
    return PartitionSpec(*named)

  def sharding(self, *axes: str | None) -> NamedSharding:
    return NamedSharding(self.mesh, self.spec(*axes))

  def parameter(self, name: str, ndim: int) -> NamedSharding:
    """Finds the sharding of a stored parameter; ValueError: no row names it."""
    for pattern, axes in PARAMETERS:
      if re.fullmatch(pattern, name):
        axes = (*[None] * (ndim - len(axes)), *axes)
        named: list[Any] = list(self.spec(*axes))
        if self.stored and 'embed' in axes:
          named[axes.index('embed')] = self.stored
        return NamedSharding(self.mesh, PartitionSpec(*named))
    raise ValueError(
      f'no sharding for parameter {name!r}: add it to PARAMETERS'
    )

  def put(self, name: str, array) -> jax.Array:
    return hosts.put(array, self.parameter(name, array.ndim))

  def constrain(self, x, *axes: str | None):
    return jax.lax.with_sharding_constraint(x, self.sharding(*axes))

  def gather(self, params: Any) -> Any:
    """Gathers stored parameters to compute with; sums gradients back there."""
    if not self.stored:
      return params
    computed = dataclasses.replace(self, stored=())

    def one(path, x):
      name = '/'.join(str(k.key) for k in path)
      # From here on, not before: else XLA gathers once for both passes.
      for layout in (self, computed):
        where = layout.parameter(name, x.ndim)
        x = jax.lax.with_sharding_constraint(x, where)
      return x

    return jax.tree_util.tree_map_with_path(one, params)


def lay_out(
  mesh: Mesh, config, *, tensor_parallel: int = 0, fsdp: bool = False
) -> Layout:
  """Lays a model out on a mesh.

  Replicates an axis whose size the mesh does not divide, with a line in the
  log; splits query and key/value heads together or not at all.

  config: with width, heads, kv_heads, mlp and vocab, such as LMConfig.
  tensor_parallel: for a draft, how many devices share one copy; 0: as many as
    share a target, 1: each has all of it. Any other has to be make_mesh's.
  fsdp: store parameters split over the axes that would hold copies.

  Raises ValueError: another tensor_parallel than make_mesh's; fsdp, and the
  axes of copies do not divide the width.
  """
  _, *axes = mesh.axis_names
  devices = math.prod(mesh.shape[a] for a in axes)
  split = tensor_parallel or devices
  # The axes that hold copies of the model, by the devices that share one.
  copies = {1: (*axes,), mesh.shape['model']: ('copies',), devices: ()}
  if split not in copies:
    raise ValueError(
      f'tensor_parallel={split}: give it to make_mesh too, which had another'
    )
  stored = ('data', *copies[split]) if fsdp else ()
  parts = math.prod(mesh.shape[a] for a in stored)
  if config.width % parts:
    raise ValueError(
      f'mesh.fsdp=True: {parts} devices ({" x ".join(stored)}) do not divide '
      f'the width {config.width}; take a mesh that does, or fsdp=False'
    )
  sizes = {a: getattr(config, a) for a in ('heads', 'kv_heads', 'mlp', 'vocab')}
  if split == 1 < devices:
    return Layout(mesh, frozenset(sizes), stored)
  whole = {a for a, size in sizes.items() if size % split}
  if whole & {'heads', 'kv_heads'}:
    whole |= {'heads', 'kv_heads'}
  if whole:
    logging.info(
      'replicated over model=%d, which does not divide them: %s',
      split,
      ', '.join(f'{a}={sizes[a]}' for a in sorted(whole)),
    )
  return Layout(mesh, frozenset(whole), stored, copied=split < devices)
