"""Compiles scripts/train.py's train step for TPUs that are not there."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax import sharding
from specdec_jax.chips import aot, roofline
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import step as step_lib
from specdec_jax.train import text_loss

# Only whether there are moments, and how many, changes the program.
ADAM = step_lib.Optimiser(
  learning_rate=1e-2,
  warmup=0,
  final=0.1,
  weight_decay=0.1,
  clip=1.0,
  b1=0.9,
  b2=0.95,
  muon=0.0,
  accumulate=1,
)


def make(s: aot.Setting, device: roofline.Chip) -> dict[str, Any]:
  """Compiles the draft's train step, with remat, on rows of s.train tokens.

  Splits parameters and moments over the data axis too, if it divides the width.

  Returns:
    parameters, moments: float32, bytes on a device; activations: all else that
      it holds, gathered weights and gradients too. fits: whether it has room
      for them. parts: devices that share a matrix. program: an aot.Compiled.
  """
  mesh = sharding.make_mesh(s.data, s.model, aot.devices(s.topology))
  config = s.draft.running(scan_layers=False)
  fsdp = config.width % s.data == 0
  layout = sharding.lay_out(mesh, config, fsdp=fsdp)
  state = _state(config, layout)
  whole = sharding.lay_out(mesh, config)
  gathers = {
    math.prod(whole.parameter(n, len(x.shape)).shard_shape(x.shape))
    for n, x in lm.shapes(config).items()
  }
  loss = text_loss.cross_entropy(
    config, ids=config.vocab, remat=True, layout=layout
  )
  batch = {
    name: aot.placed(
      np.zeros((s.rows, s.train), dtype), layout.sharding('batch', None)
    )
    for name, dtype in (('tokens', np.int32), ('counted', bool))
  }
  lowered = step_lib.make(ADAM, 2, loss, 0, state).lower(state, {}, batch)
  program = aot.compiled(lowered, mesh.size, (), 0, gathers if fsdp else ())
  held = dict(
    parameters=_bytes(state.params),
    moments=_bytes(state.moments),
    activations=program.temporaries,
  )
  return dict(
    held,
    fits=sum(held.values()) <= device.memory and not program.refused,
    parts=s.model * (s.data if fsdp else 1),
    program=program,
  )


def _state(
  config: model_config.LMConfig, layout: sharding.Layout
) -> step_lib.State:
  """Returns a training state's shapes, each with its sharding."""
  whole = layout.sharding()
  placed: Any = aot.placed
  shapes = lm.shapes(config.running(dtype='float32'))
  params = lm.nest(
    {n: placed(x, layout.parameter(n, x.ndim)) for n, x in shapes.items()}
  )
  adam = step_lib.transform(ADAM, 2)
  moments = optax.tree_map_params(
    adam,
    lambda x, parameter: placed(x, parameter.sharding),
    jax.eval_shape(adam.init, params),
    params,
    transform_non_params=lambda x: placed(x, whole),
  )
  return step_lib.State(placed(jnp.int32(0), whole), params, moments)


def _bytes(tree: Any) -> float:
  size = lambda x: np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
  return float(sum(map(size, jax.tree.leaves(tree))))
