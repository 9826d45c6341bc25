"""Prompts to measure with: a JSONL reader and a small set of our own.

Knows no tokenizer and no chat template: a prompt is text turns or token ids.
"""

import codecs
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

CATEGORIES = (
  'chat',
  'summarisation',
  'translation',
  'question_answering',
  'maths',
  'code',
  'creative',
)
_BUILTIN = pathlib.Path(__file__).with_name('builtin_prompts.jsonl')
_CONTENT = ('prompt', 'turns', 'tokens')
# The names of Spec-Bench and MT-Bench among them; `reference` is not read.
_KEYS = ('id', 'question_id', 'category', *_CONTENT, 'reference')


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One request: user turns, or tokens when turns is empty.

  listed: it was given as {"turns"}, be it one turn, and is answered in lists.
  """

  id: str
  category: str | None = None
  turns: tuple[str, ...] = ()
  tokens: tuple[int, ...] | None = None
  listed: bool = dataclasses.field(default=False, compare=False)


def read(path: str | os.PathLike) -> list[Prompt]:
  """The prompts of a JSONL file, in its order; all are checked first.

  A line is {"prompt": text}, {"turns": [text, ...]} or {"tokens": [id, ...]},
  with an optional "id" (or "question_id": a text or an integer) and "category".
  Without an id, the line's index from 0 is the id. ValueErrors start with
  path:line, lines counted from 1.
  """
  prompts, first_line = [], {}
  for index, line in enumerate(_lines(path)):
    where = f'{path}:{index + 1}'
    prompt = _parse(line, str(index), where)
    if prompt.id in first_line:
      raise ValueError(
        f'{where}: id {_shown(prompt.id)} is taken by line '
        f'{first_line[prompt.id]}: ids must be unique (a line without one gets '
        'its index from 0), rename one of the two'
      )
    first_line[prompt.id] = index + 1
    prompts.append(prompt)
  return prompts


def builtin() -> list[Prompt]:
  """Our own prompts, as many of each category."""
  return read(_BUILTIN)


def first_of_each(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
  """The first `count` prompts of each category, in their order."""
  first = {p.id for group in _by_category(prompts) for p in group[:count]}
  return [prompt for prompt in prompts if prompt.id in first]


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
  """Two disjoint halves, alike in categories: calibrate on one, judge on other.

  Alternates along the prompts grouped by category, so that each category, and
  the whole, differs by at most one prompt between the halves.
  """
  grouped = [prompt for group in _by_category(prompts) for prompt in group]
  return grouped[::2], grouped[1::2]


def request_number(id: str) -> int:
  """The integer in [0, 2**31) that keys a request's randomness, from its id.

  A decimal integer stands for itself; other ids, '007' and '-7' among them, for
  the first 31 bits of their SHA-256. The same in every process and file.
  """
  if re.fullmatch('0|[1-9][0-9]{0,9}', id) and int(id) < 2**31:
    return int(id)
  digest = hashlib.sha256(id.encode()).digest()
  return int.from_bytes(digest[:4], 'big') >> 1


def _by_category(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
  groups = {}
  for prompt in prompts:
    groups.setdefault(prompt.category, []).append(prompt)
  return list(groups.values())


def _lines(path: str | os.PathLike) -> list[str]:
  try:
    data = pathlib.Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
  except OSError as error:
    raise ValueError(
      f'{path}: cannot be read ({error.strerror}): give a JSONL file of prompts'
    ) from error
  try:
    text = data.decode()
  except UnicodeDecodeError as error:
    line = data[: error.start].count(b'\n') + 1
    raise ValueError(
      f'{path}:{line}: not UTF-8 ({error.reason}): save the file as UTF-8'
    ) from error
  if not text.strip():
    raise ValueError(f'{path}: empty: give at least one line with a prompt')
  # Not splitlines: JSON allows a bare U+2028 in a string, which would split it.
  return text.removesuffix('\n').split('\n')


def _parse(line: str, index: str, where: str) -> Prompt:
  """The prompt of one line, whose id is the index unless it has its own."""
  row = _object(line, where)
  unknown = [key for key in row if key not in _KEYS]
  if unknown:
    raise ValueError(
      f'{where}: unknown key {_shown(unknown[0])}: allowed are '
      f'{", ".join(_KEYS)}; remove it'
    )
  given = [key for key in _CONTENT if key in row]
  if len(given) != 1:
    raise ValueError(
      f'{where}: has {" and ".join(given) or "no prompt, turns or tokens"}: '
      'give exactly one of prompt, turns, tokens'
    )
  id = _id(row, index, where)
  category = None
  if 'category' in row:
    category = _text(row['category'], 'category', where)
  if 'tokens' in row:
    return Prompt(id, category, tokens=_tokens(row['tokens'], where))
  if 'prompt' in row:
    return Prompt(id, category, (_text(row['prompt'], 'prompt', where),))
  turns = enumerate(_list(row['turns'], 'turns', where))
  texts = tuple(_text(turn, f'turns[{i}]', where) for i, turn in turns)
  return Prompt(id, category, texts, listed=True)


def _object(line: str, where: str) -> dict[str, Any]:
  def unique(pairs):
    keys = [key for key, _ in pairs]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
      raise ValueError(f'key {_shown(twice[0])} is given twice')
    return dict(pairs)

  if not line.strip():
    raise ValueError(f'{where}: blank line: give a JSON object or remove it')
  try:
    row = json.loads(line, object_pairs_hook=unique)
  # Also a nesting, or a number's digits, beyond what Python reads.
  except (ValueError, RecursionError) as error:
    reason = str(error).replace(': line 1 column', ' at column')
    raise ValueError(
      f'{where}: not JSON ({reason}): each line must be one JSON object'
    ) from error
  if not isinstance(row, dict):
    raise ValueError(
      f'{where}: {_shown(row)} is not a JSON object: write {{"prompt": "..."}}'
    )
  return row


def _id(row: dict[str, Any], index: str, where: str) -> str:
  given = [key for key in ('id', 'question_id') if key in row]
  if not given:
    return index
  if len(given) > 1:
    raise ValueError(f'{where}: has id and question_id: keep one of the two')
  value = row[given[0]]
  if type(value) is int:
    return str(value)
  return _text(value, given[0], where, kind='a text or an integer')


def _text(text: Any, name: str, where: str, *, kind: str = 'a text') -> str:
  if not isinstance(text, str):
    raise ValueError(f'{where}: {name} is {_shown(text)}: it must be {kind}')
  if not text:
    raise ValueError(f'{where}: {name} is empty: write something or remove it')
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f'{where}: {name} holds half of a surrogate pair, '
      f'{_shown(text[error.start])}: write both halves or the character itself'
    ) from error
  return text


def _list(items: Any, name: str, where: str) -> list[Any]:
  if not isinstance(items, list) or not items:
    raise ValueError(
      f'{where}: {name} is {_shown(items)}: it must be a list of at least one'
    )
  return items


def _tokens(tokens: Any, where: str) -> tuple[int, ...]:
  for i, token in enumerate(_list(tokens, 'tokens', where)):
    # Exactly int: JSON's true is one of Python's integers.
    if type(token) is not int or not 0 <= token < 2**31:
      raise ValueError(
        f'{where}: tokens[{i}] is {_shown(token)}: it must be a token id, an '
        'integer from 0 to 2147483647'
      )
  return tuple(tokens)


def _shown(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 60 else f'{text[:57]}...'
