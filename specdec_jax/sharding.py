"""Sharding of arrays over a (data, model) mesh, by two tables.

PARAMETERS maps parameter names to logical axes, RULES logical axes to mesh
axes. Models and the decode loop name logical axes only.
"""

import dataclasses
import re

import jax
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

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
  (r'head', ('embed', 'vocab')),
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
  (r'.*norm/(scale|bias)', (None,)),
)


def make_mesh(data: int = 1, model: int = 1, devices=None) -> Mesh:
  """A (data, model) mesh of the first data * model devices.

  Raises:
    ValueError: fewer devices than that.
  """
  devices = jax.devices() if devices is None else list(devices)
  if data < 1 or model < 1 or data * model > len(devices):
    raise ValueError(
      f'mesh data={data} x model={model} needs {data * model} devices; '
      f'there are {len(devices)}'
    )
  return jax.make_mesh(
    (data, model),
    ('data', 'model'),
    (AxisType.Auto,) * 2,
    devices=devices[: data * model],
  )


def mesh_of(data: int, model: int) -> Mesh | None:
  """make_mesh, or None for 1 x 1: one device needs no mesh."""
  return None if data == model == 1 else make_mesh(data, model)


@dataclasses.dataclass(frozen=True)
class Layout:
  """The sharding of one model's arrays.

  mesh: axes 'data' and 'model'.
  whole: logical axes that are replicated, whatever RULES has for them.
  """

  mesh: Mesh
  whole: frozenset[str] = frozenset()

  def spec(self, *axes: str | None) -> PartitionSpec:
    named = [None if a is None or a in self.whole else RULES[a] for a in axes]
    used = [m for m in named if m]
    assert len(used) == len(set(used)), f'{axes} share a mesh axis: {named}'
    return PartitionSpec(*named)

  def sharding(self, *axes: str | None) -> NamedSharding:
    return NamedSharding(self.mesh, self.spec(*axes))

  def parameter(self, name: str, ndim: int) -> NamedSharding:
    """The sharding of a parameter by its flat name.

    Raises:
      ValueError: a name that no row of PARAMETERS matches.
    """
    for pattern, axes in PARAMETERS:
      if re.fullmatch(pattern, name):
        return self.sharding(*[None] * (ndim - len(axes)), *axes)
    raise ValueError(
      f'no sharding for parameter {name!r}: add it to PARAMETERS'
    )

  def put(self, name: str, array) -> jax.Array:
    return jax.device_put(array, self.parameter(name, array.ndim))

  def constrain(self, x, *axes: str | None):
    return jax.lax.with_sharding_constraint(x, self.sharding(*axes))


def lay_out(mesh: Mesh, config, *, replicated: bool = False) -> Layout:
  """The layout of a model on a mesh.

  An axis whose size the mesh does not divide is replicated, with a line in the
  log; query and key/value heads are split together or not at all.

  Args:
    mesh: as of make_mesh.
    config: an object with heads, kv_heads, mlp and vocab, such as LMConfig.
    replicated: replicate every axis, for a copy of the model on each device.
  """
  split = mesh.shape['model']
  sizes = {a: getattr(config, a) for a in ('heads', 'kv_heads', 'mlp', 'vocab')}
  if replicated:
    return Layout(mesh, frozenset(sizes))
  whole = {a for a, size in sizes.items() if size % split}
  if whole & {'heads', 'kv_heads'}:
    whole |= {'heads', 'kv_heads'}
  if whole:
    logging.info(
      'replicated over model=%d, which does not divide them: %s',
      split,
      ', '.join(f'{a}={sizes[a]}' for a in sorted(whole)),
    )
  return Layout(mesh, frozenset(whole))
