"""The train step of scripts/train.py, compiled for TPUs that are not there."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax import sharding
from specdec_jax.chips import aot, report
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


class Step(NamedTuple):
  """Memory and communication of a train step; bytes of one device.

  length: tokens of a row. parts: devices that a matrix is stored on, split.
  parameters, moments: float32. activations: all else that the program holds,
  gathered weights and gradients too.
  """

  length: int
  parts: int
  parameters: float
  moments: float
  activations: float
  fits: bool
  program: aot.Compiled


def check(s: aot.Setting, length: int) -> tuple[aot.Setting, Any]:
  """As report.check; also refuses what the draft cannot read, and encoders."""
  if not aot.knows(s.topology):
    raise ValueError(f'train={length}: is compiled for TPUs, not {s.topology}')
  if s.draft.encoder is not None:
    raise ValueError(f'train={length}: of models without an encoder only')
  if not 2 <= length <= s.draft.context:
    raise ValueError(
      f'train={length}: must be in 2 to {s.draft.context}, what the draft reads'
    )
  return report.check(s)


def make(s: aot.Setting, length: int) -> Step:
  """Compiles the train step of the draft of a setting, with remat.

  Parameters and moments are stored split over the data axis too, where it
  divides the width. Rows are of `length` tokens. Raises ValueError as check.
  """
  s, device = check(s, length)
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
  rows, size = layout.sharding('batch', None), (s.rows, length)
  batch = {
    'tokens': aot.placed(np.zeros(size, np.int32), rows),
    'counted': aot.placed(np.zeros(size, bool), rows),
  }
  lowered = step_lib.make(ADAM, 2, loss, 0, state).lower(state, {}, batch)
  program = aot.compiled(lowered, mesh.size, (), 0, gathers if fsdp else ())
  parameters, moments = _bytes(state.params), _bytes(state.moments)
  held = parameters + moments + program.temporaries
  return Step(
    length,
    parts=s.model * (s.data if fsdp else 1),
    parameters=parameters,
    moments=moments,
    activations=program.temporaries,
    fits=held <= device.memory and not program.refused,
    program=program,
  )


def _state(
  config: model_config.LMConfig, layout: sharding.Layout
) -> step_lib.State:
  """The shapes of a training state, each with its sharding."""
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


def lines(doc: dict[str, Any], step: Step) -> list[str]:
  """The figures of `make` for a terminal; doc: of report.make."""
  s, device = doc['setting'], doc['device']
  names = ('parameters', 'moments', 'activations')
  held = {name: getattr(step, name) for name in names}
  size = report.gb
  out = [
    '',
    f'train step of {s.names[1]}, {s.rows} rows of {step.length} tokens: '
    f'{"fits" if step.fits else "DOES NOT FIT"} ({size(sum(held.values()))} of '
    f'{size(device.memory)} of a device)',
    *(f'  {name:15} {size(x)}' for name, x in held.items()),
    f'  parameters and moments are split over {step.parts} of '
    f'{s.data * s.model} devices',
  ]
  if refused := step.program.refused:
    out.append(f'  the compiler refuses it: {refused}')
  return out + report.program_lines('train step', step.program, device)
