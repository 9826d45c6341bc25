"""The prompts of a distillation, and its teacher's answers to them."""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import random
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from specdec_jax import build, fields, requests
from specdec_jax.distill import teacher
from specdec_jax.io import files
from specdec_jax.train import text

# Sources of questions besides texts: generated here, sampled from the teacher.
QUESTIONS, MAGPIE = 'questions', 'magpie'
_ASKED_AT = 0.8  # the temperature of a teacher's questions
_ASKED_AT_ONCE = 256  # of them, recorded in one folder


@dataclasses.dataclass(frozen=True)
class Data(fields.Checked):
  # questions (generated), magpie (sampled from the teacher), or a text as
  # train.text.read takes it, whose rows begin with the prompt.
  source: str = fields.setting()
  field: str = fields.setting(help='of the records of a text')
  chat: bool = fields.setting(help='documents of the text are questions')
  completions: str = fields.setting(
    allowed=('text', 'teacher', 'student', 'mixed'),
    help='who continues a prompt',
  )
  prompts: int = fields.setting(low=1, help='to train on')
  held_out: int = fields.setting(low=1, help='further prompts, to judge by')
  # Exact for a text, an upper limit for a magpie question.
  prompt_tokens: int = fields.setting(low=1)
  length: int = fields.setting(low=2, help='tokens of a row, prompt included')
  temperatures: tuple[float, ...] = fields.setting(low=0)  # answers alternate
  # Teacher layers of which hidden states are saved with its answers; must
  # contain the last layer and student.taps. If set, an lm student learns from
  # these and its teacher is not run again. (): student.taps for an eagle,
  # nothing for an lm.
  keep: tuple[int, ...] = fields.setting(low=0)
  batch: int = fields.setting(low=1, help='rows decoded together')
  # Steps between two samplings of completions from the student.
  refresh: int = fields.setting(low=1)
  seed: int = fields.setting(low=0, below=2**32)
  folder: str = fields.setting(help='of the answers; empty: the cache folder')

  def __post_init__(self):
    super().__post_init__()
    if self.completions == 'text' and (
      self.chat or self.source in (QUESTIONS, MAGPIE)
    ):
      raise ValueError("completions='text': questions come without answers")
    if self.prompt_tokens >= self.length:
      raise ValueError(
        f'prompt_tokens={self.prompt_tokens}: must be below '
        f'length={self.length}'
      )
    if not self.temperatures:
      raise ValueError('temperatures=(): give at least one')


class Prompts(NamedTuple):
  """Prompts as token ids.

  tokens: of each prompt, the held-out ones last.
  texts: [n, L] prompts and their continuations in the source, or None.
  """

  tokens: list[list[int]]
  texts: np.ndarray | None


def make(s: Data, target: build.LanguageModel) -> Prompts:
  """Makes s.prompts + s.held_out prompts from s.source.

  Raises:
    ValueError: the source has fewer.
  """
  count = s.prompts + s.held_out
  if s.source == QUESTIONS:
    return Prompts(_chat(s, target, generated(count, s.seed)), None)
  if s.source == MAGPIE:
    return Prompts(_chat(s, target, asked_by(target, s, count)), None)
  corpus = text.read(s.source, field=s.field)
  draw = np.random.default_rng(s.seed)
  if s.chat:
    documents = list(dict.fromkeys(corpus.documents))
    order = draw.permutation(len(documents))
    return Prompts(_chat(s, target, [documents[i] for i in order]), None)
  rows = text.pack(corpus.documents, target.tokenizer, s.length)
  if len(rows) < count:
    raise ValueError(
      f'data.prompts={s.prompts} and held_out={s.held_out}: {s.source} has '
      f'{len(rows)} rows of length={s.length}'
    )
  rows = rows[draw.permutation(len(rows))[:count]]
  return Prompts(rows[:, : s.prompt_tokens].tolist(), rows)


def _chat(
  s: Data, target: build.LanguageModel, questions: Sequence[str]
) -> list[list[int]]:
  """The first prompts, of these questions, that leave room for an answer."""
  count, found = s.prompts + s.held_out, []
  for read, question in enumerate(questions, 1):
    prompt = requests.encode(target.tokenizer, question, chat=True)
    if len(prompt) < s.length:
      found.append(prompt)
    if len(found) == count:
      if read > count:
        logging.warning(
          '%d questions are left out: longer than data.length=%d',
          read - count,
          s.length,
        )
      return found
  raise ValueError(
    f'data.prompts={s.prompts} and held_out={s.held_out}: {s.source} has '
    f'{len(found)} questions shorter than length={s.length}, of '
    f'{len(questions)}'
  )


def generated(count: int, seed: int) -> list[str]:
  """`count` different questions, generated from questions.toml.

  A smaller count gives a prefix of the same list.

  Raises:
    ValueError: there are fewer.
  """
  kinds, draw = _forms()['kinds'], random.Random(seed)
  forms = [kind['forms'].strip().split('\n') for kind in kinds]
  shares = [kind['share'] for kind in kinds]
  found: dict[str, None] = {}
  for _ in range(20 * count):
    if len(found) == count:
      break
    (some,) = draw.choices(forms, shares)
    question = draw.choice(some).format(**_values(draw))
    found[question[0].upper() + question[1:]] = None
  if len(found) < count:
    raise ValueError(
      f'data.prompts and held_out need {count} questions: only {len(found)} '
      'different ones were generated; take fewer'
    )
  return list(found)


@functools.cache
def _forms() -> dict[str, Any]:
  path = pathlib.Path(__file__).with_name('questions.toml')
  found = tomllib.loads(path.read_text())
  split = lambda x: [' '.join(item.split()) for item in x.split(';')]
  return found | {'lists': {n: split(x) for n, x in found['lists'].items()}}


def _values(draw: random.Random) -> dict[str, Any]:
  """A value for every placeholder of a template."""
  lists, values = _forms()['lists'], {}
  # The order of these draws determines the questions; do not change it.
  for key, names in (
    ('subjects', ('subject', 'other', 'more')),
    ('people', ('person', 'someone', 'third')),
    ('places', ('place', 'town')),
  ):
    drawn = draw.sample(lists[key], len(names))
    values |= zip(names, drawn, strict=True)
  for name in ('thing', 'task', 'language', 'tongue'):
    values[name] = draw.choice(lists[f'{name}s'])
  for name, low, high in (('a', 3, 40), ('b', 2, 9), ('c', 10, 200)):
    values[name] = draw.randint(low, high)
  return values


def asked_by(target: build.LanguageModel, s: Data, count: int) -> list[str]:
  """`count` different questions, sampled from the teacher.

  It continues its chat template from the start of the user's message (Magpie,
  https://arxiv.org/abs/2406.08464). Samples without an end after
  s.prompt_tokens tokens are dropped.

  Raises:
    ValueError: no chat template, no room for a question, or a batch of samples
      without a new question.
  """
  opening, room = _opening(target), s.prompt_tokens
  length = len(opening) + room
  if length >= s.length:
    raise ValueError(
      f'data.length={s.length}: must be above prompt_tokens={room} and '
      f'{len(opening)} tokens of the chat template'
    )
  prompts, found = [opening] * _ASKED_AT_ONCE, dict[str, None]()
  for part in itertools.count():
    how = dataclasses.replace(
      facts(s, target, prompts),
      length=length,
      temperatures=(_ASKED_AT,),
      seed=(9973 * s.seed + 1 + part) % 2**32,
    )
    record = _record(s, target, how, prompts, name=f'questions/{part}')
    before = len(found)
    for tokens, (start, end) in zip(
      record.tokens.tolist(), record.spans.tolist(), strict=True
    ):
      words = target.tokenizer.decode(tokens[start:end]).strip()
      if tokens[end - 1] in how.stop_ids and words:
        found[words] = None
    if len(found) >= count:
      return list(found)[:count]
    if len(found) == before:
      break
  raise ValueError(
    f"data.source='magpie': only {len(found)} of {count} questions; the last "
    f'{_ASKED_AT_ONCE} that {target.label} began had no new one of at most '
    f'prompt_tokens={room}'
  )


def _opening(target: build.LanguageModel) -> list[int]:
  """The chat template up to the start of the user's message."""
  if target.tokenizer.chat_template is None:
    raise ValueError(
      f"data.source='magpie': {target.label} has no chat template, so it was "
      'never taught what a question looks like; take another source'
    )
  mark = 'the words of a user'
  words = target.tokenizer.chat([{'role': 'user', 'content': mark}])
  before, found, _ = words.partition(mark)
  if not found:
    raise ValueError(
      f"data.source='magpie': the chat template of {target.label} leaves out "
      'the words of a user; take another source'
    )
  return target.tokenizer.encode(before)


def answers(
  s: Data, target: build.LanguageModel, prompts: Prompts, taps: tuple[int, ...]
) -> teacher.Answers:
  """The teacher's answers to all prompts, or its features along their texts."""
  if s.completions != 'text':
    how = dataclasses.replace(facts(s, target, prompts.tokens), taps=taps)
    return _record(s, target, how, prompts.tokens)
  assert prompts.texts is not None
  how = dataclasses.replace(
    facts(s, target, prompts.texts.tolist()), temperatures=(), taps=taps
  )
  return _record(s, target, how, prompts.tokens, texts=prompts.texts)


def facts(
  s: Data, target: build.LanguageModel, rows: Sequence[Sequence[int]]
) -> teacher.Facts:
  """The Facts that the teacher's answers to these prompts depend on."""
  return teacher.Facts(
    teacher=target.digest,
    dtype=target.dtype,
    questions=digest(rows),
    rows=len(rows),
    length=s.length,
    temperatures=s.temperatures,
    seed=s.seed,
    stop_ids=tuple(target.tokenizer.eos_ids),
    taps=(),
  )


def _record(
  s: Data, target, how: teacher.Facts, prompts, *, name='', texts=None
):
  """Records answers in s.folder, or in the cache under a digest of `how`."""
  folder = pathlib.Path(s.folder) / name
  if not s.folder:
    content = json.dumps(dataclasses.asdict(how)).encode()
    key = hashlib.sha256(content).hexdigest()[:16]
    folder = files.cache_folder() / 'answers' / key
  return teacher.answer(
    folder, how, target, prompts, batch=s.batch, texts=texts
  )


def digest(rows: Sequence[Sequence[int]]) -> str:
  """SHA-256 of token ids, in their order."""
  return hashlib.sha256('\0'.join(map(str, rows)).encode()).hexdigest()
