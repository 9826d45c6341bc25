"""The prompts of a distillation, and what its teacher answers to them."""

import dataclasses
import hashlib
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax import build, requests, runtime
from specdec_jax.distill import questions, teacher
from specdec_jax.io import files
from specdec_jax.train import text
from specdec_jax.verify import reject

ASK_AT = 0.8  # the temperature of the questions that a teacher asks
ASKED_AT_ONCE = 256  # of them, in one folder


@dataclasses.dataclass(frozen=True)
class Data:
  """Prompts, and who goes on from them.

  source: questions of our own for the chat template, 'questions' (written here)
  or 'magpie' (the teacher's, of at most prompt_tokens); or a text as
  train.text.read takes it, with field; its rows begin with prompt_tokens as the
  prompt. chat: no rows: each of its documents is a question for the chat
  template. said: a name of distill_program.SAID. prompts: how many; held_out:
  besides, to judge by. length: tokens of a row, prompt included. temperatures:
  of the answers, in turn. keep: layers whose features are kept with what the
  teacher said or read, the last and an eagle's taps among them; an lm learns
  from the last one then, without its teacher. () keeps an eagle's taps, and
  nothing for an lm. batch: rows decoded together. refresh: steps between two
  times that the student speaks. folder: where the teacher's answers lie; '' is
  the cache folder.
  """

  source: str
  field: str
  chat: bool
  said: str
  prompts: int
  held_out: int
  prompt_tokens: int
  length: int
  temperatures: tuple[float, ...]
  keep: tuple[int, ...]
  batch: int
  refresh: int
  seed: int
  folder: str

  def __post_init__(self):
    if self.said == 'text' and (self.chat or self.source in OWN):
      raise ValueError("said='text': questions have no answers of their own")
    for name in ('prompts', 'held_out', 'length', 'batch', 'refresh'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)}: must be 1 or more')
    if not 0 < self.prompt_tokens < self.length:
      raise ValueError(
        f'prompt_tokens={self.prompt_tokens}: must be above 0 and below '
        f'length={self.length}'
      )
    if not self.temperatures:
      raise ValueError('temperatures=(): needs at least one')


class Asked(NamedTuple):
  """Prompts, the held-out ones last. texts: what follows them in the source."""

  prompts: list[list[int]]
  texts: np.ndarray | None


def ask(s: Data, target: build.LanguageModel) -> Asked:
  """s.prompts + s.held_out prompts."""
  count = s.prompts + s.held_out
  if s.source in OWN:
    texts = OWN[s.source](s, target, count)
    prompts = [requests.encode(target.tokenizer, x, chat=True) for x in texts]
    long = max(map(len, prompts))
    if long >= s.length:
      raise ValueError(
        f'data.length={s.length}: the longest question has {long} tokens'
      )
    return Asked(prompts, None)
  corpus = text.read(s.source, field=s.field)
  if s.chat:
    return Asked(_questions(s, target, corpus.documents, count), None)
  rows = text.pack(corpus.documents, target.tokenizer, s.length)
  if len(rows) < count:
    raise ValueError(
      f'data.prompts={s.prompts} and held_out={s.held_out}: {s.source} has '
      f'{len(rows)} rows of length={s.length}'
    )
  order = np.random.default_rng(s.seed).permutation(len(rows))[:count]
  rows = rows[order]
  return Asked(rows[:, : s.prompt_tokens].tolist(), rows)


def _questions(
  s: Data, target: build.LanguageModel, documents: Sequence[str], count: int
) -> list[list[int]]:
  """Prompts of some documents, by chance; those without room are left out."""
  documents = list(dict.fromkeys(documents))
  order = np.random.default_rng(s.seed).permutation(len(documents))
  found: list[list[int]] = []
  for i in order:
    prompt = requests.encode(target.tokenizer, documents[i], chat=True)
    if len(prompt) < s.length:
      found.append(prompt)
    if len(found) == count:
      return found
  raise ValueError(
    f'data.prompts={s.prompts} and held_out={s.held_out}: {s.source} has '
    f'{len(found)} questions shorter than length={s.length}, of '
    f'{len(documents)}'
  )


def _made(s: Data, target: build.LanguageModel, count: int) -> list[str]:
  del target
  return questions.make(count, s.seed)


def _magpie(s: Data, target: build.LanguageModel, count: int) -> list[str]:
  """Different questions that the teacher itself asks, sampled at ASK_AT.

  It goes on from its chat template up to where a user's words begin (Magpie,
  https://arxiv.org/abs/2406.08464); what has not ended after s.prompt_tokens
  tokens is no question.

  Raises:
    ValueError: no chat template, no room for a question, or no new question in
      a whole part.
  """
  opening, room = _opening(target), s.prompt_tokens
  if len(opening) + room >= s.length:
    raise ValueError(
      f'data.length={s.length}: must be above prompt_tokens={room} and '
      f'{len(opening)} tokens of the chat template'
    )
  stop, found = target.tokenizer.eos_ids, dict[str, None]()
  for part in itertools.count():
    said = _answers(
      s,
      target,
      [opening] * ASKED_AT_ONCE,
      f'questions/{part}',
      length=len(opening) + room,
      temperatures=(ASK_AT,),
      seed=(9973 * s.seed + 1 + part) % 2**32,
    )
    before = len(found)
    for tokens, (start, end) in zip(
      said.tokens.tolist(), said.spans.tolist(), strict=True
    ):
      words = target.tokenizer.decode(tokens[start:end]).strip()
      if tokens[end - 1] in stop and words:
        found[words] = None
    if len(found) >= count:
      return list(found)[:count]
    if len(found) == before:
      break
  raise ValueError(
    f"data.source='magpie': only {len(found)} of {count} questions; the last "
    f'{ASKED_AT_ONCE} that {target.label} began had no new one of at most '
    f'prompt_tokens={room}'
  )


def _opening(target: build.LanguageModel) -> list[int]:
  """The chat template up to where a user's words begin."""
  if target.tokenizer.chat_template is None:
    raise ValueError(
      f"data.source='magpie': {target.label} has no chat template, so it was "
      'never taught what a question looks like; take another source'
    )
  mark = 'what a user says'
  text = target.tokenizer.chat([{'role': 'user', 'content': mark}])
  before, found, _ = text.partition(mark)
  if not found:
    raise ValueError(
      f"data.source='magpie': the chat template of {target.label} leaves out "
      'what a user says; take another source'
    )
  return target.tokenizer.encode(before)


# Where questions of our own come from: (s, target, count) -> texts.
OWN = {'questions': _made, 'magpie': _magpie}


def answered(
  s: Data,
  target: build.LanguageModel,
  prompts: list[list[int]],
  kept: tuple[int, ...],
  texts: np.ndarray | None = None,
) -> teacher.Answers:
  """The teacher's answers to all prompts, the held-out ones too.

  texts: what follows each prompt instead of an answer; the teacher reads it.
  """
  return _answers(
    s,
    target,
    prompts,
    '',
    length=s.length,
    temperatures=s.temperatures if texts is None else (),
    seed=s.seed,
    taps=kept,
    texts=texts,
  )


def _answers(
  s: Data,
  target: build.LanguageModel,
  prompts: list[list[int]],
  name: str,
  *,
  length: int,
  temperatures: Sequence[float],
  seed: int,
  taps: tuple[int, ...] = (),
  texts: np.ndarray | None = None,
) -> teacher.Answers:
  """In s.folder under a name, or in the cache folder under what they are."""
  said = prompts if texts is None else texts.tolist()
  asked = teacher.Asked(
    teacher=target.digest,
    dtype=target.dtype,
    questions=questions.digest([str(x) for x in said]),
    stop_ids=tuple(target.tokenizer.eos_ids),
    rows=len(prompts),
    length=length,
    temperatures=tuple(temperatures),
    seed=seed,
    taps=tuple(taps),
  )
  if s.folder:
    folder = pathlib.Path(s.folder) / name
  else:
    facts = json.dumps(dataclasses.asdict(asked)).encode()
    key = hashlib.sha256(facts).hexdigest()[:16]
    folder = files.cache_folder() / 'answers' / key
  return teacher.answer(
    folder,
    prompts,
    asked,
    build.target_model(target),
    target.params,
    rule=reject.RULE,
    batch=s.batch,
    track=runtime.track,
    texts=texts,
    layout=target.layout,
  )
