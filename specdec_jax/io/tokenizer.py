"""Tokenizers: text <-> ids, streaming, chat templates, and their comparison.

Wraps tokenizers.Tokenizer; downloads nothing.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from tokenizers import decoders

from specdec_jax.io import files


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer with its special ids and chat template.

  source: its name, for error messages.
  inner: the tokenizer of the `tokenizers` package.
  eos_ids: ids that end a reply; the tokenizer's own first.
  bos_id: the id that starts a text, if there is one.
  add_bos: whether encode puts bos_id first.
  chat_template: in jinja, as transformers has it.
  specials: (name, text) of the variables of templates, such as bos_token.
  limit: ids from here on are not in the model's vocabulary; None: all are.
  size: one more than the largest id.
  """

  source: str
  inner: tokenizers.Tokenizer
  eos_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  add_bos: bool = False
  chat_template: str | None = None
  specials: tuple[tuple[str, str], ...] = ()
  limit: int | None = None
  size: int = dataclasses.field(init=False)

  def __post_init__(self):
    vocab = self.inner.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    size = size if self.limit is None else min(size, self.limit)
    object.__setattr__(self, 'size', size)
    for i in (*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])):
      real = type(i) is int and 0 <= i < self.size
      if not real or self.inner.id_to_token(i) is None:
        raise ValueError(
          f'{self.source}: special id {i} is no token; ids are 0 to '
          f'{self.size - 1}'
        )

  def encode(self, text: str) -> list[int]:
    """Ids of a text; special tokens spelled out in it become their ids."""
    ids = self.inner.encode(text, add_special_tokens=False).ids
    # Chat templates may write bos already: never two of them.
    if self.add_bos and ids[:1] != [self.bos_id]:
      ids = [self.bos_id, *ids]
    return ids

  def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
    """Text of ids; special tokens left out unless `special`."""
    return self.inner.decode(
      list(map(int, ids)), skip_special_tokens=not special
    )

  def is_special(self, i: int) -> bool:
    """Whether `decode` leaves the id out of its text."""
    token = self._added.get(i)
    return token is not None and token.special

  def cut_to(self, vocab: int, source: str) -> 'Tokenizer':
    """The tokenizer of a model with this many ids.

    Only special tokens may be cut: those of inputs that the model does not
    have, such as the image token of Gemma 3's text models.

    Raises:
      ValueError: other ids beyond the model's.
    """
    beyond = range(vocab, self.size)
    used = (*self.eos_ids, self.bos_id)
    if all(self.is_special(i) and i not in used for i in beyond):
      return dataclasses.replace(self, limit=vocab) if beyond else self
    raise ValueError(
      f'{source}: the tokenizer has {self.size} ids, the model {vocab}; take '
      'the tokenizer that the model was trained with'
    )

  def special_id(self, text: str) -> int | None:
    """The id of a special token by its text; None if it is not special."""
    i = self.inner.token_to_id(text)
    return i if i is not None and self.is_special(i) else None

  @functools.cached_property
  def _added(self) -> dict[int, tokenizers.AddedToken]:
    return self.inner.get_added_tokens_decoder()

  def stream(self, *, special: bool = False) -> 'Stream':
    return Stream(self, special)

  def chat(
    self,
    messages: Sequence[dict[str, str]],
    *,
    add_generation_prompt: bool = True,
  ) -> str:
    """Formats a conversation with the chat template.

    Without a template, each turn is a line 'Role: content'.

    Args:
      messages: each with strings 'role' and 'content'.
      add_generation_prompt: end with the start of the assistant's reply.

    Raises:
      ValueError: malformed messages, or a template that fails or refuses them.
    """
    for m in messages:
      if not isinstance(m.get('role'), str) or not isinstance(
        m.get('content'), str
      ):
        raise ValueError(f"message {m!r}: needs strings 'role' and 'content'")
    if self.chat_template is None:
      turns = [f'{m["role"].capitalize()}: {m["content"]}\n' for m in messages]
      return ''.join(turns) + ('Assistant:' if add_generation_prompt else '')
    try:
      return (
        _environment()
        .from_string(self.chat_template)
        .render(
          messages=[dict(m) for m in messages],
          add_generation_prompt=add_generation_prompt,
          tools=None,
          documents=None,
          **dict(self.specials),
        )
      )
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as e:
      raise ValueError(f'{self.source}: chat template: {e}') from e

  def tokens(self) -> list[str | None]:
    """The token string of every id, None for unused ids."""
    out: list[str | None] = [None] * self.size
    for token, i in self.inner.get_vocab(with_added_tokens=True).items():
      if i < self.size:
        out[i] = token
    return out

  def fingerprint(self) -> str:
    """SHA-256 over all that check_same compares."""
    content = json.dumps([self.tokens(), _own_specials(self)])
    return hashlib.sha256(content.encode()).hexdigest()


class Stream:
  """Decodes ids incrementally, one complete character at a time."""

  def __init__(self, tokenizer: Tokenizer, special: bool = False):
    self._tokenizer, self._special = tokenizer, special
    self._begin()

  def _begin(self) -> None:
    self._stream = decoders.DecodeStream(skip_special_tokens=not self._special)
    self._ids: list[int] = []
    self._length = self._out = 0  # characters, and ids whose text is out

  def push(self, ids: Iterable[int]) -> str:
    """The new text after these ids; '' while a character is incomplete."""
    return ''.join(self._step(i) for i in map(int, ids))

  def _step(self, i: int) -> str:
    self._ids.append(i)
    try:
      text = self._stream.step(self._tokenizer.inner, i) or ''
    except Exception:  # noqa: BLE001  tokenizers raises bare Exception
      # Bytes that form no character: the text before them is out already, so
      # restart from the ids whose text is not.
      rest = self._ids[self._out :]
      self._begin()
      return self.push(rest) if len(rest) > 1 else ''
    if text:
      self._length, self._out = self._length + len(text), len(self._ids)
    return text

  def finish(self) -> str:
    """The remaining text; an incomplete last character becomes U+FFFD."""
    whole = self._tokenizer.decode(self._ids, special=self._special)
    rest, self._length = whole[self._length :], len(whole)
    return rest


def check_same(target: Tokenizer, draft: Tokenizer) -> None:
  """Checks that draft and target have the same token for every id.

  Raises:
    ValueError: they differ; the message has the first difference.
  """
  a, b = target.tokens(), draft.tokens()
  pair = f'target {target.source} and draft {draft.source}'
  advice = 'use a draft with the tokenizer of its target'
  for i in range(max(len(a), len(b))):
    x, y = (t[i] if i < len(t) else None for t in (a, b))
    if x != y:
      raise ValueError(
        f'{pair} have different tokenizers: id {i} is {_quoted(x)} for the '
        f'target and {_quoted(y)} for the draft; {advice}'
      )
  theirs = dict(_own_specials(draft))
  for name, x in _own_specials(target):
    y = theirs[name]
    if x != y:
      raise ValueError(
        f'{pair} have different tokenizers: the {name} id is {x} for the '
        f'target and {y} for the draft; {advice}'
      )


def _own_specials(t: Tokenizer) -> list[tuple[str, int | None]]:
  # Only the first of eos_ids: for the same tokenizer generation_config.json
  # lists more than a GGUF file does, and decoding uses the target's.
  return [
    ('first (bos)', t.bos_id if t.add_bos else None),
    ('end (eos)', t.eos_ids[0] if t.eos_ids else None),
  ]


def _quoted(token: str | None) -> str:
  return 'unused' if token is None else repr(token)


def from_bytes(vocab: int, source: str) -> Tokenizer:
  """A byte tokenizer for random weights: ids 0 to 255, then eos and bos."""
  if vocab < 256:
    raise ValueError(
      f'{source}: a byte tokenizer needs a vocabulary of 256 ids or more, not '
      f'{vocab}'
    )
  ids = {char: byte for byte, char in _byte_characters().items()}
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  inner.decoder = decoders.ByteLevel()
  if vocab < 258:
    return Tokenizer(source, inner)
  inner.add_special_tokens(['<eos>', '<bos>'])
  return Tokenizer(source, inner, eos_ids=(256,), bos_id=257)


def _byte_characters() -> dict[int, str]:
  """The printable character that GPT-2's BPE has for each byte."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  moved = [b for b in range(256) if b not in plain]
  return {b: chr(b) for b in plain} | {
    b: chr(256 + i) for i, b in enumerate(moved)
  }


def from_folder(folder: pathlib.Path, source: str) -> Tokenizer:
  """Reads tokenizer.json and the settings beside it, as transformers does.

  Raises:
    ValueError: no tokenizer.json, or one that tokenizers cannot read.
  """
  path = folder / 'tokenizer.json'
  files.read_json(path)
  try:
    inner = tokenizers.Tokenizer.from_file(str(path))
  except Exception as e:  # noqa: BLE001  tokenizers raises bare Exception
    raise ValueError(f'{path}: not a tokenizer: {e}') from e
  inner.no_truncation()
  inner.no_padding()
  settings = _optional_json(folder / 'tokenizer_config.json')
  mapped = _optional_json(folder / 'special_tokens_map.json')
  specials = {
    key: text
    for key in ('bos_token', 'eos_token', 'unk_token', 'pad_token')
    if (text := _token_text(settings.get(key, mapped.get(key)))) is not None
  }
  bos_id = inner.token_to_id(specials.get('bos_token', ''))
  return Tokenizer(
    source,
    inner,
    eos_ids=_eos_ids(folder, inner.token_to_id(specials.get('eos_token', ''))),
    bos_id=bos_id,
    add_bos=_adds_bos(inner, bos_id, settings.get('add_bos_token')),
    chat_template=_chat_template(folder, settings),
    specials=tuple(specials.items()),
  )


def _optional_json(path: pathlib.Path) -> dict[str, Any]:
  return files.read_json(path) if path.exists() else {}


def _token_text(value) -> str | None:
  value = value.get('content') if isinstance(value, dict) else value
  return value if isinstance(value, str) else None


def _adds_bos(inner, bos_id: int | None, setting) -> bool:
  if bos_id is None:
    return False
  if isinstance(setting, bool):
    return setting
  return inner.encode('a').ids[:1] == [bos_id]


def _eos_ids(folder: pathlib.Path, own: int | None) -> tuple[int, ...]:
  """The tokenizer's eos, then those of generation_config.json, else of
  config.json."""
  listed = _optional_json(folder / 'generation_config.json').get('eos_token_id')
  if listed is None:
    listed = _optional_json(folder / 'config.json').get('eos_token_id')
  listed = listed if isinstance(listed, list) else [listed]
  ids = [i for i in (own, *listed) if type(i) is int]
  return tuple(dict.fromkeys(ids))


def _chat_template(folder: pathlib.Path, settings) -> str | None:
  path = folder / 'chat_template.jinja'
  if path.exists():
    return path.read_text('utf-8')
  found = settings.get('chat_template')
  if isinstance(found, list):
    named = [t for t in found if isinstance(t, dict)]
    chosen = [t.get('template') for t in named if t.get('name') == 'default']
    found = chosen[0] if chosen else None
  return found if isinstance(found, str) else None


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
  """A jinja environment like the one transformers uses for chat templates."""
  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
  )

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  # jinja2's own filter would escape HTML.
  def to_json(x, ensure_ascii=False, indent=None, sort_keys=False):
    return json.dumps(
      x, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys
    )

  env.filters['tojson'] = to_json
  env.globals['raise_exception'] = raise_exception
  env.globals['strftime_now'] = lambda f: datetime.datetime.now().strftime(f)
  return env
