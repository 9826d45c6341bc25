"""Text <-> ids, streaming, chat templates, and the comparison of tokenizers."""

import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers
from absl import logging
from google.protobuf import empty_pb2, unknown_fields
from tokenizers import decoders, normalizers, pre_tokenizers

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
  inner: tokenizers.Tokenizer = dataclasses.field(repr=False)
  eos_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  add_bos: bool = False
  chat_template: str | None = dataclasses.field(default=None, repr=False)
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

  def cut_to(self, vocab: int, source: str) -> 'Tokenizer':
    """The tokenizer of a model with this many ids.

    Only special tokens may be cut: those of inputs that the model does not
    have, such as the image token of Gemma 3's text models.

    Raises:
      ValueError: other ids beyond the model's.
    """
    if self.size <= vocab:
      return self
    added, used = self.inner.get_added_tokens_decoder(), self.eos_ids
    special = {i for i, token in added.items() if token.special}
    if special - {*used, self.bos_id} >= set(range(vocab, self.size)):
      return dataclasses.replace(self, limit=vocab)
    raise ValueError(
      f'{source}: the tokenizer has {self.size} ids, the model {vocab}; take '
      'the tokenizer that the model was trained with'
    )

  def stream(self) -> 'Stream':
    return Stream(self)

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
      _say_no_template(self.source)
      turns = [f'{m["role"].capitalize()}: {m["content"]}\n' for m in messages]
      return ''.join(turns) + ('Assistant:' if add_generation_prompt else '')
    given = dict(
      messages=[dict(m) for m in messages],
      add_generation_prompt=add_generation_prompt,
      tools=None,
      documents=None,
      **dict(self.specials),
    )
    try:
      return _environment().from_string(self.chat_template).render(**given)
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


@functools.cache  # once for a tokenizer
def _say_no_template(source: str) -> None:
  if source.startswith('random:'):  # to which no words mean anything
    return
  logging.warning(
    '%s has no chat template: a turn is written as "User: ..."', source
  )


class Stream:
  """Decodes ids incrementally, one complete character at a time."""

  def __init__(self, tokenizer: Tokenizer):
    self._decode = tokenizer.decode
    # The ids of the last piece of text, _read of them, and those whose text is
    # incomplete. A token's text may depend on the token before it.
    self._ids: list[int] = []
    self._read = 0

  def push(self, i: int) -> str:
    """The new text after an id; '' while a character is incomplete."""
    self._ids.append(i)
    before = self._decode(self._ids[: self._read])
    text = self._decode(self._ids)
    if len(text) == len(before) or text.endswith('\ufffd'):
      return ''
    del self._ids[: self._read]
    self._read = len(self._ids)
    return text[len(before) :]


def check_same(target: Tokenizer, draft: Tokenizer) -> None:
  """Checks that draft and target have the same token for every id.

  Raises:
    ValueError: they differ; the message has the first difference.
  """

  def check(what: str, x, y) -> None:
    if x != y:
      raise ValueError(
        f'target {target.source} and draft {draft.source} have different '
        f'tokenizers: {what} is {x} for the target and {y} for the draft; use '
        'a draft with the tokenizer of its target'
      )

  a, b = target.tokens(), draft.tokens()
  for i in range(max(len(a), len(b))):
    check(f'id {i}', *(_quoted(t[i] if i < len(t) else None) for t in (a, b)))
  theirs = dict(_own_specials(draft))
  for name, x in _own_specials(target):
    check(f'the {name} id', x, theirs[name])


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
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(_byte_ids(), []))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  inner.decoder = decoders.ByteLevel()
  if vocab < 258:
    return Tokenizer(source, inner)
  inner.add_special_tokens(['<eos>', '<bos>'])
  return Tokenizer(source, inner, eos_ids=(256,), bos_id=257)


def _byte_ids() -> dict[str, int]:
  """Each byte by the printable character that GPT-2's BPE has for it."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  moved = [b for b in range(256) if b not in plain]
  ids = {chr(b): b for b in plain}
  return ids | {chr(256 + i): b for i, b in enumerate(moved)}


def from_folder(folder: pathlib.Path, source: str) -> Tokenizer:
  """Reads tokenizer.json and the settings beside it, as transformers does.

  Without it spiece.model, which T5's older folders have.

  Raises:
    ValueError: neither, or one that cannot be read.
  """
  path, pieces = folder / 'tokenizer.json', folder / 'spiece.model'
  settings = _optional_json(folder / 'tokenizer_config.json')
  mapped = _optional_json(folder / 'special_tokens_map.json')
  if not path.exists() and pieces.exists():
    inner = _from_pieces(pieces, settings.get('extra_ids', 100))
    mapped = {'eos_token': '</s>', 'pad_token': '<pad>'} | mapped
  else:
    files.read_json(path)
    try:
      inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # noqa: BLE001  tokenizers raises bare Exception
      raise ValueError(f'{path}: not a tokenizer: {e}') from e
  inner.no_truncation()
  inner.no_padding()
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


def _from_pieces(path: pathlib.Path, extra: int) -> tokenizers.Tokenizer:
  """The unigrams of a sentencepiece file, then <extra_id_99> to <extra_id_0>.

  As T5Converter of transformers 5.23 has them. The file is a protocol buffer,
  whose fields have the numbers of sentencepiece_model.proto.
  """
  unknown, control = 2, 3  # types of pieces
  try:
    fields = _fields(path.read_bytes())
    pieces = [dict(_fields(x)) for number, x in fields if number == 1]
    training, norm = (dict(_fields(dict(fields)[i])) for i in (2, 3))
    if training.get(3, 1) != 1 or 0 in (norm.get(3, 1), norm.get(4, 1)):
      raise ValueError('no unigrams, or spaces are treated in another way')
    score = lambda piece: struct.pack('<I', piece.get(2, 0))
    vocab = [(x[1].decode(), *struct.unpack('<f', score(x))) for x in pieces]
    kinds = [x.get(3, 1) for x in pieces]
    marks = [(f'<extra_id_{i}>', 0.0) for i in reversed(range(extra))]
    unigrams = tokenizers.models.Unigram(vocab + marks, kinds.index(unknown))
    steps = [normalizers.Precompiled(norm[2])] if norm.get(2) else []
  except Exception as e:  # noqa: BLE001  tokenizers raises bare Exception
    raise ValueError(f'{path}: not a sentencepiece file of a T5: {e!r}') from e
  inner = tokenizers.Tokenizer(unigrams)
  joined = normalizers.Replace(tokenizers.Regex(' {2,}'), '▁')
  steps += [normalizers.Strip(left=False), joined]
  inner.normalizer = normalizers.Sequence(steps)
  inner.pre_tokenizer = pre_tokenizers.Metaspace()
  inner.decoder = decoders.Metaspace()
  special = [
    x[0] for x, k in zip(vocab, kinds, strict=True) if k in (unknown, control)
  ]
  inner.add_special_tokens([*special, *(text for text, _ in marks)])
  return inner


def _fields(message: bytes) -> list[tuple[int, Any]]:
  """(number, value) of each field of a message of a protocol buffer."""
  found = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
  return [(x.field_number, x.data) for x in found]


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
