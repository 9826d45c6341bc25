"""The distillation program: from a config to a draft evaluated by decoding."""

import functools
import pathlib
from typing import Any

import numpy as np

from specdec_jax import build, fields, requests, types
from specdec_jax.distill import (
  completions,
  evaluate,
  on_policy,
  students,
  teacher,
)
from specdec_jax.distill import prompts as prompts_lib
from specdec_jax.distill import settings as settings_lib
from specdec_jax.drafters import draft_file, eagle_file
from specdec_jax.io import files, sources
from specdec_jax.train import data, loop, program

# A resumed run cannot change these: its data and its parameters' shapes.
_FIXED = ('teacher', 'student', 'data', 'batch', 'run.seed', 'read')
_FIXED += ('optimiser.muon',)


def settings(config) -> settings_lib.Settings:
  """A ConfigDict as checked dataclasses; nothing is loaded."""
  return fields.parse(settings_lib.Settings, config)


def run(
  s: settings_lib.Settings, workdir: pathlib.Path, *, changed: bool = False
) -> dict[str, Any]:
  """Trains a draft and writes it into workdir; resumes an earlier run there.

  changed: resume even if settings differ, of those that may.

  Returns:
    The metrics of the best step, 'step', 'finished' and the path of the
    'draft'; only 'step' and 'finished' if a signal ended the run.

  Raises:
    ValueError: an invalid setting or file.
  """
  return program.run(
    s,
    workdir,
    lambda begun: _prepare(s, workdir),
    result='draft',
    changed=changed,
    fixed=_FIXED,
    read=digests(s),
  )


def digests(s: settings_lib.Settings) -> dict[str, str]:
  """SHA-256 of the models that a run reads; a resumed run must match them."""
  found = {'teacher': sources.open_source(s.teacher.source).digest}
  if s.student.path and s.student.kind == 'eagle':
    found['student'] = files.sha256(
      draft_file.find(eagle_file.KIND, s.student.path)
    )
  elif s.student.path:
    found['student'] = sources.open_source(s.student.path).digest
  return found


def _prepare(
  s: settings_lib.Settings, workdir: pathlib.Path
) -> program.Prepared:
  load = functools.partial(
    build.load,
    s.teacher.source,
    dtype=s.teacher.dtype,
    mesh=s.mesh.over(s.rows),
  )
  target = load(
    scan_layers=False if s.student.layers else None,  # to pick single layers
    kernels='xla',  # training reads the parameters
  )
  _check_teacher(s, target)
  recorded = ()  # layers of the teacher
  if s.student.kind == 'eagle':
    recorded = students.taps_of(s.student, target)
  elif s.data.keep:
    recorded = (target.config.depth - 1,)
  start = students.begin(s.student, target)
  students.layout_of(s, target, start)  # raises now, not after the answers
  asked = load()  # on the kernels where there are any, which are faster
  prompts = prompts_lib.make(s.data, asked)
  answers = prompts_lib.answers(s.data, asked, prompts, recorded)
  del asked
  ids = students.vocabulary(s.student, target.ids, start, answers)
  student = students.make(s, target, start, ids)
  del start  # the student has a copy
  if s.student.kind == 'lm':
    _check_length(s.data, 'student', student.model)

  def write(params, about):
    facts = {
      'target': target.label,
      'target_sha256': target.digest,
      'prompts_sha256': teacher.digest(prompts.kept),
      'tokenizer': target.tokenizer.fingerprint(),
    }
    return student.write(workdir, params, facts | about)

  task = _task(s, target, student, prompts, answers, workdir)
  return program.Prepared(task, target.layout, write)


def _check_teacher(
  s: settings_lib.Settings, target: build.LanguageModel
) -> None:
  """Raises ValueError for settings that are too large for the teacher."""
  if s.student.vocabulary > target.ids:
    raise ValueError(
      f'student.vocabulary={s.student.vocabulary}: the teacher has '
      f'{target.ids} ids; give at most those, or 0 for all'
    )
  _check_length(s.data, 'teacher', target.model)
  field, has = s.data.source_field, target.start is not None
  if has and s.student.kind == 'eagle':
    raise ValueError(
      f"student.kind='eagle': reads no source, but {target.label} has an "
      'encoder; give lm'
    )
  if has and s.data.completions == 'text' and not field:
    raise ValueError(
      f"data.source_field='': {target.label} has an encoder; name the field "
      'that it reads, or let the teacher complete its sources'
    )
  if field and not has:
    raise ValueError(
      f'data.source_field={field!r}: {target.label} has no encoder to read it; '
      'leave it empty'
    )


def _check_length(s: settings_lib.Data, who: str, model: types.Model) -> None:
  lengths = {'length': s.length}
  if model.encode is not None:
    lengths['source_length'] = s.source_length
  for name, length in lengths.items():
    if length > model.context:
      raise ValueError(
        f'data.{name}={length}: the context of the {who} holds {model.context} '
        'tokens; give at most those'
      )


def _task(
  s: settings_lib.Settings,
  target: build.LanguageModel,
  student: students.Student,
  prompts: prompts_lib.Prompts,
  answers: teacher.Answers | None,
  workdir: pathlib.Path,
) -> loop.Task:
  """The task of the training loop, evaluated on the held-out prompts."""
  tokens = s.data.length
  tokens += s.data.source_length if target.start is not None else 0
  figures = evaluate.judge(
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
    batches = on_policy.OnPolicy(
      workdir / 'completions',
      _sampler(s, target, student, prompts, answers),
      s.data.refresh,
      lambda rows, step: of(rows, s.run.seed + step),
    )
    refresh = batches.refresh
  return loop.Task(
    params=student.params,
    loss=student.loss,
    frozen=student.frozen,
    batches=batches,
    judge=lambda params: figures(student.weights(params)),
    score=lambda figures: figures['block_efficiency'],
    tokens=round(share * s.batch.rows * tokens),
    flops=share * s.batch.rows * student.flops,
    dtype=s.student.dtype,
    refresh=refresh,
  )


def _sampler(s: settings_lib.Settings, target, student, prompts, answers):
  """(step, params) -> completions for the steps until the next refresh.

  If there are answers of the teacher, these replace about half of them.
  """
  count = min(s.batch.rows * s.data.refresh, s.data.prompts)
  how = prompts_lib.sampling(s.data, target)

  def sample(step: int, params: types.Params) -> dict[str, np.ndarray]:
    draw = np.random.default_rng([s.run.seed, step])
    chosen = np.sort(draw.permutation(s.data.prompts)[:count])
    asked = [prompts.kept[i] for i in chosen]
    found = completions.generate(
      student.model,
      student.weights(params),
      asked,
      how._replace(seed=(s.run.seed + step) % 2**32),
      rows=s.data.batch,
      layout=target.layout,
    )
    source = requests.source_of(asked, count, how.sources)
    own = teacher.rows(teacher.collected(found, source))
    if answers is None:
      return own
    theirs = teacher.rows(teacher.take(answers, chosen))
    return on_policy.mixed(own, theirs, s.run.seed + step)

  return sample
