"""scripts/distill.py: from a config to a draft that is judged by decoding."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from specdec_jax import build, decode, fields, requests, sharding, types
from specdec_jax import settings as settings_lib
from specdec_jax.bench import machine
from specdec_jax.distill import (
  evaluate,
  heads,
  on_policy,
  questions,
  students,
  teacher,
)
from specdec_jax.distill import prompts as prompts_lib
from specdec_jax.io import eagles, files
from specdec_jax.io import load as models
from specdec_jax.train import data, loop
from specdec_jax.train import step as step_lib
from specdec_jax.train import workdir as workdir_lib
from specdec_jax.verify import reject

# What a run that goes on cannot change: its data, its parameters' shapes.
_FIXED = ('teacher', 'student', 'data', 'batch', 'run.seed', 'read')
_FIXED += ('optimiser.muon',)


@dataclasses.dataclass(frozen=True)
class Teacher:
  source: str
  dtype: str

  def __post_init__(self):
    if not self.source:
      raise ValueError(
        "source='': name a model, for example "
        '--config.teacher.source=hf:org/name'
      )


@dataclasses.dataclass(frozen=True)
class Judge:
  """gamma: drafted a window. new_tokens: after each held-out prompt."""

  gamma: int
  new_tokens: int
  temperature: float

  def __post_init__(self):
    for name in ('gamma', 'new_tokens'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)}: must be 1 or more')


@dataclasses.dataclass(frozen=True)
class Batch:
  """rows: of a step, over all processes."""

  rows: int


@dataclasses.dataclass(frozen=True)
class Settings:
  teacher: Teacher
  student: students.Settings
  data: prompts_lib.Data
  loss: heads.Loss
  batch: Batch
  mesh: settings_lib.Mesh
  optimiser: step_lib.Optimiser
  run: loop.Run
  judge: Judge

  def __post_init__(self):
    data.check_rows(
      {
        'batch.rows': self.batch.rows,
        'data.batch': self.data.batch,
        'data.held_out': self.data.held_out,
      },
      self.mesh.data,
    )
    if self.data.said not in SAID:
      raise ValueError(
        f'data.said={self.data.said!r}: allowed are {", ".join(SAID)}'
      )
    if self.student.kind == 'eagle' and self.data.said not in READ_ONCE:
      raise ValueError(
        f'data.said={self.data.said!r}: an eagle learns from features of its '
        f'teacher, which are recorded once; take {" or ".join(READ_ONCE)}'
      )
    if self.data.keep and self.data.said not in READ_ONCE:
      raise ValueError(
        f'data.keep={self.data.keep}: what a student says is read once, and '
        f'no record of it kept; take (), or data.said={" or ".join(READ_ONCE)}'
      )
    if (
      self.student.kind == 'eagle' and self.student.dtype != self.teacher.dtype
    ):
      raise ValueError(
        f'student.dtype={self.student.dtype!r}: an eagle computes in the dtype '
        f'of its teacher, {self.teacher.dtype!r}; set both'
      )


def settings(config) -> Settings:
  """A ConfigDict as checked dataclasses; nothing is loaded."""
  return fields.parse(Settings, config)


def run(
  s: Settings, workdir: pathlib.Path, *, changed: bool = False
) -> dict[str, Any]:
  """Trains a draft and writes it into workdir; see train_lm.run.

  Raises:
    ValueError: a setting or a file that cannot be used; several processes.
  """
  config = dataclasses.asdict(s) | {'read': _read(s)}
  workdir_lib.open_run(workdir, config, changed=changed, fixed=_FIXED)
  if before := workdir_lib.finished(workdir, config):
    return before['figures'] | {'draft': str(workdir / before['made'])}
  # A student of some layers takes them one by one.
  scan = False if s.student.layers else None
  target = build.load(
    s.teacher.source,
    dtype=s.teacher.dtype,
    mesh=sharding.mesh_of(s.mesh.data, s.mesh.model),
    scan_layers=scan,
  )
  if s.student.vocabulary > target.ids:
    raise ValueError(
      f'student.vocabulary={s.student.vocabulary}: the teacher has '
      f'{target.ids} ids; take at most those, or 0 for all'
    )
  begun = students.begin(s.student, target)
  kept = _kept(s, target.config.depth - 1)
  asked = prompts_lib.ask(s.data, target)
  answers, given = None, asked.texts if s.data.said == 'text' else None
  # Of a text there is a record where it is asked for, or an eagle reads it.
  if s.data.said in ('teacher', 'mixed') or (given is not None and kept):
    answers = prompts_lib.answered(s.data, target, asked.prompts, kept, given)
  ids = begun.ids
  if ids is None:
    ids = vocabulary(s, target, asked, answers)
  make = students.STUDENTS[s.student.kind]
  student = make(s.student, s.loss, target, kept, ids, s.run.seed, begun.draft)
  del begun  # the student has a copy
  batches, refresh = SAID[s.data.said](
    s, target, student, asked, answers, workdir
  )
  tokens = s.batch.rows * s.data.length
  ended = loop.run(
    loop.Task(
      params=student.params,
      loss=student.loss,
      frozen=student.frozen,
      batches=batches,
      judge=judged(s, target, student, asked.prompts[s.data.prompts :]),
      score=lambda figures: figures['block_efficiency'],
      tokens=tokens,
      flops=student.flops * tokens,
      dtype=s.student.dtype,
      refresh=refresh,
    ),
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
    'prompts_sha256': questions.digest([str(x) for x in asked.prompts]),
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


def _read(s: Settings) -> dict[str, str]:
  """SHA-256 of the models that a run begins with: others begin another run."""
  out = {'teacher': models.open_source(s.teacher.source).digest}
  if s.student.path and s.student.kind == 'eagle':
    out['student'] = files.sha256(eagles.existing(s.student.path))
  elif s.student.path:
    out['student'] = models.open_source(s.student.path).digest
  return out


def _kept(s: Settings, last: int) -> tuple[int, ...]:
  """The layers whose features the answers are kept with, if there is a reader.

  Raises:
    ValueError: they are not in order, or not all that the student reads.
  """
  taps = s.student.read(last) if s.student.kind == 'eagle' else ()
  kept = s.data.keep or taps
  for name, found, needed, none in (
    ('student.taps', taps, (), 'the last alone'),
    ('data.keep', kept, taps, 'what the student reads'),
  ):
    wanted = sorted({*found, *needed, last})
    if found and (
      list(found) != wanted or not 0 <= found[0] <= found[-1] <= last
    ):
      raise ValueError(
        f'{name}={found}: want layers of the teacher, 0 to {last}, in '
        f'increasing order, {needed or (last,)} among them; () is {none}'
      )
  return kept


def vocabulary(
  s: Settings,
  target: build.LanguageModel,
  asked: prompts_lib.Asked,
  answers: teacher.Answers | None,
) -> np.ndarray:
  """The ids that the student can propose: the commonest of the answers, or of
  the text where nothing was answered.

  Raises:
    ValueError: nothing is read that could be counted before training.
  """
  if not s.student.vocabulary:
    return np.arange(target.ids)
  n = s.data.prompts  # what follows is held out
  if answers is not None:
    rows = on_policy.rows_of(answers.tokens[:n], answers.spans[:n])
  elif asked.texts is not None:
    rows = on_policy.rows_of(asked.texts[:n], _spans(s))
  else:
    raise ValueError(
      f'student.vocabulary={s.student.vocabulary}: what a student will say '
      "cannot be counted; take data.said='mixed', or 0 for all ids"
    )
  return heads.vocabulary(rows, s.student.vocabulary, target.ids)


def judged(
  s: Settings,
  target: build.LanguageModel,
  student: students.Student,
  prompts: list[list[int]],
) -> Callable[[types.Params], dict[str, Any]]:
  """judge(params) -> figures on the held-out prompts, in the decode loop."""
  model = build.target_model(target)
  drafter = student.drafter(s.judge.gamma)
  options = build.default_options()
  numbers = s.data.prompts + np.arange(len(prompts))
  request = requests.make(
    requests.items(prompts, numbers),
    ids=target.ids,
    context=target.context,
    max_new_tokens=s.judge.new_tokens,
    gamma=s.judge.gamma,
    temperature=s.judge.temperature,
    seed=s.data.seed,
    stop_ids=target.tokenizer.eos_ids,
  )
  request = requests.place(request, target.layout)
  said: list[decode.Output] = []

  def figures(params: types.Params) -> dict[str, Any]:
    rule = reject.RULE
    if not said:
      said.append(evaluate.plain(model, target.params, rule, options, request))
    weights = types.Weights(target.params, student.weights(params))
    return evaluate.judge(
      model, weights, drafter, student.model, rule, options, request, said[0]
    )

  return figures


def _batches(s: Settings, rows, seed: int) -> data.Batches:
  return data.batches(rows, batch=s.batch.rows, seed=seed)


def _text(
  s: Settings, target, student, asked: prompts_lib.Asked, answers, workdir
):
  """The text itself, after the same prompts as the others."""
  if answers is not None:
    return _teacher(s, target, student, asked, answers, workdir)
  assert asked.texts is not None
  rows = on_policy.rows_of(asked.texts[: s.data.prompts], _spans(s))
  return _batches(s, rows, s.run.seed), _never


def _spans(s: Settings) -> np.ndarray:
  """As those of answers, of a text that is given."""
  return np.tile([[s.data.prompt_tokens, s.data.length]], (s.data.prompts, 1))


def _teacher(s: Settings, target, student, asked, answers, workdir):
  del student, asked, workdir
  n = s.data.prompts
  if s.student.kind == 'eagle':
    taps = s.data.keep or s.student.taps or ()
    rows = {k: x[:n] for k, x in heads.rows(answers, taps, taps).items()}
  else:
    rows = on_policy.rows_of(answers.tokens[:n], answers.spans[:n])
    if s.data.keep:
      last = answers.features[:n, :, -target.config.width :]
      rows |= {'features': last, 'mass': answers.mass[:n]}
  return _batches(s, rows, s.run.seed), _never


def _student(
  s: Settings, target, student, asked: prompts_lib.Asked, answers, workdir
):
  """What the student says to as many prompts as it will read until the next
  time; of the teacher's answers, where there are some, every other one."""
  count = min(s.batch.rows * s.data.refresh, s.data.prompts)

  def say(step: int, params: types.Params) -> dict[str, np.ndarray]:
    draw = np.random.default_rng([s.run.seed, step])
    chosen = np.sort(draw.permutation(s.data.prompts)[:count])
    weights, found = student.weights(params), []
    for first in range(0, count, s.data.batch):
      numbers = chosen[first : first + s.data.batch]
      spans, tokens, *_ = teacher.say(
        student.model,
        weights,
        [asked.prompts[i] for i in numbers],
        numbers,
        rule=reject.RULE,
        length=s.data.length,
        temperatures=s.data.temperatures,
        seed=(s.run.seed + step) % 2**32,
        stop_ids=target.tokenizer.eos_ids,
        rows=s.data.batch,
        layout=target.layout,
      )
      found.append(on_policy.rows_of(tokens, spans))
    own = {k: np.concatenate([x[k] for x in found]) for k in found[0]}
    if answers is None:
      return own
    theirs = on_policy.rows_of(answers.tokens[chosen], answers.spans[chosen])
    return on_policy.mixed(own, theirs, s.run.seed + step)

  made = on_policy.OnPolicy(
    workdir / 'said',
    say,
    s.data.refresh,
    lambda rows, step: _batches(s, rows, s.run.seed + step),
  )
  return made, made.refresh


def _never(step: int, params: types.Params) -> None:
  del step, params


# What an eagle can learn from.
READ_ONCE = ('text', 'teacher')
# Who goes on from a prompt (DistillSpec's data sources).
SAID = {
  'text': _text,
  'teacher': _teacher,
  'student': _student,
  'mixed': _student,
}
