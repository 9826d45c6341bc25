"""A training state with every kind of leaf, and how to compare two."""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax.io import checkpoint

SPEC = jax.sharding.PartitionSpec


class State(NamedTuple):
  params: dict
  opt_state: tuple
  key: jax.Array
  step: jax.Array


def state(seed: int) -> State:
  keys = jax.random.split(jax.random.key(seed), 2)
  params = {
    'a/b': jax.random.normal(keys[0], (8, 12)),
    'layers': [jax.random.normal(keys[1], (16,)).astype(jnp.bfloat16), None],
  }
  return State(
    params,
    optax.adamw(1e-3).init(params),
    jax.random.key_data(keys[0]),
    jnp.int32(seed),
  )


def like(tree, mesh=None):
  """mesh: the arrays with 8 or more elements are split over all of it."""

  def one(x):
    spec = SPEC()
    if x.size >= 8:
      spec = SPEC('a', 'b') if x.ndim == 2 else SPEC(('a', 'b'))
    sharding = jax.NamedSharding(mesh, spec) if mesh else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(one, tree)


def content(tree) -> list:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  kinds = [(k, x.dtype, x.shape, np.asarray(x).tobytes()) for k, x in leaves]
  return [jax.tree.structure(tree), kinds]


def all_files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for p in folder.rglob('*') if p.is_file())


def two_steps(folder: pathlib.Path) -> pathlib.Path:
  """Steps 1 and 2; tests copy the folder before they break it."""
  with checkpoint.Checkpoints(folder) as c:
    for step in (1, 2):
      c.save(step, state(step), {'next': step})
  return folder
