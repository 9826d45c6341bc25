"""The distillation program: from a config to a draft evaluated by decoding."""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from specdec_jax import build, fields, hosts, requests, types
from specdec_jax.distill import (
  completions,
  eagle_student,
  evaluate,
  lm_student,
  medusa_student,
  sections,
  students,
  teacher,
  training_prompts,
)
from specdec_jax.io import sources
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm
from specdec_jax.train import data, loop, runner, text

# A resumed run cannot change these: its data, its parameters' shapes, and the
# judge, by whose figures its steps are compared.
_FIXED = ('teacher', 'student', 'data', 'batch', 'run.seed', 'read', 'judge')
_FIXED += ('optimiser.muon',)
_KINDS: dict[str, Any] = {
  'dflash': eagle_student,
  'eagle': eagle_student,
  'eagle3': eagle_student,  # with a head of its own
  'lm': lm_student,
  'medusa': medusa_student,
  'mtp': eagle_student,
}


def settings(config) -> sections.Settings:
  """A ConfigDict as checked dataclasses; nothing is loaded."""
  return fields.parse(sections.Settings, config)


def run(
  settings: sections.Settings, workdir: pathlib.Path, *, changed: bool = False
) -> dict[str, Any]:
  """Trains a draft and writes it into workdir.

  Resumes an earlier run there; see runner.run for what it returns.

  changed: resume even if settings differ, of those that may.
  """
  return runner.run(
    settings,
    workdir,
    lambda begun: _prepare(settings, workdir),
    result='draft',
    changed=changed,
    # The size of what is trained, of these kinds.
    fixed=_FIXED + ('loss.unroll',) * (settings.student.kind in sections.WIDE),
    read=digests(settings.teacher, settings.student)
    | text.digests(settings.data.source),
  )


def digests(
  teacher: sections.Teacher, student: sections.Student
) -> dict[str, str]:
  """SHA-256 of the models that a run reads; a resumed run must match them."""
  found = {'teacher': sources.open_source(teacher.source).digest}
  if student.source:
    found['student'] = _KINDS[student.kind].digest(student.source)
  return found


def _prepare(s: sections.Settings, workdir: pathlib.Path) -> runner.Prepared:
  load = functools.partial(
    build.load,
    s.teacher.source,
    dtype=s.teacher.dtype,
    mesh=s.mesh.over(s.rows),
  )
  ask = functools.partial(load, kernels=s.teacher.kernels)
  asked = ask() if s.teacher.quantised else None
  target = (
    dequantised(asked)
    if asked
    else load(
      scan_layers=False if s.student.layers else None,  # to pick single layers
      kernels='xla',  # training reads the parameters
    )
  )
  _check_teacher(s.data, s.student, target)
  kind = _KINDS[s.student.kind]
  start = kind.begin(s.student, target, seed=s.run.seed, fsdp=s.mesh.fsdp)
  if s.student.kind == 'lm':
    _check_length(s.data, 'student', start.config)
  kept = (target.config.depth - 1,) if s.data.keep else ()
  asked = asked or ask()  # on the kernels if there are any, which are faster
  prompts = training_prompts.make(s.data, asked)
  taps = start.taps or kept
  answers = _answers(s.data, asked, prompts, taps, start.scaled)
  del asked
  ids = start.ids
  if ids is None:
    ids = students.vocabulary(s.student.vocabulary, target.ids, answers)
  student = kind.make(s.student, start, target, ids, s.loss, s.data)
  del start  # the student has a copy

  def write(params, about):
    facts = {
      'target': target.label,
      'target_sha256': target.digest,
      'prompts_sha256': teacher.digest(prompts.kept),
      'tokenizer': target.tokenizer.fingerprint(),
    }
    return student.write(workdir, params, facts | about)

  task = _task(s, target, student, prompts, answers, workdir)
  return runner.Prepared(task, target.layout, write)


def dequantised(model: build.LanguageModel) -> build.LanguageModel:
  """A model of the same numbers in float32, its layers apart."""
  config, flat = convert.plain(model.config, model.params)
  for name, x in flat.items():
    wide = x.astype('float32')
    place = model.layout and model.layout.put
    flat[name] = place(name, hosts.fetch(wide)) if place else wide
  config = config.running(dtype='float32')
  return dataclasses.replace(model, lm_config=config, params=lm.nest(flat))


def _check_teacher(
  data: sections.Data, student: sections.Student, target: build.LanguageModel
) -> None:
  """Raises ValueError for settings that this teacher cannot serve."""
  if target.start is not None and student.kind != 'lm':
    raise ValueError(
      f'student.kind={student.kind!r}: reads no source, but {target.label} has '
      'an encoder; give lm'
    )
  if student.vocabulary > target.ids:
    raise ValueError(
      f'student.vocabulary={student.vocabulary}: the teacher has {target.ids} '
      'ids; give at most those, or 0 for all'
    )
  _check_length(data, 'teacher', target.config)
  field, has = data.source_field, target.start is not None
  if has and data.completions == 'text' and not field:
    raise ValueError(
      f"data.source_field='': {target.label} has an encoder; name the field "
      'that it reads, or let the teacher complete its sources'
    )
  if field and not has:
    raise ValueError(
      f'data.source_field={field!r}: {target.label} has no encoder to read it; '
      'leave it empty'
    )


def _check_length(
  data: sections.Data, who: str, config: model_config.LMConfig
) -> None:
  lengths = {'length': data.length}
  if config.encoder is not None:
    lengths['source_length'] = data.source_length
  for name, length in lengths.items():
    if length > config.context:
      raise ValueError(
        f'data.{name}={length}: the context of the {who} holds '
        f'{config.context} tokens; give at most those'
      )


def _answers(
  data: sections.Data,
  target: build.LanguageModel,
  prompts: training_prompts.Prompts,
  taps: tuple[int, ...],
  scaled: bool,
) -> completions.Answers | None:
  """The prompts with their completions; None if the student samples all.

  taps: layers of the teacher whose features are recorded with its own; scaled:
  and their norms.
  """
  if data.completions == 'student':
    return None
  if data.completions == 'text':
    return prompts.texts
  return teacher.answer(
    data.folder,
    target,
    prompts.kept,
    training_prompts.sampling(data, target),
    batch=data.batch,
    taps=taps,
    scaled=scaled,
  )


def _task(
  s: sections.Settings,
  target: build.LanguageModel,
  student: students.Student,
  prompts: training_prompts.Prompts,
  answers: completions.Answers | None,
  workdir: pathlib.Path,
) -> loop.Task:
  """The task of the training loop, evaluated on the held-out prompts."""
  tokens = s.data.length
  tokens += s.data.source_length if target.start is not None else 0
  figures = evaluate.make(
    s.judge,
    target,
    student.drafter,
    student.model,
    prompts.held_out,
    s.data.seed,
  )
  of = lambda rows, seed: data.batches(
    rows, batch=s.batch.rows, seed=seed, ends=teacher.ends(rows)
  )
  refresh, share = lambda step, params: None, 1.0
  batches: Any  # both kinds have next, state and restore
  if s.data.recorded:
    assert answers is not None
    rows = teacher.rows(answers)
    batches = of(rows, s.run.seed)
    share = data.needed(rows, teacher.ends(rows))
  else:
    count = min(s.batch.rows * s.data.refresh, s.data.prompts)
    sample = _sampler(
      s.data, count, s.run.seed, target, student, prompts.kept, answers
    )
    batches = completions.OnPolicy(
      workdir / 'completions',
      sample,
      s.data.refresh,
      lambda rows, step: of(rows, s.run.seed + step),
    )
    refresh = batches.refresh
  return loop.Task(
    params=student.params,
    loss=student.loss,
    frozen=student.frozen,
    batches=batches,
    evaluate=lambda params: figures(student.weights(params)),
    score=lambda figures: figures['block_efficiency'],
    tokens=round(share * s.batch.rows * tokens),
    flops=share * s.batch.rows * student.flops,
    dtype=s.student.dtype,
    refresh=refresh,
  )


def _sampler(
  data: sections.Data,
  count: int,
  seed: int,
  target: build.LanguageModel,
  student: students.Student,
  prompts: list[requests.Item],
  answers: completions.Answers | None,
):
  """(step, params) -> `count` completions, until the next refresh.

  If there are answers of the teacher, these replace about half of them.
  """
  how = training_prompts.sampling(data, target)

  def sample(step: int, params: types.Params) -> dict[str, np.ndarray]:
    draw = np.random.default_rng([seed, step])
    chosen = np.sort(draw.permutation(len(prompts))[:count])
    asked = [prompts[i] for i in chosen]
    found = completions.generate(
      student.model,
      student.weights(params),
      asked,
      how._replace(seed=(seed + step) % 2**32),
      rows=data.batch,
      layout=target.layout,
    )
    source = requests.source_of(asked, count, how.sources)
    own = teacher.rows(teacher.in_order(found, source))
    if answers is None:
      return own
    theirs = teacher.rows(teacher.select(answers, chosen))
    return completions.mixed(own, theirs, seed + step)

  return sample
