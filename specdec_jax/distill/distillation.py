"""Distils a draft from a config, and evaluates it by decoding."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
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
from specdec_jax.io import files, sources
from specdec_jax.io.published import draft_file
from specdec_jax.models import convert, lm
from specdec_jax.train import data, loop, runner, text

# A resumed run cannot change these: its data, its parameters' shapes, and the
# judge, by whose figures its steps are compared.
_FIXED = ('teacher', 'student', 'data', 'batch', 'run.seed', 'read', 'judge')
_FIXED += ('optimiser.muon',)
KINDS: dict[str, Any] = dict.fromkeys(eagle_student.KINDS, eagle_student)
KINDS |= {'lm': lm_student, 'medusa': medusa_student}


def settings(config) -> sections.Settings:
  """Checks a ConfigDict and returns it as dataclasses; loads nothing."""
  return fields.parse(sections.Settings, config)


def run(
  settings: sections.Settings, workdir: pathlib.Path, *, changed: bool = False
) -> dict[str, Any]:
  """Trains a draft and writes it into workdir; see runner.run.

  Resumes an earlier run there; changed: even if settings that may differ do.
  """
  return runner.run(
    settings,
    workdir,
    lambda begun: _prepare(settings, workdir),
    result='draft',
    changed=changed,
    # The size of what is trained, of these kinds.
    fixed=_FIXED + ('loss.unroll',) * (settings.student.kind in sections.WIDE),
    read=digests(settings),
  )


def digests(s: sections.Settings) -> dict[str, str]:
  """Hashes what a run reads; a resumed run must match these SHA-256."""
  found = text.digests(s.data.source)
  found['teacher'] = sources.open_source(s.teacher.source).digest
  if (path := s.student.source) and s.student.kind == 'lm':
    found['student'] = sources.open_source(path).digest
  elif path:
    found['student'] = files.sha256(draft_file.find(draft_file.EAGLE, path))
  return found


def _prepare(s: sections.Settings, workdir: pathlib.Path) -> runner.Prepared:
  # Of every batch that a mesh splits.
  rows = {'batch.rows': s.batch.rows, 'data.batch': s.data.batch}
  rows['data.held_out'] = s.data.held_out
  mesh, dtype = s.mesh.over(rows), s.teacher.dtype
  opened = sources.open_source(s.teacher.source)
  _check_teacher(s.data, s.student, opened)
  kind = KINDS[s.student.kind]
  taps = kind.check(s, opened)
  load = functools.partial(build.load, opened, dtype=dtype, mesh=mesh)
  # Answers on the kernels if there are any: faster, but training needs 'xla'.
  asked = load(kernels=s.teacher.kernels)
  if dtype in convert.CODES:
    target = dequantised(asked)
  else:
    scan = False if s.student.layers else None  # apart, to pick single layers
    target = load(scan_layers=scan, kernels='xla')
  prompts = training_prompts.make(s.data, asked)
  answers = None  # the student samples all
  if s.data.completions == 'text':
    answers = prompts.texts
  elif s.data.completions != 'student':
    answers = teacher.answer(s.data, asked, prompts.kept, taps)
  del asked
  ids = students.vocabulary(s.student.vocabulary, target.ids, answers)
  student = kind.make(s, target, ids)

  def write(params, about):
    facts = {
      'target': target.label,
      'target_sha256': target.digest,
      'prompts_sha256': teacher.digest(prompts.kept),
      'tokenizer': target.tokenizer.fingerprint(),
    }
    return student.write(workdir, params, facts | about)

  return _task(s, target, student, prompts, answers, workdir), write


def dequantised(model: build.LanguageModel) -> build.LanguageModel:
  """Converts a model to float32, its layers apart."""
  config, flat = convert.plain(model.config, model.params)
  for name, x in flat.items():
    wide = x.astype('float32')
    place = model.layout and model.layout.put
    flat[name] = place(name, hosts.fetch(wide)) if place else wide
  config = config.running(dtype='float32')
  return dataclasses.replace(model, lm_config=config, params=lm.nest(flat))


def _check_teacher(
  data: sections.Data, student: sections.Student, opened: sources.Source
) -> None:
  """Refuses settings that this teacher cannot serve."""
  field, has = data.source_field, opened.start is not None
  if has and student.kind != 'lm':
    raise ValueError(
      f'student.kind={student.kind!r}: reads no source, but {opened.label} has '
      'an encoder; give lm'
    )
  students.check_length(data, 'teacher', opened.config)
  if (field and not has) or (has and not field and data.completions == 'text'):
    raise ValueError(
      f'data.source_field={field!r}: {opened.label} has '
      f'{"an" if has else "no"} encoder; name the field that one reads, or none'
    )


def _task(
  s: sections.Settings,
  target: build.LanguageModel,
  student: students.Student,
  prompts: training_prompts.Prompts,
  answers: dict[str, np.ndarray] | None,
  workdir: pathlib.Path,
) -> loop.Task:
  """Makes the training loop's task, judged by the held-out prompts."""
  tokens = s.data.length
  tokens += s.data.source_length if target.start is not None else 0
  held, q = prompts.held_out, student.model
  figures = evaluate.make(
    s.judge, target, student.drafter, q, held, s.data.seed
  )
  of = lambda rows, seed: data.Batches(
    rows, batch=s.batch.rows, seed=seed, ends=teacher.ends(rows)
  )
  refresh, share = lambda step, params: None, 1.0
  batches: Any  # both kinds have next, state and restore
  if s.data.completions in ('text', 'teacher'):
    assert answers is not None
    batches = of(answers, s.run.seed)
    share = batches.share
  else:
    batches = completions.OnPolicy(
      workdir / 'completions',
      _sampler(s, target, student, prompts.kept, answers),
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
    refresh=refresh,
    place=data.placer(target.layout),
  )


def _sampler(
  s: sections.Settings,
  target: build.LanguageModel,
  student: students.Student,
  prompts: list[requests.Item],
  answers: dict[str, np.ndarray] | None,
):
  """Makes (step, params) -> rows; the teacher's answers replace about half."""
  seed, count = s.run.seed, min(s.batch.rows * s.data.refresh, s.data.prompts)
  room, model = completions.source_room(s.data, target), student.model
  assert model is not None

  def sample(step: int, params: types.Params) -> dict[str, np.ndarray]:
    draw = np.random.default_rng([seed, step])
    chosen = np.sort(draw.permutation(len(prompts))[:count])
    asked = [prompts[i] for i in chosen]
    weights, draws = student.weights(params), (seed + step) % 2**32
    found = completions.generate(target, model, weights, asked, s.data, draws)
    at, parts = zip(*found, strict=True)  # in the order in which rows ended
    order = np.argsort(np.concatenate(at))
    whole = jax.tree.map(lambda *x: np.concatenate(x)[order], *parts)
    own = teacher.rows(whole, requests.source_of(asked, count, room))
    if answers is None:
      return own
    theirs = {name: x[chosen] for name, x in answers.items()}
    return completions.mixed(own, theirs, seed + step)

  return sample
