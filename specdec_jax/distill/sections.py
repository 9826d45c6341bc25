"""The config of a distillation: one class for each section."""

import dataclasses

from specdec_jax import fields
from specdec_jax.distill import divergences
from specdec_jax.kernels import library
from specdec_jax.models import convert
from specdec_jax.train import data, loop
from specdec_jax.train import step as step_lib

QUESTIONS = 'questions'  # a source of prompts besides texts: generated here


@dataclasses.dataclass(frozen=True)
class Teacher(fields.Checked):
  source: str = fields.setting(needed='a model, such as hf:org/name')
  # Training reads integers dequantised, in float32.
  dtype: str = fields.setting(allowed=convert.DTYPES, help='as target.dtype')
  kernels: str = fields.setting(
    allowed=library.CHOICES, help='of its answers, as target.kernels'
  )


# Kind of student: its settings that have to be empty.
_WITHOUT = {
  'dflash': ('size', 'source'),
  'eagle': ('size', 'layers'),
  'eagle3': ('size', 'layers', 'source'),
  'lm': ('taps',),
  'medusa': ('taps', 'size', 'layers', 'source', 'vocabulary'),
  'mtp': ('taps', 'size', 'layers', 'source'),
}
# What loss.unroll counts, for students that draft a window in one pass.
WIDE = {'dflash': 'masks', 'medusa': 'heads'}


@dataclasses.dataclass(frozen=True)
class Student(fields.Checked):
  """The student; each kind has some of these settings."""

  kind: str = fields.setting(allowed=tuple(_WITHOUT))
  # Teacher layers whose hidden states an eagle reads; () is the last one, of
  # an eagle3 or dflash three.
  taps: tuple[int, ...] = fields.setting(low=0)
  size: str = fields.setting(help='of models.config.SIZES, random weights')
  # Teacher layers that an lm or dflash begins with.
  layers: tuple[int, ...] = fields.setting(low=0)
  source: str = fields.setting(help='a draft of the same kind to begin with')
  # A medusa's heads then have no matrix of all ids each.
  share: bool = fields.setting(help="freeze the teacher's embedding and head")
  # Number of ids that it can propose, the most frequent ones; 0 is all.
  vocabulary: int = fields.setting(low=0)

  def __post_init__(self):
    super().__post_init__()
    for name in _WITHOUT[self.kind]:
      if value := getattr(self, name):
        empty = type(value)()
        raise ValueError(f'{name}={value!r}: of no {self.kind}; give {empty!r}')
    if self.kind != 'lm':
      return
    given = [x for x in ('size', 'layers', 'source') if getattr(self, x)]
    if len(given) != 1:
      raise ValueError(
        f'kind=lm: has {" and ".join(given) or "nothing"}; give it one of size '
        '(random weights), layers (of the teacher), source (a model)'
      )
    if self.source and self.share:
      raise ValueError(
        'share=True: a student of a source has its own embedding and head; '
        'give share=False'
      )


@dataclasses.dataclass(frozen=True)
class Data(fields.Checked):
  # Questions are generated; rows of a text begin with the prompt.
  source: str = fields.setting(help='questions, or a text: train.text.read')
  field: str = fields.setting(help='of the records of a text')
  source_field: str = fields.setting(help='that an encoder reads, or empty')
  # Whole documents for an encoder too, which else reads paragraphs.
  chat: bool = fields.setting(help='documents of the text are questions')
  completions: str = fields.setting(
    allowed=('text', 'teacher', 'student', 'mixed'),
    help='who continues a prompt',
  )
  prompts: int = fields.setting(low=1, help='to train on')
  held_out: int = fields.setting(low=1, help='further prompts, to judge by')
  prompt_tokens: int = fields.setting(low=1, help='of a row of a text')
  length: int = fields.setting(low=2, help='tokens of a row, prompt included')
  source_length: int = fields.setting(low=2, help='of what an encoder reads')
  temperatures: tuple[float, ...] = fields.setting(low=0)  # answers alternate
  # Save the teacher's last hidden states with its answers: the steps of an lm
  # need not run it then. Other kinds always have what they read.
  keep: bool = fields.setting()
  batch: int = fields.setting(low=1, help='rows decoded together')
  # Steps between two samplings of completions from the student.
  refresh: int = fields.setting(low=1)
  seed: int = fields.setting(low=0, below=2**32)
  folder: str = fields.setting(help='of the answers; empty: the cache folder')

  def __post_init__(self):
    super().__post_init__()
    asked = self.chat or self.source == QUESTIONS
    if self.completions == 'text' and asked:
      raise ValueError("completions='text': questions come without answers")
    if self.source_field and asked:
      raise ValueError(
        f'source_field={self.source_field!r}: a question is a source; give none'
      )
    if self.keep and self.completions != 'teacher':
      raise ValueError("keep=True: hidden states need completions='teacher'")
    if self.prompt_tokens >= self.length:
      raise ValueError(
        f'prompt_tokens={self.prompt_tokens}: is not below length'
      )
    if not self.temperatures:
      raise ValueError('temperatures=(): give at least one')


@dataclasses.dataclass(frozen=True)
class Loss(fields.Checked):
  divergence: str = fields.setting(help='see divergences.divergence_of')
  # Of teacher and student; 0 is replaced by 1: argmax has no gradient.
  temperature: float = fields.setting(low=0, help='best that of serving')
  # Of an eagle or mtp; a medusa's heads, or the masks of a dflash's blocks.
  unroll: int = fields.setting(low=1, help='draft steps to train over')
  # Weight of step s + 1 relative to step s.
  decay: float = fields.setting(above=0, high=1)
  # Uniform, on the features, as a share of their root mean square.
  noise: float = fields.setting(low=0)

  def __post_init__(self):
    super().__post_init__()
    divergences.divergence_of(self.divergence)


@dataclasses.dataclass(frozen=True)
class Batch(fields.Checked):
  rows: int = fields.setting(low=1, help='of one step')


@dataclasses.dataclass(frozen=True)
class Judge(fields.Checked):
  gamma: int = fields.setting(low=1, help='tokens drafted in a window')
  new_tokens: int = fields.setting(low=1, help='after each held-out prompt')
  temperature: float = fields.setting(low=0, help='of the decoding that judges')


@dataclasses.dataclass(frozen=True)
class Settings:
  teacher: Teacher
  student: Student
  data: Data
  loss: Loss
  batch: Batch
  mesh: step_lib.Mesh
  optimiser: step_lib.Optimiser
  run: loop.Run
  judge: Judge

  def __post_init__(self):
    rows, parts = {'batch.rows': self.batch.rows}, self.optimiser.accumulate
    data.check_rows(rows, parts, 'optimiser.accumulate')
    kind, gamma = self.student.kind, self.judge.gamma
    if kind == 'lm':
      return
    if self.data.completions != 'teacher':
      raise ValueError(
        f'data.completions={self.data.completions!r}: {kind} learns from '
        "features of its teacher's answers; give teacher"
      )
    most = self.data.length - 2  # as far as the last head looks ahead
    if kind in WIDE and not gamma <= self.loss.unroll <= most:
      raise ValueError(
        f'loss.unroll={self.loss.unroll}: the {WIDE[kind]} of a {kind}; give '
        f'judge.gamma={gamma} at least, and at most data.length - 2 = {most}'
      )
