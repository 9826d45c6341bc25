"""Reads prompts to measure with: JSONL, a built-in set, Python's manual; not
yet tokenised or put through a chat template."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_jax.io import files

_BUILTIN = pathlib.Path(__file__).with_name('builtin_prompts.jsonl')
MANUAL = 'stdlib:prose'  # as in train/text.py
SHORT, LONG = 80, 1000  # characters of a paragraph
_PARAGRAPHS = 40
_CONTENT = ('prompt', 'turns', 'messages', 'tokens')
# The names of Spec-Bench and MT-Bench among them; `reference` is not read.
_KEYS = ('id', 'question_id', 'category', *_CONTENT, 'reference')


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A user's question: one of turns, tokens and messages.

  id: unique in its file.
  turns: the user's texts, each after the answer to the one before.
  messages: a conversation, dicts with 'role' and 'content'.
  own: the line's own settings, by name, not checked here.
  listed: given as {"turns"}, even with one turn; the answer is then a list.
  """

  id: str
  category: str | None = None
  turns: tuple[str, ...] = ()
  tokens: tuple[int, ...] | None = None
  messages: tuple[dict[str, str], ...] = ()
  own: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  listed: bool = dataclasses.field(default=False, compare=False)

  @property
  def given(self) -> Any:
    """Returns what precedes the first answer, as requests.item takes it."""
    if self.tokens is not None:
      return self.tokens
    return self.messages or self.turns[0]


def read(path: str | os.PathLike, own: Sequence[str] = ()) -> list[Prompt]:
  """Reads a JSONL file's prompts, in its order; checks all first.

  A line is {"prompt": text}, {"turns": [text, ...]}, {"tokens": [id, ...]} or
  {"messages": [{"role": text, "content": text}, ...]}, with an optional
  "category" and "id" (or "question_id": a text or an integer). The id is by
  default the prompt's index from 0.

  own: names of settings that a line may have beside these.

  Raises:
    ValueError: a malformed line, 'path:line: ...', or a file without prompts.
  """
  found: dict[str, tuple[str, Prompt]] = {}
  for index, (where, row) in enumerate(files.read_jsonl(path)):
    try:
      prompt = _parse(row, str(index), own)
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from error
    if prompt.id in found:
      raise ValueError(
        f'{where}: id {_shown(prompt.id)} is taken by {found[prompt.id][0]}: '
        'ids must be unique (a line without one gets its index from 0), rename '
        'one of the two'
      )
    found[prompt.id] = where, prompt
  if not found:
    raise ValueError(f'{path}: empty: give at least one line with a prompt')
  return [prompt for _, prompt in found.values()]


def builtin() -> list[Prompt]:
  """Reads the built-in prompts, equally many in each category."""
  return read(_BUILTIN)


def manual() -> list[Prompt]:
  """Reads Python's manual, which differs between versions: its paragraphs over
  80 characters, cut at 1,000, shuffled."""
  try:
    from pydoc_data import topics  # half a megabyte, and not in every Python
  except ImportError as error:
    raise ValueError(f'{MANUAL}: not in this Python; name a file') from error
  found = [x.strip() for y in topics.topics.values() for x in y.split('\n\n')]
  found = list(dict.fromkeys(x for x in found if len(x) > SHORT))
  order = np.random.default_rng(0).permutation(len(found)).tolist()
  return [Prompt(str(i), turns=(found[x][:LONG],)) for i, x in enumerate(order)]


def chosen(path: str) -> list[Prompt]:
  """Reads a file; stdlib:prose is `manual`, an empty path the built-in ones."""
  if path == MANUAL:
    return manual()[:_PARAGRAPHS]
  return read(path) if path else builtin()


def first_of_each(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
  """Keeps each category's first `count` prompts, in their order."""
  first = {p.id for group in by_category(prompts) for p in group[:count]}
  return [prompt for prompt in prompts if prompt.id in first]


def halves(prompts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
  """Returns two disjoint halves, which differ by at most one prompt in each
  category and in all; alternates along prompts sorted by category."""
  grouped = [prompt for group in by_category(prompts) for prompt in group]
  return grouped[::2], grouped[1::2]


def request_number(id: str) -> int:
  """Returns an integer in [0, 2**31), which keys randomness, from an id.

  Uses a decimal integer as it is; any other id, such as '007' or '-7', gives
  the first 31 bits of its SHA-256: the same in every process and file.
  """
  if re.fullmatch('0|[1-9][0-9]{0,9}', id) and int(id) < 2**31:
    return int(id)
  digest = hashlib.sha256(id.encode()).digest()
  return int.from_bytes(digest[:4], 'big') >> 1


def by_category(prompts: Sequence[Any]) -> list[list[Any]]:
  """Splits prompts, or what else has a category, into a list for each."""
  groups = {}
  for prompt in prompts:
    groups.setdefault(prompt.category, []).append(prompt)
  return list(groups.values())


def _parse(row: dict[str, Any], index: str, own: Sequence[str]) -> Prompt:
  """Reads one line's prompt; a line without an id gets its index."""
  allowed = *_KEYS, *own
  unknown = [key for key in row if key not in allowed]
  if unknown:
    raise ValueError(
      f'unknown key {_shown(unknown[0])}: allowed are {", ".join(allowed)}; '
      'remove it'
    )
  given = [key for key in _CONTENT if key in row]
  if len(given) != 1:
    has = ' and '.join(given) or 'no prompt'
    raise ValueError(f'has {has}: give exactly one of {", ".join(_CONTENT)}')
  (kind,) = given
  content = [row[kind]] if kind == 'prompt' else row[kind]
  if not isinstance(content, list) or not content:
    raise ValueError(
      f'{kind} is {_shown(content)}: it must be a list of at least one'
    )
  if 'id' in row and 'question_id' in row:
    raise ValueError('has id and question_id: keep one of the two')
  name = 'question_id' if 'question_id' in row else 'id'
  id = row.get(name, index)
  if type(id) is not int:
    _text(id, name, kind='a text or an integer')
  category = _text(row['category'], 'category') if 'category' in row else None
  for i, x in enumerate(content):
    where = kind if kind == 'prompt' else f'{kind}[{i}]'
    if kind == 'messages':
      if not isinstance(x, dict):
        raise ValueError(f'{where} is {_shown(x)}: it must be an object')
      for key in ('role', 'content'):
        _text(x.get(key), f'{where}.{key}')
    elif kind != 'tokens':
      _text(x, where)
    # Exactly int: JSON's true is one of Python's integers.
    elif type(x) is not int or not 0 <= x < 2**31:
      raise ValueError(
        f'{where} is {_shown(x)}: it must be a token id, an integer from 0 to '
        '2147483647'
      )
  return Prompt(
    str(id),
    category,
    own={key: row[key] for key in own if key in row},
    listed=kind == 'turns',
    **{'turns' if kind == 'prompt' else kind: tuple(content)},
  )


def _text(text: Any, name: str, *, kind: str = 'a text') -> str:
  if not isinstance(text, str):
    raise ValueError(f'{name} is {_shown(text)}: it must be {kind}')
  if not text:
    raise ValueError(f'{name} is empty: write something or remove it')
  return text


def _shown(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 60 else f'{text[:57]}...'
