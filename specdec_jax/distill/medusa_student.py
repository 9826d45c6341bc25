"""Medusa's heads as a student, and their loss.

Medusa-1 by Cai et al. 2024 (https://arxiv.org/abs/2401.10774): the teacher is
frozen, and every head begins as its next-token prediction. The heads compute in
their teacher's dtype.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import build, hosts, types
from specdec_jax.distill import sections, students
from specdec_jax.drafters import medusa
from specdec_jax.io import files, sources
from specdec_jax.io.published import draft_file, medusa_heads
from specdec_jax.models import lm
from specdec_jax.train import step as step_lib
from specdec_jax.train import text_loss


def check(s: sections.Settings, teacher: sources.Source) -> tuple[int, ...]:
  """Returns the teacher's layers to record: its last."""
  return (teacher.config.depth - 1,)


def make(
  s: sections.Settings, target: build.LanguageModel, ids: np.ndarray
) -> students.Student:
  """Makes the student with loss.unroll heads, for all ids.

  Their blocks are the identity; their matrices, unless shared, the teacher's.
  """
  c, model = target.config, target.model
  assert len(ids) == target.ids
  layout, gather = students.laid_out(target, c, s.mesh.fsdp)
  layer = {'kernel': jnp.zeros((c.width, c.width)), 'bias': jnp.zeros(c.width)}
  own = {} if s.student.share else {'head': target.params['head']}
  head = {'layers': {'0': layer}} | own
  params = {str(i): head for i in range(s.loss.unroll)}
  heads = medusa.Heads(model, target.ids, c.depth, c.width, c.activations)

  def weights(params, target: types.Params) -> types.Params:
    params = text_loss.in_dtype(gather(params), c.dtype)
    return {'heads': params, 'target': target}

  return students.Student(
    params=students.placed(layout, params, students.wide(c)),
    loss=ahead(heads, weights, s.loss),
    frozen=target.params,
    weights=lambda params: weights(params, target.params),
    drafter=lambda gamma: medusa.make(heads, gamma=gamma),
    write=_write,
  )


def _write(
  folder: pathlib.Path, params: types.Params, about: dict[str, Any]
) -> pathlib.Path:
  """Writes a folder as Medusa's authors do."""
  path, heads = folder / 'draft', lm.nest(students.halved(params))
  facts = {
    'medusa_num_heads': len(heads),
    'medusa_num_layers': 1,
    'base_model_name_or_path': about['target'],
  }

  def save() -> None:
    path.mkdir(exist_ok=True)
    files.write(path / 'config.json', json.dumps(facts, indent=2))
    arrays = medusa_heads.stored_as(heads)
    draft_file.write('medusa', path / medusa_heads.FILE, arrays, about)

  hosts.from_first(save)
  return path


def ahead(
  heads: medusa.Heads,
  weights: Callable[[types.Params, types.Params], types.Params],
  settings: sections.Loss,
) -> step_lib.Loss:
  """Makes the mean divergence from the teacher over the heads.

  Head i reads token t's state and is compared with the teacher's distribution
  for token t + 2 + i; its weight is settings.decay ** i.

  weights: (params, frozen) -> weights.draft; frozen: the teacher's parameters.
  batch: as teacher.rows has it, with the last layer's features.
  """
  target = heads.target
  norm = target.norm
  assert norm is not None

  def value(params, frozen, batch, key):
    log_p_BTV = students.teacher_log_p(
      target, frozen, batch, settings.temperature
    )
    features_BTD = students.features(batch, settings.noise, key)
    state_BTD = norm(frozen, features_BTD).astype(heads.dtype)
    own, T = weights(params, frozen), state_BTD.shape[1]
    each = (
      (
        heads.logits(own, i, state_BTD[:, : T - 2 - i]),
        log_p_BTV[:, 1 + i :],
        batch['counted'][:, 2 + i :],
      )
      for i in range(settings.unroll)
    )
    return students.over_steps(settings, each)

  return value
