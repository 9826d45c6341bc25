"""The prompts of a distillation, and its teacher's answers to them."""

import functools
import itertools
import pathlib
import random
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from specdec_jax import build, requests, types
from specdec_jax.distill import completions, settings, teacher
from specdec_jax.train import text

_ASKED_AT = 0.8  # the temperature of a teacher's questions
_ASKED_AT_ONCE = 256  # of them, recorded in one folder


class Prompts(NamedTuple):
  """Prompts, both kinds numbered from 0.

  kept: to train on; more of them begin with the same.
  held_out: to judge by.
  texts: those to train on with their continuations in the source, or None.
  """

  kept: list[requests.Item]
  held_out: list[requests.Item]
  texts: teacher.Answers | None = None


def make(s: settings.Data, target: build.LanguageModel) -> Prompts:
  """Makes s.prompts + s.held_out prompts from s.source.

  Those of an encoder-decoder are sources; its decoder's text only begins.

  Raises:
    ValueError: the source has fewer.
  """
  count = s.prompts + s.held_out
  if s.source == settings.QUESTIONS:
    return _asked(s, target, generated(count, s.seed))
  if s.source == settings.MAGPIE:
    return _asked(s, target, asked_by(target, s, count))
  if (pathlib.Path(s.source) / teacher.FACTS).exists():
    return _asked(s, target, continued(s, target))
  corpus = text.read(s.source, field=s.field, source_field=s.source_field)
  if target.start is not None:
    return _sources(s, target, corpus)
  draw = np.random.default_rng(s.seed)
  if s.chat:
    documents = list(dict.fromkeys(corpus.documents))
    order = draw.permutation(len(documents))
    return _asked(s, target, [documents[i] for i in order])
  rows = text.pack(corpus.documents, target.tokenizer, s.length)
  if len(rows) < count:
    raise ValueError(
      f'data.prompts={s.prompts} and held_out={s.held_out}: {s.source} has '
      f'{len(rows)} rows of length={s.length}'
    )
  rows = rows[draw.permutation(len(rows))[:count]]
  tokens = rows[:, : s.prompt_tokens].tolist()
  spans = np.tile([[s.prompt_tokens, s.length]], (s.prompts, 1))
  held, kept = tokens[: s.held_out], tokens[s.held_out :]
  texts = teacher.Answers(rows[s.held_out :], spans)
  return Prompts(requests.items(kept), requests.items(held), texts)


def _sources(
  s: settings.Data, target: build.LanguageModel, corpus: text.Corpus
) -> Prompts:
  """The sources of a corpus; without any its paragraphs, its documents if chat.

  Of pairs with one source, only the last target is a text.
  """
  found = corpus.sources or corpus.documents
  if not (corpus.sources or s.chat):
    paragraphs = (x.strip() for y in found for x in y.split('\n\n'))
    found = filter(None, paragraphs)
  found = list(dict.fromkeys(found))
  order = np.random.default_rng(s.seed).permutation(len(found))
  found = [found[i] for i in order]
  prompts = _asked(s, target, found)
  if s.completions != 'text':
    return prompts
  assert target.start is not None
  targets = dict(zip(corpus.sources, corpus.documents, strict=True))
  kept = tuple(found[s.held_out :][: s.prompts])
  pairs = corpus._replace(
    sources=kept, documents=tuple(targets[x] for x in kept)
  )
  rows = text.pair_rows(
    pairs, target.tokenizer, target.start, s.length, s.source_length
  )
  ends = 1 + rows['counted'].sum(1)
  texts = teacher.Answers(
    rows['tokens'],
    np.stack([np.ones_like(ends), ends], 1),
    source=types.Source(rows['source'], rows['source_length']),
  )
  return prompts._replace(texts=texts)


def _asked(
  s: settings.Data, target: build.LanguageModel, questions: Sequence[Any]
) -> Prompts:
  """The first prompts, of these questions, that leave room for an answer.

  questions: texts, or token ids of conversations; as a source, one that is too
    long keeps its beginning.
  """
  count, found = s.prompts + s.held_out, []
  number = lambda items: [x._replace(number=i) for i, x in enumerate(items)]
  most = sampling(s, target).sources
  for read, question in enumerate(questions, 1):
    if target.start is not None and isinstance(question, str):
      question = target.tokenizer.encode(question)
      if not question:  # nothing that an encoder could read
        continue
    prompt = requests.item(target, question, 0, chat=True, most=most)
    if len(prompt.tokens) < s.length:
      found.append(prompt)
    if len(found) == count:
      if read > count:
        logging.warning(
          '%d questions are left out: longer than data.length=%d, or empty',
          read - count,
          s.length,
        )
      held, kept = found[: s.held_out], found[s.held_out :]
      return Prompts(number(kept), number(held))
  raise ValueError(
    f'data.prompts={s.prompts} and held_out={s.held_out}: {s.source} has '
    f'{len(found)} questions shorter than length={s.length}, of '
    f'{len(questions)}'
  )


def generated(count: int, seed: int, kind: str = '') -> list[str]:
  """`count` different questions, from questions.toml; fewer if it has no more.

  A smaller count gives a prefix of the same list.

  kind: code or maths; empty: all kinds.
  """
  every, draw = _forms()['kinds'], random.Random(seed)
  kinds = [x for x in every if kind in ('', x.get('name'))]
  forms = [kind['forms'].strip().split('\n') for kind in kinds]
  shares = [kind['share'] for kind in kinds]
  found: dict[str, None] = {}
  for _ in range(20 * count):
    if len(found) == count:
      break
    (some,) = draw.choices(forms, shares)
    question = draw.choice(some).format(**_values(draw))
    found[question[0].upper() + question[1:]] = None
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


def asked_by(
  target: build.LanguageModel, s: settings.Data, count: int
) -> list[str]:
  """`count` different questions, sampled from the teacher.

  It continues its chat template from the start of the user's message (Magpie,
  https://arxiv.org/abs/2406.08464). Samples without an end after
  s.prompt_tokens tokens are dropped.

  Raises:
    ValueError: no chat template, no room for a question, or a batch of samples
      without a new question.
  """
  (opening, _), room = _template(s, target), s.prompt_tokens
  length = len(opening) + room
  if length >= s.length:
    raise ValueError(
      f'data.length={s.length}: must be above prompt_tokens={room} and '
      f'{len(opening)} tokens of the chat template'
    )
  prompts = requests.items([opening] * _ASKED_AT_ONCE)
  found = dict[str, None]()
  stop_ids = tuple(target.tokenizer.eos_ids)
  for part in itertools.count():
    seed = (9973 * s.seed + 1 + part) % 2**32
    record = teacher.answer(
      s.folder and f'{s.folder}/questions/{part}',
      target,
      prompts,
      completions.Sampling(length, (_ASKED_AT,), seed, stop_ids),
      batch=s.batch,
    )
    before = len(found)
    for tokens, (start, end) in zip(
      record.tokens.tolist(), record.spans.tolist(), strict=True
    ):
      words = target.tokenizer.decode(tokens[start:end]).strip()
      if tokens[end - 1] in stop_ids and words:
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


def continued(s: settings.Data, target: build.LanguageModel) -> list[list[int]]:
  """Conversations of a folder of answers, with a question of the next turn.

  Those whose last answer ended by itself, up to the first prompt that has no
  answer yet; the questions are drawn from questions.toml.

  Raises:
    ValueError: answers of another teacher; no chat template.
  """
  record = teacher.recorded(s.source, target)
  questions = _forms()['lists']['next_turns']
  after = {x: _template(s, target, x)[1] for x in questions}
  draw, found = random.Random(s.seed), []
  for tokens, (start, end) in zip(record.tokens, record.spans, strict=True):
    if not end:
      break
    question = draw.choice(questions)
    if start < end and tokens[end - 1] in target.tokenizer.eos_ids:
      # The template ends the answer itself.
      found.append(tokens[: end - 1].tolist() + after[question])
  return found


def _template(
  s: settings.Data, target: build.LanguageModel, question: str = ''
) -> tuple[list[int], list[int]]:
  """The chat template up to the user's words, and from the end of an answer on.

  question: of the user, after the answer.
  """
  marks, t = ('the words of a user', 'an answer'), target.tokenizer
  words = ''
  if t.chat_template is not None:
    roles = ('user', 'assistant', 'user')
    said = zip(roles, (*marks, question), strict=True)
    words = t.chat([dict(role=x, content=y) for x, y in said])
  before, found, _ = words.partition(marks[0])
  answer, answered, _ = words.partition(marks[1])
  if not (found and answered):
    raise ValueError(
      f'data.source={s.source!r}: {target.label} has no chat template with a '
      "place for a user's words; take another source"
    )
  # A space before the user's words is theirs: it begins their first token.
  before, _ = t.split_chat(words, len(before.rstrip(' ')))
  _, after = t.split_chat(words, len(answer + answered))
  return before, after


def answers(
  s: settings.Data,
  target: build.LanguageModel,
  prompts: Prompts,
  taps: tuple[int, ...],
) -> teacher.Answers | None:
  """The training prompts with their completions; None if a student samples all.

  taps: teacher layers whose features are recorded with them.
  """
  if s.completions == 'student':
    return None
  if s.completions == 'text':
    if prompts.texts is None:  # a folder of answers
      raise ValueError("completions='text': questions come without answers")
    return prompts.texts
  return teacher.answer(
    s.folder,
    target,
    prompts.kept,
    sampling(s, target),
    batch=s.batch,
    taps=taps,
  )


def sampling(
  s: settings.Data, target: build.LanguageModel
) -> completions.Sampling:
  """How the completions of teacher and student are decoded."""
  return completions.Sampling(
    s.length,
    s.temperatures,
    s.seed,
    tuple(target.tokenizer.eos_ids),
    0 if target.start is None else s.source_length,
  )
