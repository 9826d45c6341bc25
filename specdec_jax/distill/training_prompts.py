"""Makes a distillation's prompts, from questions, documents or pairs."""

import functools
import pathlib
import random
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from specdec_jax import build, requests
from specdec_jax.distill import completions, sections
from specdec_jax.train import text


class Prompts(NamedTuple):
  """Prompts, both kinds numbered from 0."""

  kept: list[requests.Item]  # to train on; more of them begin with the same
  held_out: list[requests.Item]  # to evaluate with
  # Rows of those to train on, with their continuations in the source, or None.
  texts: dict[str, np.ndarray] | None = None


def make(data: sections.Data, target: build.LanguageModel) -> Prompts:
  """Makes data.prompts + data.held_out prompts; ValueError if there are fewer.

  An encoder-decoder's are sources; its decoder's text only begins.
  """
  count = data.prompts + data.held_out
  if data.source == sections.QUESTIONS:
    return _fitting(data, target, generated(count, data.seed))
  draw = np.random.default_rng(data.seed)
  if data.chat and (chats := text.chats(data.source, data.field)):
    found = [chats[i] for i in draw.permutation(len(chats))]
    return _fitting(data, target, found)
  corpus = text.read(
    data.source, field=data.field, source_field=data.source_field
  )
  if data.chat or target.start is not None:
    found = corpus.sources or corpus.documents
    if not (corpus.sources or data.chat):  # paragraphs
      found = [x.strip() for y in found for x in y.split('\n\n')]
    found = list(dict.fromkeys(filter(None, found)))
    found = [found[i] for i in draw.permutation(len(found))]
    prompts = _fitting(data, target, found)
    if data.completions != 'text':
      return prompts
    assert target.start is not None
    kept = tuple(found[data.held_out :][: data.prompts])
    # Of equal sources the last one's.
    targets = dict(zip(corpus.sources, corpus.documents, strict=True))
    said = tuple(targets[x] for x in kept)
    pairs = corpus._replace(sources=kept, documents=said)
    lengths = data.length, data.source_length
    rows = text.pair_rows(pairs, target.tokenizer, target.start, *lengths)
    return prompts._replace(texts=rows)
  rows = text.pack(corpus, target.tokenizer, data.length)
  if len(rows) < count:
    raise ValueError(
      f'data.prompts={data.prompts} and held_out={data.held_out}: '
      f'{data.source} has {len(rows)} rows of length={data.length}'
    )
  rows = rows[draw.permutation(len(rows))[:count]]
  tokens = rows[:, : data.prompt_tokens].tolist()
  held, kept = tokens[: data.held_out], tokens[data.held_out :]
  counted_L = np.arange(data.length) >= data.prompt_tokens
  counted_NL = np.tile(counted_L, (len(kept), 1))
  texts = {'tokens': rows[data.held_out :], 'counted': counted_NL}
  return Prompts(requests.items(kept), requests.items(held), texts)


def _fitting(
  data: sections.Data, target: build.LanguageModel, texts: Sequence[Any]
) -> Prompts:
  """Takes the first texts or chats that leave room for an answer.

  A source that is too long keeps its beginning.
  """
  count, found = data.prompts + data.held_out, []
  number = lambda items: [x._replace(number=i) for i, x in enumerate(items)]
  most = completions.source_room(data, target)
  for read, prompt in enumerate(texts, 1):
    if target.start is not None and isinstance(prompt, str):
      prompt = target.tokenizer.encode(prompt)
      if not prompt:  # nothing that an encoder could read
        continue
    prompt = requests.item(target, prompt, 0, chat=True, most=most)
    if len(prompt.tokens) < data.length:
      found.append(prompt)
    if len(found) == count:
      if read > count:
        logging.warning(
          '%d questions are left out: longer than data.length=%d, or empty',
          read - count,
          data.length,
        )
      held, kept = found[: data.held_out], found[data.held_out :]
      return Prompts(number(kept), number(held))
  raise ValueError(
    f'data.prompts={data.prompts} and held_out={data.held_out}: {data.source} '
    f'has {len(found)} questions shorter than length={data.length}, of '
    f'{len(texts)}'
  )


# --- questions from forms -----------------------------------------------------


def generated(count: int, seed: int, kind: str = '') -> list[str]:
  """Draws `count` different questions; fewer if there are no more.

  A smaller count gives a prefix. kind: code or maths; empty: all kinds.
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
  """Draws a value for every placeholder in a form."""
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
