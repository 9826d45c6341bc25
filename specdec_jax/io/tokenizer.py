"""Text <-> ids, streaming, chat templates, and comparing tokenizers."""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence

import tokenizers
from absl import logging
from tokenizers import decoders

from specdec_jax.io import files
from specdec_jax.io.tokens import chat_template, specials, spiece, stream, words


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer with its special ids and chat template.

  source: its name, for error messages. inner: of the `tokenizers` package.
  eos_ids: ids that end a reply, the tokenizer's own first.
  bos_id: the id that starts a text, if any. add_bos: encode puts it first.
  chat_bos: encode_chat does, too, before what the template wrote.
  chat_template: in jinja, as transformers has it.
  specials: (name, text) of template variables, such as bos_token.
  limit: the model has no ids from here on; None: it has all.
  size: the largest id plus one.
  """

  source: str
  inner: tokenizers.Tokenizer = dataclasses.field(repr=False)
  eos_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  add_bos: bool = False
  chat_bos: bool = False
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
    """Returns a text's ids; the text may spell out special tokens. Never puts
    bos_id twice, since a text may spell it. Adds no eos, even if the files ask
    for one: what is encoded goes on."""
    return self._ids(text, self.add_bos)

  def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
    """Returns a chat's ids, up to the start of the assistant's reply."""
    # Here alone it is decided who adds bos to a chat. transformers encodes what
    # a template wrote as it is; llama.cpp adds bos all the same. Without a
    # template it is a text like others.
    adds = self.add_bos and (self.chat_bos or self.chat_template is None)
    return self._ids(self.chat(messages), adds)

  def _ids(self, text: str, adds_bos: bool) -> list[int]:
    files.check_unicode(text, 'text')
    ids = self.inner.encode(text, add_special_tokens=False).ids
    if not adds_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
      return ids
    return [self.bos_id, *ids]

  def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
    """Returns the ids' text, without special tokens unless `special`."""
    return self.inner.decode(
      list(map(int, ids)), skip_special_tokens=not special
    )

  def spell(self, ids: Sequence[int]) -> str:
    """Returns their text as one writes it, with special tokens."""
    # Behind each of these an encoder may put a space, as before a text.
    added = self.inner.get_added_tokens_decoder()
    parts = itertools.groupby(ids, added.__contains__)
    return ''.join(self.decode(x, special=True) for _, x in parts)

  def cut_to(self, vocab: int, source: str) -> 'Tokenizer':
    """Returns a tokenizer with this many ids. Cuts only special tokens, for
    inputs that the model lacks: the image token in Gemma 3's text models."""
    if self.size <= vocab:
      return dataclasses.replace(self, limit=vocab)
    added = self.inner.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    used = {*self.eos_ids[:1], self.bos_id}
    if special - used >= set(range(vocab, self.size)):
      ends = tuple(i for i in self.eos_ids if i < vocab)
      return dataclasses.replace(self, limit=vocab, eos_ids=ends)
    raise ValueError(
      f'{source}: the tokenizer has {self.size} ids, the model {vocab}; take '
      'the tokenizer that the model was trained with'
    )

  def stream(self, stop: Sequence[str] = ()) -> stream.Stream:
    return stream.Stream(self, stop)

  def chat(self, messages: Sequence[dict[str, str]]) -> str:
    """Writes a chat by the template, up to the assistant's reply; without one,
    each turn is a line 'Role: content'. messages: as in chat_template.texts."""
    messages = chat_template.texts(messages)
    if self.chat_template is None:
      if not self.source.startswith('random:'):
        logging.log_first_n(
          logging.WARNING,
          '%s has no chat template: a turn is written as "User: ..."',
          *(1, self.source),
        )
      turns = [f'{m["role"].capitalize()}: {m["content"]}\n' for m in messages]
      return ''.join([*turns, 'Assistant:'])
    return chat_template.render(
      self.source, self.chat_template, messages, dict(self.specials)
    )

  def tokens(self) -> list[str | None]:
    """Returns every id's token string, None for unused ids."""
    out: list[str | None] = [None] * self.size
    for token, i in self.inner.get_vocab(with_added_tokens=True).items():
      if i < self.size:
        out[i] = token
    return out

  @functools.lru_cache(maxsize=8)  # noqa: B019, of few tokenizers
  def fingerprint(self) -> str:
    """Returns the SHA-256 of the tokens, the first id and the end."""
    first = self.bos_id if self.add_bos else None
    end = self.eos_ids[0] if self.eos_ids else None
    ends = ['first (bos)', first], ['end (eos)', end]
    content = json.dumps([self.tokens(), ends])
    return hashlib.sha256(content.encode()).hexdigest()


def check_same(target: Tokenizer, draft: Tokenizer) -> None:
  """Raises ValueError for the first id that means another token in a draft. An
  id may differ if the draft has a row for it and neither has more than an added
  token there. What begins and ends a text may differ: the target's counts."""
  added = [t.inner.get_added_tokens_decoder() for t in (target, draft)]
  rows = draft.limit or draft.size
  pairs = itertools.zip_longest(target.tokens(), draft.tokens())
  for i, (x, y) in enumerate(pairs):
    each = zip((x, y), added, strict=True)
    free = i < rows and all(t is None or i in own for t, own in each)
    if x != y and not free:
      x, y = ('unused' if t is None else repr(t) for t in (x, y))
      raise ValueError(
        f'target {target.source} and draft {draft.source} have different '
        f'tokenizers: id {i} is {x} for the target and {y} for the draft; use '
        'a draft with the tokenizer of its target'
      )


def from_bytes(vocab: int, source: str) -> Tokenizer:
  """Makes a byte tokenizer, for random weights: 0 to 255, eos, bos."""
  if vocab < 256:
    raise ValueError(
      f'{source}: a byte tokenizer needs a vocabulary of 256 ids or more, not '
      f'{vocab}'
    )
  ids = words.byte_characters()
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  inner.decoder = decoders.ByteLevel()
  if vocab < 258:
    return Tokenizer(source, inner)
  inner.add_special_tokens(['<eos>', '<bos>'])
  return Tokenizer(source, inner, eos_ids=(256,), bos_id=257)


def from_folder(folder: pathlib.Path, source: str) -> Tokenizer:
  """Reads tokenizer.json and the files beside it, as transformers does; else
  spiece.model, which T5's older folders have. add_bos_token and add_eos_token
  do nothing beside tokenizer.json: its post-processor adds them or not."""
  path, pieces = folder / 'tokenizer.json', folder / 'spiece.model'
  settings = specials.read(folder)
  if not path.exists() and pieces.exists():
    inner = spiece.read(pieces, settings.get('extra_ids', 100))
    settings = {'eos_token': '</s>', 'pad_token': '<pad>'} | settings
  else:
    if not path.exists():
      raise ValueError(
        f'{folder}: no tokenizer.json; of tokenizer.model, or of vocab.json '
        'with merges.txt, transformers makes it: AutoTokenizer.'
        f"from_pretrained('{folder}').save_pretrained(folder)"
      )
    try:
      inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:
      raise ValueError(f'{path}: not a tokenizer: {e}') from e
    specials.rebuild(inner, folder, settings)
  inner.no_truncation()
  inner.no_padding()
  specials.add(inner, folder, settings)
  added = inner.get_added_tokens_decoder()
  specials.hide(inner, added.keys() & {*specials.turn_ends(inner)})
  named = specials.named(settings)
  id_of = lambda name: inner.token_to_id(named.get(name, ''))
  found = inner.encode('a')
  marked = zip(found.ids, found.special_tokens_mask, strict=True)
  # What the post-processor puts before a text.
  first = [i for i, _ in itertools.takewhile(lambda x: x[1], marked)]
  if len(first) > 1:
    raise ValueError(f'{path}: {len(first)} tokens before a text; allowed is 1')
  return Tokenizer(
    source,
    inner,
    eos_ids=_eos_ids(folder, inner, id_of('eos_token')),
    bos_id=first[0] if first else id_of('bos_token'),
    add_bos=bool(first),
    chat_template=_chat_template(folder, settings),
    specials=tuple(named.items()),
  )


def _eos_ids(folder: pathlib.Path, inner, own: int | None) -> tuple[int, ...]:
  """Returns the tokenizer's eos, then generation_config.json's, else
  config.json's, then the tokens whose text ends a turn."""
  made = files.read_json(folder / 'generation_config.json', {})
  config = files.read_json(folder / 'config.json', {})
  inside = config.get('text_config')
  config |= inside if isinstance(inside, dict) else {}
  listed = made.get('eos_token_id')
  listed = config.get('eos_token_id') if listed is None else listed
  listed = listed if isinstance(listed, list) else [listed]
  ids = [i for i in (own, *listed) if type(i) is int]
  return tuple(dict.fromkeys([*ids, *specials.turn_ends(inner)]))


def _chat_template(folder: pathlib.Path, settings) -> str | None:
  """Reads the default one; files come before tokenizer_config.json."""
  path = folder / 'chat_template.jinja'
  if path.exists():
    try:
      return path.read_text('utf-8')
    except (OSError, UnicodeDecodeError) as e:
      raise ValueError(f'{path}: cannot be read as UTF-8: {e}') from e
  found = settings.get('chat_template')
  if isinstance(found, list):
    named = [t for t in found if isinstance(t, dict)]
    several = {t.get('name'): t.get('template') for t in named}
    if several and 'default' not in several:
      raise ValueError(
        f'{folder}: chat templates {", ".join(map(str, several))}, and none is '
        f'the "default"; write the one that is meant into {path.name}'
      )
    found = several.get('default')
  return found if isinstance(found, str) else None
