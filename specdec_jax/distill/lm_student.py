"""A language model as a student, and its loss."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, forward, hosts, sharding, types
from specdec_jax.distill import sections, students
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import export, sources, tokenizer
from specdec_jax.io.published import draft_file
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm
from specdec_jax.train import step as step_lib
from specdec_jax.train import text_loss


def check(s: sections.Settings, teacher: sources.Source) -> tuple[int, ...]:
  """Returns the teacher's layers to record; refuses what does not fit."""
  student, data = s.student, s.data
  config, ids = config_of(student, teacher)
  if student.vocabulary and not ids and data.completions == 'student':
    raise ValueError(
      f'student.vocabulary={student.vocabulary}: the completions of a student '
      "cannot be counted before training; give data.completions='mixed', or 0 "
      'for all ids'
    )
  export.settings(config)  # raises for what cannot be saved at the end
  students.check_length(data, 'student', config)
  return (teacher.config.depth - 1,) if data.keep else ()


def config_of(
  student: sections.Student, teacher: Any
) -> tuple[model_config.LMConfig, tuple[int, ...]]:
  """Returns a student's config, and the ids that its source proposes or ().

  teacher: a Source, or that model in memory; refuses one that does not match.
  """
  theirs, ids = teacher.config, ()
  students.check_layers(student, theirs)
  if student.layers:
    return theirs.of_layers(student.layers), ids
  if student.size:
    config = model_config.sized(student.size, vocab=theirs.vocab)
    config = dataclasses.replace(config, start=theirs.start)
  else:
    draft = sources.open_source(student.source)
    config, ids = draft.config, draft.draft_ids
    tokenizer.check_same(teacher.tokenizer, draft.tokenizer)
    if len(ids) not in (0, student.vocabulary):
      raise ValueError(
        f'student.source={student.source}: proposes {len(ids)} ids; set '
        'student.vocabulary to these'
      )
  if (config.encoder is None) != (theirs.encoder is None):
    raise ValueError(
      f'student {student.size or student.source} and teacher {teacher.label}: '
      'one has no encoder; both need one, or neither'
    )
  if student.share and config.width != theirs.width:
    raise ValueError(
      f'student.share: size {student.size} has width {config.width}, '
      f'{teacher.label} {theirs.width}; give share=False'
    )
  if student.share:
    same = {n: getattr(theirs, n) for n in ('tied', 'head_scale', 'encoder')}
    config = dataclasses.replace(config, **same)
  return config, ids


def pruned(
  config: model_config.LMConfig, params: types.Params, layers: Sequence[int]
) -> tuple[model_config.LMConfig, types.Params]:
  """Picks layers from a model that has them apart: (config, params)."""
  assert not config.run.scan_layers, 'load it with scan_layers=False'
  kept = {str(n): params['layers'][str(i)] for n, i in enumerate(layers)}
  return config.of_layers(layers), params | {'layers': kept}


def make(
  s: sections.Settings, target: build.LanguageModel, ids: np.ndarray
) -> students.Student:
  """Makes the student that proposes `ids`, or those of student.source."""
  student = s.student
  config, own = config_of(student, target)
  shares = draft_file.SHARED if student.share else ()
  if student.source:
    draft = build.load(
      student.source, dtype='float32', scan_layers=False, kernels='xla'
    )
    config, params = draft.config, draft.params
  elif student.size:
    params = lm.init(config, s.run.seed)
    params |= {n: target.params[n] for n in params if n in shares}
  else:
    config, params = pruned(target.config, target.params, student.layers)
    # Fused on a mesh too, unlike the teacher: the same student on any devices.
    # A copy of the containers: fusing modifies them.
    config, params = convert.fuse(config, jax.tree.map(lambda x: x, params))
  layout, gather = students.laid_out(target, config, s.mesh.fsdp)
  config = config.running(dtype=students.wide(config))
  full_DV = None
  if student.vocabulary:
    full_DV = np.array(hosts.fetch(params['head']), config.dtype)
    config, params = convert.reduce(config, params, own or ids.tolist())
  params = students.placed(layout, params, config.dtype)
  trained = {n: x for n, x in params.items() if n not in shares}
  shared = {n: x for n, x in params.items() if n in shares}
  constrain = layout and layout.constrain
  model = lm.make(
    config, ids=target.ids, vocab=target.model.vocab, constrain=constrain
  )
  teacher, given = target.config, target.params
  # Without the mass, p is normalised over all ids, so all columns are needed.
  if s.data.keep and config.proposes and s.loss.temperature in (0, 1):
    teacher, given = convert.reduce(teacher, given, config.proposes)
  return students.Student(
    params=trained,
    loss=distilled(
      config.running(dtype=target.config.dtype),
      teacher,
      s.loss,
      ids=target.ids,
      layout=layout,
      over=target.layout,
    ),
    frozen={'teacher': given, 'shared': shared},
    weights=lambda params: gather(params | shared),
    drafter=lambda gamma: lm_drafter.make(model, gamma=gamma),
    model=model,
    write=lambda folder, params, about: _write(
      folder, student, target, config, params | shared, full_DV, about
    ),
  )


def _write(
  folder: pathlib.Path,
  student: sections.Student,
  target: build.LanguageModel,
  config: model_config.LMConfig,
  params: types.Params,
  full_DV: np.ndarray | None,
  about: dict[str, Any],
) -> pathlib.Path:
  """Writes a folder; if all but its layers is the teacher's, a file with those.

  transformers needs a head for all ids: full_DV gives the columns that the
  student does not propose; None if it proposes all.
  """
  path, params, ids = folder / 'draft', hosts.fetch(params), config.proposes
  whole = config, params
  if full_DV is not None:
    head_DV = full_DV.copy()
    head_DV[:, list(ids)] = params['head']
    own = dataclasses.replace(config, proposes=(), tied=False)
    whole = own, params | {'head': head_DV}

  def save() -> None:
    if student.layers and student.share:
      file = folder / 'draft.safetensors'
      draft_file.write_layers(file, config, params, about)
    export.save(path, *whole, target.tokenizer, made_by=about, draft_ids=ids)

  hosts.from_first(save)
  return path


def distilled(
  student: model_config.LMConfig,
  teacher: model_config.LMConfig,
  settings: sections.Loss,
  *,
  ids: int,
  layout: sharding.Layout | None = None,
  over: sharding.Layout | None = None,
) -> step_lib.Loss:
  """Makes the mean divergence from the teacher's distributions along a text.

  No gradient flows through the teacher, or through how the text was sampled.
  DistillSpec (Zhou et al. 2023, https://arxiv.org/abs/2310.08461), algorithm 1.

  Args:
    student: in its forward pass's dtype. Both are compared on the ids that it
      proposes; p is not renormalised.
    teacher: reads every batch. Where the batch has its 'features' [B, T, D] and
      'mass' [B, T] (see completions.generate), only its last norm and head run,
      and at temperature 1 its head needs only the student's ids.
    ids: how many ids are tokens. layout, over: student's and teacher's.
    frozen: {'teacher': its parameters, 'shared': what the student takes of it}.
    batch: as for train.text_loss.cross_entropy; own encoders read the sources.
  """

  def model(config: model_config.LMConfig, layout) -> types.Model:
    # Logits of other ids, all -inf, would cost more than the student does.
    few = len(config.proposes)
    return lm.make(
      config,
      ids=few or ids,
      vocab=few or teacher.vocab,
      constrain=layout and layout.constrain,
    )

  p, q = model(teacher, over), model(student, layout)
  gather = text_loss.gatherer(layout)

  def loss(params, frozen, batch, key):
    log_p = students.teacher_log_p(
      p, frozen['teacher'], batch, settings.temperature
    )
    if student.proposes and not teacher.proposes:
      log_p = log_p[..., jnp.asarray(student.proposes)]
    params = text_loss.in_dtype(params | frozen['shared'], student.dtype)
    params = gather(params)
    source = text_loss.source_of(batch)
    hidden_BTD = forward.hidden(q, params, batch['tokens'], source)
    logits_q = q.head(params, hidden_BTD[:, :-1])
    step = logits_q, jax.lax.stop_gradient(log_p), batch['counted'][:, 1:]
    value, figures = students.over_steps(settings, [step])
    return value, {'train_alpha': figures['train_alpha'][0]}

  return loss
