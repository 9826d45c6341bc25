"""The distillation program: from a config to a draft evaluated by decoding."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from specdec_jax import build, fields, requests, sharding, types
from specdec_jax import settings as settings_lib
from specdec_jax.bench import machine
from specdec_jax.distill import (
  divergences,
  eagle_loss,
  evaluate,
  lm_loss,
  on_policy,
  students,
  teacher,
)
from specdec_jax.distill import prompts as prompts_lib
from specdec_jax.drafters import eagle_file
from specdec_jax.io import draft_file, files
from specdec_jax.io import load as load_lib
from specdec_jax.train import data, loop
from specdec_jax.train import step as step_lib
from specdec_jax.train import workdir as workdir_lib

# Completions recorded before training; an eagle needs one of these.
_RECORDED = ('text', 'teacher')
# A resumed run cannot change these: its data and its parameters' shapes.
_FIXED = ('teacher', 'student', 'data', 'batch', 'run.seed', 'read')
_FIXED += ('optimiser.muon',)


@dataclasses.dataclass(frozen=True)
class Teacher(fields.Checked):
  source: str = fields.setting(needed='a model, such as hf:org/name')
  dtype: str = fields.setting(allowed=settings_lib.DTYPES)

  def __post_init__(self):
    super().__post_init__()
    fields.check_needed(self)


@dataclasses.dataclass(frozen=True)
class Batch(fields.Checked):
  rows: int = fields.setting(low=1, help='of one step')


@dataclasses.dataclass(frozen=True)
class Settings:
  teacher: Teacher
  student: students.Settings
  data: prompts_lib.Data
  loss: divergences.Loss
  batch: Batch
  mesh: settings_lib.Mesh
  optimiser: step_lib.Optimiser
  run: loop.Run
  judge: evaluate.Judge

  def __post_init__(self):
    student = self.student
    data.check_rows(
      {
        'batch.rows': self.batch.rows,
        'data.batch': self.data.batch,
        'data.held_out': self.data.held_out,
      },
      self.mesh.data,
    )
    completions, keep = self.data.completions, self.data.keep
    if completions not in _RECORDED:
      if student.kind == 'eagle':
        raise ValueError(
          f'data.completions={completions!r}: an eagle learns from '
          f'features of its teacher; give {" or ".join(_RECORDED)}'
        )
      if keep:
        raise ValueError(
          f'data.keep={keep}: completions of the student are not kept; '
          f'give (), or data.completions={" or ".join(_RECORDED)}'
        )
    if student.kind == 'eagle' and student.dtype != self.teacher.dtype:
      raise ValueError(
        f'student.dtype={student.dtype!r}: an eagle computes in the dtype of '
        f'its teacher, {self.teacher.dtype!r}; set both'
      )


def settings(config) -> Settings:
  """A ConfigDict as checked dataclasses; nothing is loaded."""
  return fields.parse(Settings, config)


def run(
  s: Settings, workdir: pathlib.Path, *, changed: bool = False
) -> dict[str, Any]:
  """Trains a draft and writes it into workdir; resumes an earlier run there.

  changed: resume even if settings differ, of those that may.

  Returns:
    The metrics of the best step, 'step', 'finished' and the path of the
    'draft'; only 'step' and 'finished' if a signal ended the run.

  Raises:
    ValueError: an invalid setting or file; several processes.
  """
  config = dataclasses.asdict(s) | {'read': _digests(s)}
  workdir_lib.open_run(workdir, config, changed=changed, fixed=_FIXED)
  if before := workdir_lib.finished(workdir, config):
    return before['figures'] | {'draft': str(workdir / before['made'])}
  target = build.load(
    s.teacher.source,
    dtype=s.teacher.dtype,
    mesh=sharding.mesh_of(s.mesh.data, s.mesh.model),
    scan_layers=False if s.student.layers else None,  # to pick single layers
  )
  _check_teacher(s, target)
  taps = recorded_layers(s, target.config.depth - 1)
  start = students.begin(s.student, target)
  prompts = prompts_lib.make(s.data, target)
  answers = None
  if s.data.completions in ('teacher', 'mixed') or taps:
    answers = prompts_lib.answers(s.data, target, prompts, taps)
  ids = vocabulary(s, target, start, prompts, answers)
  make = students.STUDENTS[s.student.kind]
  student = make(s.student, s.loss, target, taps, ids, s.run.seed, start)
  del start  # the student has a copy
  ended = loop.run(
    _task(s, target, student, prompts, answers, workdir),
    s.run,
    s.optimiser,
    workdir,
    config=config,
    place=data.placer(target.layout),
  )
  if ended.best is None:
    return {'step': ended.step, 'finished': False}
  step, params, figures = ended.best
  about = {
    'target': target.label,
    'target_sha256': target.digest,
    'prompts_sha256': prompts_lib.digest(prompts.tokens),
    'tokenizer': target.tokenizer.fingerprint(),
    'config': config,
    'step': step,
    'figures': figures,
    'made_by': machine.made_by(*machine.commit()),
  }
  path = student.write(workdir, params, about)
  figures |= {'step': step, 'finished': True}
  workdir_lib.finish(workdir, config, path.name, figures)
  return figures | {'draft': str(path)}


def _digests(s: Settings) -> dict[str, str]:
  """SHA-256 of the models that a run reads; a resumed run must match them."""
  found = {'teacher': load_lib.open_source(s.teacher.source).digest}
  if s.student.path and s.student.kind == 'eagle':
    found['student'] = files.sha256(
      draft_file.find(eagle_file.KIND, s.student.path)
    )
  elif s.student.path:
    found['student'] = load_lib.open_source(s.student.path).digest
  return found


def _check_teacher(s: Settings, target: build.LanguageModel) -> None:
  """Raises ValueError for settings that are too large for the teacher."""
  if s.student.vocabulary > target.ids:
    raise ValueError(
      f'student.vocabulary={s.student.vocabulary}: the teacher has '
      f'{target.ids} ids; give at most those, or 0 for all'
    )
  _check_length(s, 'teacher', target.context)


def _check_length(s: Settings, who: str, context: int) -> None:
  if s.data.length > context:
    raise ValueError(
      f'data.length={s.data.length}: the context of the {who} holds {context} '
      'tokens; give at most those'
    )


def recorded_layers(s: Settings, last: int) -> tuple[int, ...]:
  """Teacher layers whose features are recorded; () for none.

  Raises:
    ValueError: layers out of order, or some that the student reads missing.
  """
  taps = ()
  if s.student.kind == 'eagle':
    taps = s.student.taps or (last,)
  kept = s.data.keep or taps
  for name, found, needed, default in (
    ('student.taps', taps, (), 'the last alone'),
    ('data.keep', kept, taps, 'what the student reads'),
  ):
    wanted = sorted({*found, *needed, last})
    if found and (list(found) != wanted or found[-1] > last):
      raise ValueError(
        f'{name}={found}: give layers of the teacher, 0 to {last}, in '
        f'increasing order, {needed or (last,)} among them; () is {default}'
      )
  return kept


def vocabulary(
  s: Settings,
  target: build.LanguageModel,
  start: students.Start,
  prompts: prompts_lib.Prompts,
  answers: teacher.Answers | None,
) -> np.ndarray:
  """The ids that the student can propose.

  Those of the draft that it begins with, all ids, or the most frequent ones.

  Args:
    s: settings.
    target: the teacher.
    start: the draft to begin with.
    prompts: in texts, the completions of the source.
    answers: the teacher's completions, None if not recorded.

  Raises:
    ValueError: there are no completions before training.
  """
  if start.ids is not None:
    return start.ids
  if not s.student.vocabulary:
    return np.arange(target.ids)
  if s.data.completions == 'student':
    raise ValueError(
      f'student.vocabulary={s.student.vocabulary}: the completions of a '
      "student cannot be counted before training; give data.completions='mixed'"
      ', or 0 for all ids'
    )
  rows = _completions(s, prompts, answers)
  return students.most_frequent(rows, s.student.vocabulary, target.ids)


def _completions(
  s: Settings,
  prompts: prompts_lib.Prompts,
  answers: teacher.Answers | None,
) -> dict[str, np.ndarray]:
  """Training rows: the answers, or the text, without the held-out prompts."""
  n = s.data.prompts
  if answers is not None:
    return lm_loss.rows(answers.tokens[:n], answers.spans[:n])
  assert prompts.texts is not None
  spans = np.tile([[s.data.prompt_tokens, s.data.length]], (n, 1))
  return lm_loss.rows(prompts.texts[:n], spans)


def _task(
  s: Settings,
  target: build.LanguageModel,
  student: students.Student,
  prompts: prompts_lib.Prompts,
  answers: teacher.Answers | None,
  workdir: pathlib.Path,
) -> loop.Task:
  """The task of the training loop, evaluated on the held-out prompts."""
  if s.student.kind == 'lm':
    _check_length(s, 'student', student.model.context)
  n, tokens = s.data.prompts, s.batch.rows * s.data.length
  figures = evaluate.judge(
    s.judge,
    target,
    student.drafter(s.judge.gamma),
    student.model,
    requests.items(prompts.tokens)[n:],
    s.data.seed,
  )
  of = lambda rows, seed: data.batches(rows, batch=s.batch.rows, seed=seed)
  refresh = lambda step, params: None
  batches: Any  # both kinds have next, state and restore
  if s.data.completions in _RECORDED:
    batches = of(_recorded_rows(s, target, prompts, answers), s.run.seed)
  else:
    sample = _sampler(s, target, student, prompts, answers)
    batches = on_policy.OnPolicy(
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
    judge=lambda params: figures(student.weights(params)),
    score=lambda figures: figures['block_efficiency'],
    tokens=tokens,
    flops=student.flops * tokens,
    dtype=s.student.dtype,
    refresh=refresh,
  )


def _recorded_rows(s: Settings, target, prompts, answers):
  """Training rows, with the teacher's features if the student reads them."""
  n = s.data.prompts
  if s.student.kind == 'eagle':
    return {k: x[:n] for k, x in eagle_loss.rows(answers).items()}
  rows = _completions(s, prompts, answers)
  if s.data.keep:
    last = answers.features[:n, :, -target.config.width :]
    rows |= {'features': last, 'mass': answers.mass[:n]}
  return rows


def _sampler(s: Settings, target, student, prompts, answers):
  """(step, params) -> completions for the steps until the next refresh.

  If there are answers of the teacher, these replace about half of them.
  """
  count = min(s.batch.rows * s.data.refresh, s.data.prompts)
  facts = prompts_lib.facts(s.data, target, prompts.tokens)

  def sample(step: int, params: types.Params) -> dict[str, np.ndarray]:
    draw = np.random.default_rng([s.run.seed, step])
    chosen = np.sort(draw.permutation(s.data.prompts)[:count])
    weights, parts = student.weights(params), []
    for first in range(0, count, s.data.batch):
      numbers = chosen[first : first + s.data.batch]
      spans, tokens = teacher.generate(
        student.model,
        weights,
        [prompts.tokens[i] for i in numbers],
        numbers,
        dataclasses.replace(facts, seed=(s.run.seed + step) % 2**32),
        rows=s.data.batch,
        layout=target.layout,
      )
      parts.append(lm_loss.rows(tokens, spans))
    own = {k: np.concatenate([x[k] for x in parts]) for k in parts[0]}
    if answers is None:
      return own
    theirs = lm_loss.rows(answers.tokens[chosen], answers.spans[chosen])
    return on_policy.mixed(own, theirs, s.run.seed + step)

  return sample
