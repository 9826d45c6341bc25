"""What both kinds of drafts are to a distillation.

eagle_student.py and lm_student.py have the same two functions. `begin` checks
all that needs no answers of the teacher, and returns a Start; `make` turns that
into a Student once the vocabulary is known.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, sharding, types
from specdec_jax.distill import completions, teacher
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import step as step_lib


class Start(NamedTuple):
  """What a student begins with.

  config: of its model, an eagle.EagleConfig or an LMConfig.
  params: initial values, which `make` copies.
  ids: the vocabulary of the draft that it goes on from; None: yet to be chosen.
  taps: layers of the teacher whose features are recorded for it.
  layout: of what is trained; None is one device.
  """

  config: Any
  params: types.Params
  ids: np.ndarray | None
  taps: tuple[int, ...]
  layout: sharding.Layout | None


class Student(NamedTuple):
  """A draft to train."""

  params: types.Params  # trained, float32 or wider
  loss: step_lib.Loss
  frozen: Any  # further parameters of the loss
  weights: Callable[[types.Params], types.Params]  # -> weights.draft
  drafter: Callable[[int], types.Drafter]  # by gamma
  model: types.Model  # its q, which reads weights.draft
  flops: float  # of one row of a batch, forward and backward
  # (folder, params, about) -> the path of the finished draft.
  write: Callable[[pathlib.Path, types.Params, dict[str, Any]], pathlib.Path]


def vocabulary(
  size: int, ids: int, answers: completions.Answers | None
) -> np.ndarray:
  """Returns the ids that a student can propose, ascending.

  The `size` most frequent ones of the completions, of equally frequent ones the
  smaller; all of the teacher's `ids` where size is 0.
  """
  if not size:
    return np.arange(ids)
  if answers is None:
    raise ValueError(
      f'student.vocabulary={size}: the completions of a student cannot be '
      "counted before training; give data.completions='mixed', or 0 for all ids"
    )
  rows = teacher.rows(answers)
  counts = np.bincount(rows['tokens'][rows['counted']], minlength=ids)[:ids]
  most = np.argsort(-counts, kind='stable')[:size]
  return np.sort(most).astype(np.int32)


def layout_of(
  target: build.LanguageModel, config: model_config.LMConfig, fsdp: bool
) -> sharding.Layout | None:
  """Lays a student out on its teacher's mesh: every device computes with all
  of it."""
  if target.layout is None:
    return None
  mesh = target.layout.mesh
  return sharding.lay_out(mesh, config, tensor_parallel=1, fsdp=fsdp)


def put(layout: sharding.Layout | None, params: types.Params) -> types.Params:
  """Places nested parameters on the devices of a layout."""
  if layout is None:
    return params
  flat = lm.flatten(params)
  return lm.nest({name: layout.put(name, x) for name, x in flat.items()})


def wide(config: model_config.LMConfig) -> str:
  """The dtype of trained parameters."""
  return 'float64' if config.dtype == 'float64' else 'float32'


def copied(params: types.Params, wanted: types.Params) -> types.Params:
  """Copies parameters to the dtypes of `wanted`: training donates its own."""
  return jax.tree.map(lambda x, s: jnp.array(x, s.dtype), params, wanted)
