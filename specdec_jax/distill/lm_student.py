"""A language model of its own as a student, and its loss."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, forward, hosts, types
from specdec_jax.distill import divergences, sections, students
from specdec_jax.drafters import draft_file
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import export, sources, tokenizer
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm, work
from specdec_jax.train import step as step_lib
from specdec_jax.train import text_loss

Array = jax.Array


def digest(source: str) -> str:
  """SHA-256 of the model at student.source."""
  return sources.open_source(source).digest


def begin(
  student: sections.Student,
  target: build.LanguageModel,
  *,
  seed: int,
  fsdp: bool,
) -> students.Start:
  """Takes layers of the teacher, reads student.source or draws random weights.

  Refuses what does not match this teacher or these settings, and what could not
  be saved.
  """
  ids = None
  if student.size:
    config, params = _sized(student, target, seed)
  elif student.source:
    draft = _read(student, target)
    config, params = draft.config, draft.params
    if draft.draft_ids:
      ids = np.array(draft.as_draft[0].proposes)
  else:
    config, params = pruned(target.config, target.params, student.layers)
    # Fused on a mesh too, unlike the teacher: the same student on any devices.
    # A copy of the containers: fusing modifies them.
    config, params = convert.fuse(config, jax.tree.map(lambda x: x, params))
  export.settings(config)  # raises for what cannot be saved at the end
  layout = students.layout_of(target, config, fsdp)
  return students.Start(config, params, ids, (), layout)


def _sized(
  student: sections.Student, target: build.LanguageModel, seed: int
) -> tuple[model_config.LMConfig, types.Params]:
  """(config, params) of student.size, random but for what is shared."""
  theirs = target.config
  config = model_config.sized(student.size, vocab=theirs.vocab)
  _check_encoder(f'student.size={student.size!r}', config, target)
  config = dataclasses.replace(config, start=theirs.start)
  if not student.share:
    return config, lm.init(config, seed)
  if config.width != theirs.width:
    raise ValueError(
      f'student.share: size {student.size} has width {config.width}, '
      f'{target.label} {theirs.width}; give share=False'
    )
  same = {n: getattr(theirs, n) for n in ('tied', 'head_scale', 'encoder')}
  config = dataclasses.replace(config, **same)
  params = lm.init(config, seed)
  _, shared = split_shared(params, share=True)
  return config, params | {n: target.params[n] for n in shared}


def _read(
  student: sections.Student, target: build.LanguageModel
) -> build.LanguageModel:
  """The model at student.source."""
  draft = sources.open_source(student.source)
  _check_encoder(f'student.source={student.source}', draft.config, target)
  tokenizer.check_same(target.tokenizer, draft.tokenizer)
  if len(draft.draft_ids) not in (0, student.vocabulary):
    raise ValueError(
      f'student.source={student.source}: proposes {len(draft.draft_ids)} ids; '
      'set student.vocabulary to these'
    )
  return build.load(draft, dtype='float32', scan_layers=False, kernels='xla')


def _check_encoder(
  what: str, config: model_config.LMConfig, target: build.LanguageModel
) -> None:
  """Raises ValueError if only one of student and teacher has an encoder."""
  has = lambda c: 'has no encoder' if c.encoder is None else 'has one'
  if has(config) != has(target.config):
    raise ValueError(
      f'{what} {has(config)}, teacher {target.label} {has(target.config)}; an '
      'encoder: both need one, or neither'
    )


def pruned(
  config: model_config.LMConfig, params: types.Params, layers: Sequence[int]
) -> tuple[model_config.LMConfig, types.Params]:
  """Returns (config, params) of some layers of a model that has them apart."""
  assert not config.run.scan_layers, 'load it with scan_layers=False'
  if not set(layers) <= set(range(config.depth)):
    raise ValueError(
      f'student.layers={tuple(layers)}: allowed are those of the teacher, 0 to '
      f'{config.depth - 1}'
    )
  kept = {str(n): params['layers'][str(i)] for n, i in enumerate(layers)}
  return config.of_layers(layers), params | {'layers': kept}


def split_shared(params: types.Params, share: bool) -> tuple[Any, Any]:
  """Splits a student's parameters into (trained, frozen)."""
  frozen = {n: x for n, x in params.items() if share and n in draft_file.SHARED}
  return {n: x for n, x in params.items() if n not in frozen}, frozen


def make(
  student: sections.Student,
  start: students.Start,
  target: build.LanguageModel,
  ids: np.ndarray,
  loss: sections.Loss,
  data: sections.Data,
) -> students.Student:
  """Makes the student that proposes `ids`."""
  config = start.config.running(dtype=students.wide(start.config))
  params = students.copied(start.params, lm.nest(lm.shapes(config)))
  full_DV = None
  if student.vocabulary:
    # A copy: training donates its arrays.
    full_DV = np.array(hosts.fetch(params['head']))
    config, params = convert.reduce(config, params, ids.tolist())
  trained, shared = split_shared(
    students.put(start.layout, params), student.share
  )
  constrain = start.layout and start.layout.constrain
  model = lm.make(
    config, ids=target.ids, vocab=target.model.vocab, constrain=constrain
  )
  value, teacher = _loss(student, config, start, target, loss, data.keep)
  # What a step reads of the teacher; recorded features leave only its head.
  read = {'head': teacher['head']} if data.keep else teacher
  lengths = data.length, data.source_length
  products = lambda params: work.row_products(params, *lengths)
  # No gradient passes a shared encoder; one passes a shared head.
  encoder = {n: x for n, x in shared.items() if n == 'encoder'}
  flops = 6.0 * products(trained | shared) - 4.0 * products(encoder)
  gather = text_loss.gatherer(start.layout)
  return students.Student(
    params=trained,
    loss=value,
    frozen={'teacher': teacher, 'shared': shared},
    weights=lambda params: gather(params | shared),
    drafter=lambda gamma: lm_drafter.make(model, gamma=gamma),
    model=model,
    flops=flops + 2.0 * products(read),
    write=lambda folder, params, about: _write(
      folder, student, target, config, params | shared, full_DV, about
    ),
  )


def _loss(
  student: sections.Student,
  config: model_config.LMConfig,
  start: students.Start,
  target: build.LanguageModel,
  loss: sections.Loss,
  keep: bool,
) -> tuple[step_lib.Loss, types.Params]:
  """The loss, and the teacher's parameters for it."""
  teacher, params = target.config, target.params
  # Without the mass, p is normalised over all ids, so all columns are needed.
  if keep and config.proposes and (loss.temperature or 1) == 1:
    teacher, params = convert.reduce(teacher, params, config.proposes)

  def model(config: model_config.LMConfig, layout) -> types.Model:
    # Logits of other ids, all -inf, would cost more than the student does.
    few = len(config.proposes)
    return lm.make(
      config,
      ids=few or target.ids,
      vocab=few or target.model.vocab,
      constrain=layout and layout.constrain,
    )

  value = distilled(
    model(config.running(dtype=student.dtype), start.layout),
    student.dtype,
    model(teacher, target.layout),
    loss,
    remat=student.remat,
    ids=config.proposes,
    gather=text_loss.gatherer(start.layout),
  )
  return value, params


def _write(
  folder: pathlib.Path,
  student: sections.Student,
  target: build.LanguageModel,
  config: model_config.LMConfig,
  params: types.Params,
  full_DV: np.ndarray | None,
  about: dict[str, Any],
) -> pathlib.Path:
  """Writes a folder; if all but its layers is the teacher's, a file of those.

  transformers needs a head for all ids: those that the student does not propose
  keep their columns of full_DV, None if it proposes all.
  """
  path, whole, params = folder / 'draft', config, hosts.fetch(params)
  if student.layers and student.share:
    file, saved = folder / 'draft.safetensors', (config, params, about)
    hosts.from_first(lambda: draft_file.write_layers(file, *saved))
  if full_DV is not None:
    head_DV = full_DV.copy()
    head_DV[:, list(config.proposes)] = params['head']
    params |= {'head': head_DV}
    whole = dataclasses.replace(config, proposes=(), tied=False)
  hosts.from_first(
    lambda: export.save(
      path,
      whole,
      params,
      target.tokenizer,
      made_by=about,
      draft_ids=config.proposes,
    )
  )
  return path


# --- loss ---------------------------------------------------------------------


def distilled(
  student: types.Model,
  dtype: str,
  teacher: types.Model,
  settings: sections.Loss,
  *,
  remat: bool,
  ids: Sequence[int] = (),
  gather: Callable[[Any], Any] = lambda params: params,
) -> step_lib.Loss:
  """Makes the mean divergence from the teacher's distributions along a text.

  No gradient flows through the teacher, or through how the text was sampled.
  DistillSpec (Zhou et al. 2023, https://arxiv.org/abs/2310.08461), algorithm 1.

  Args:
    student: a model of the teacher's vocabulary, or of `ids` alone; so too the
      teacher where only these columns of its head are needed.
    dtype: of the student's forward pass.
    teacher: reads every batch. Where the batch has its 'features' [B, T, D] and
      'mass' [B, T] (of completions.Answers), only its last norm and head are
      run, and at temperature 1 its head needs only the columns of `ids`.
    settings: the divergence and its temperature.
    remat: keep only the residual stream between layers for the backward pass.
    ids: ids that the student can propose, () for all; p is not renormalised.
    gather: of the student's parameters; see train.text_loss.gatherer.

  Returns:
    loss(params, frozen, batch, key). frozen: {'teacher': its parameters,
    'shared': those that the student takes from it}. batch: as for
    train.text_loss.cross_entropy; each model reads the sources with its own
    encoder. Its figure 'train_alpha' is sum min(p, q).
  """
  divergence = divergences.divergence_of(settings.divergence)
  temperature = settings.temperature or 1.0
  read = text_loss.remat_layers(
    lambda params, *inputs: forward.hidden(student, gather(params), *inputs),
    remat,
  )

  def loss(params, frozen, batch, key):
    del key
    log_p = jax.lax.stop_gradient(
      students.teacher_log_p(teacher, frozen['teacher'], batch, temperature)
    )
    params = text_loss.in_dtype(params | frozen['shared'], dtype)
    source = text_loss.source_of(batch)
    hidden_BTD = read(params, batch['tokens'], source)
    logits_q = student.head(gather(params), hidden_BTD[:, :-1])
    log_q = jax.nn.log_softmax(logits_q / temperature, -1)
    log_p, log_q = (_of(ids, x) for x in (log_p, log_q))
    counted_BT = batch['counted'][:, 1:]
    value = text_loss.mean(divergence(log_p, log_q), counted_BT)
    alpha = text_loss.mean(divergences.alpha(log_p, log_q), counted_BT)
    return value, {'train_alpha': alpha}

  return loss


def _of(ids: Sequence[int], x: Array) -> Array:
  """The columns of these ids, () for all; x itself if it has no others."""
  if len(ids) in (0, x.shape[-1]):
    return x
  return jnp.take(x, jnp.asarray(ids, jnp.int32), axis=-1)
