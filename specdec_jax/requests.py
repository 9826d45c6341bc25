"""Prompts to fixed-shape requests, and the checks that come before tracing."""

import bisect
import dataclasses
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import decode, fields, hosts, sampling, sharding, types
from specdec_jax.io import files

# Settings of other systems that would change p; ignoring one would be silent.
REFUSED = (
  'frequency_penalty',
  'presence_penalty',
  'repetition_penalty',
  'no_repeat_ngram_size',
  'min_p',
  'typical_p',
  'logit_bias',
  'bad_words',
)
# What other systems call it -> what it is here.
ELSEWHERE = {
  'num_return_sequences': 'n',
  **dict.fromkeys(('max_tokens', 'max_length'), 'max_new_tokens'),
  'do_sample': 'temperature, where 0 is greedy',
  **dict.fromkeys(('stop_strings', 'stop_sequences'), 'stop'),
  **dict.fromkeys(('eos_token_id', 'stop_token_ids'), 'stop_ids'),
  **dict.fromkeys(('assistant_model', 'draft_model'), 'draft'),
  **dict.fromkeys(
    ('num_assistant_tokens', 'num_speculative_tokens', 'num_draft_tokens'),
    'gamma',
  ),
}

# Token buffers come in these lengths, so that few programs are compiled.
_STEPS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)


def bucket(length: int) -> int:
  """The shortest buffer length of the table that holds `length` tokens."""
  if length <= _STEPS[-1]:
    return _STEPS[bisect.bisect_left(_STEPS, length)]
  return -(-length // 512) * 512


class Item(NamedTuple):
  """A prompt as it is decoded.

  tokens: its ids, at least one; of an encoder-decoder, what its decoder begins
    with.
  number: the request number that keys its randomness, 0 to 2**32 - 1.
  id, category: what reports call it and group it by.
  source: the ids that an encoder reads; () without one.
  """

  tokens: Sequence[int]
  number: int
  id: str = ''
  category: str = ''
  source: Sequence[int] = ()


def item(
  model, prompt: str | Sequence[int], number: int, *, chat: bool, most: int = 0
) -> Item:
  """A user's prompt as an item; an encoder reads it, and its end, as a source.

  Args:
    model: an io.load.LanguageModel.
    prompt, chat: see encode; a source is never a chat.
    number: of the request.
    most: tokens that are kept, the last ones of a prompt, of a source the first
      ones and its end; 0: all.

  Raises:
    ValueError: see encode; or a source without tokens.
  """
  chat = chat and model.start is None
  tokens = encode(model.tokenizer, prompt, chat=chat)
  if model.start is None:
    return Item(tokens[-most:], number)
  if not tokens:
    raise ValueError('empty source: an encoder reads at least one token')
  end = [*model.tokenizer.eos_ids[:1]]
  tokens = tokens[:-1] if tokens[-1:] == end else tokens
  first = tokens[: most - len(end)] if most else tokens
  return Item((model.start,), number, source=[*first, *end])


def items(
  prompts: Iterable[Sequence[int]], numbers: Iterable[int] | None = None
) -> list[Item]:
  """Prompts as items; numbers default to the index."""
  if numbers is None:
    return [Item(tokens, i) for i, tokens in enumerate(prompts)]
  pairs = zip(prompts, numbers, strict=True)
  return [Item(tokens, int(number)) for tokens, number in pairs]


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to sample and when to stop; checked when it is made.

  stop: strings that end the text and are left out of it; a special token's
    text, such as '<|im_end|>', also ends it. One text, several, or None.
  stop_ids: token ids that end it; the model's own end-of-sequence ids if None.
  logprobs: return each token's log-probability under the target at
    temperature 1.
  record: decode from Python, which is slower, and return every window.

  Raises:
    ValueError: a value of the wrong kind or out of range.
  """

  max_new_tokens: int = fields.setting(128, low=1, help='after the prompt')
  temperature: float = fields.setting(0.0, low=0, help='0 is greedy')
  top_k: int = fields.setting(0, low=0, help='0 is off')
  top_p: float = fields.setting(1.0, above=0, high=1, help='1 is off')
  seed: int = fields.setting(
    0, low=0, high=2**32 - 1, help='one seed gives one text, in any batch'
  )
  stop: Any = ()
  stop_ids: Any = None
  logprobs: bool = fields.setting(
    False, help="of the reply's own tokens; others have none"
  )
  record: bool = fields.setting(False, help='every window; slower')

  def __post_init__(self):
    fields.check(self)
    stop, ids = self.stop, fields.plain(self.stop_ids)
    if stop is None or isinstance(stop, str):
      stop = () if stop is None else (stop,)
    texts = _listed(stop)
    if texts is None or not all(isinstance(x, str) and x for x in texts):
      raise ValueError(
        f'stop={fields.short(self.stop)}: must be texts, none of them empty; '
        'token ids go to stop_ids'
      )
    files.check_unicode(stop, 'stop')
    if ids is not None:
      given = _listed(ids)
      given = (ids,) if given is None else given
      if bad := [x for x in given if not _is_id(x)]:
        raise ValueError(f'stop_ids: {fields.short(bad[0])} is no whole number')
      ids = tuple(map(operator.index, given))
    object.__setattr__(self, 'stop', tuple(texts))
    object.__setattr__(self, 'stop_ids', ids)

  def all_stop_ids(self, tokenizer, ids: int) -> list[int]:
    """Every id that ends a row.

    Args:
      tokenizer: an io.tokenizer.Tokenizer.
      ids: the size of the vocabulary.

    Raises:
      ValueError: an id of stop_ids that is none of the vocabulary.
    """
    for x in self.stop_ids or ():
      if not 0 <= x < ids:
        raise ValueError(
          f'stop_ids: {x} is outside the vocabulary: allowed are 0 to {ids - 1}'
        )
    # Special tokens have no text, so a string search would never find them.
    added = (
      tokenizer.inner.get_added_tokens_decoder().items() if self.stop else ()
    )
    special = {x.content: i for i, x in added if x.special}
    named = [special[x] for x in self.stop if x in special]
    own = tokenizer.eos_ids if self.stop_ids is None else self.stop_ids
    return [*map(int, own), *named]


def settings(
  options: Mapping[str, Any], also: Collection[str] = ()
) -> Settings:
  """Settings from keyword arguments.

  Args:
    options: the fields of Settings.
    also: further keywords of the function that was called, which has them.

  Raises:
    ValueError: a name of REFUSED, one that is no setting, or a bad value.
  """
  allowed = [field.name for field in dataclasses.fields(Settings)]
  for name in options:
    if name in REFUSED:
      raise ValueError(
        f"{name} is not supported: it changes the target's distribution, and "
        f'ignoring it would be silent. Remove it; supported are {allowed}'
      )
    if name not in allowed:
      here = f'; it is {ELSEWHERE[name]} here' if name in ELSEWHERE else ''
      raise ValueError(
        f'unknown setting {name!r}{here}: allowed are '
        f'{", ".join(sorted({*allowed, *also}))}'
      )
  return Settings(**options)


def _listed(x: Any) -> list[Any] | None:
  """The elements of a list or an array; None of what only iterates as one."""
  other = str | bytes | bytearray | Mapping
  iterates = isinstance(x, Iterable) and getattr(x, 'ndim', 1)
  return list(x) if iterates and not isinstance(x, other) else None


def _is_id(x: Any) -> bool:
  return hasattr(x, '__index__') and not isinstance(x, bool | np.bool_)


def encode(tokenizer, prompt: str | Sequence[int], *, chat: bool) -> list[int]:
  """Token ids of a prompt; ids are passed through.

  Args:
    tokenizer: an io.tokenizer.Tokenizer.
    prompt: a text, or token ids.
    chat: put a text through the chat template, as a user's turn.

  Raises:
    ValueError: an empty text, or something that is neither text nor ids.
  """
  if not isinstance(prompt, str):
    ids = None if isinstance(prompt, Set) else _listed(prompt)
    if ids is None:
      raise ValueError(
        f'prompt {fields.short(prompt)}: must be a text or a list of token '
        'ids; several prompts are a list of those, as in [[1, 2, 3]], and a '
        'conversation is tokenizer.encode_chat(messages)'
      )
    if bad := [t for t in ids if not _is_id(t)]:
      raise ValueError(
        f'token {fields.short(bad[0])} of a prompt: must be a whole number'
      )
    return [operator.index(t) for t in ids]
  if not prompt:
    raise ValueError('empty prompt: decoding starts from at least one token')
  files.check_unicode(prompt, 'prompt')
  if chat:
    return tokenizer.encode_chat([{'role': 'user', 'content': prompt}])
  return tokenizer.encode(prompt)


def check(item: Item, *, max_new_tokens: int, context: int, ids: int):
  """Raises ValueError for a prompt that cannot be decoded as asked."""
  tokens, source = item.tokens, item.source
  _check_ids(source, ids)
  if len(source) > context:
    raise ValueError(
      f'the source has {len(source)} tokens, the context holds {context}: '
      'shorten it'
    )
  if not len(tokens):
    raise ValueError('empty prompt: decoding starts from at least one token')
  _check_ids(tokens, ids)
  if len(tokens) >= context:
    raise ValueError(
      f'the prompt has {len(tokens)} tokens, the context holds {context}: '
      'shorten the prompt'
    )
  if len(tokens) + max_new_tokens > context:
    raise ValueError(
      f'the prompt has {len(tokens)} tokens, which leaves no room for '
      f'max_new_tokens={max_new_tokens} in a context of {context}: '
      f'lower it to {context - len(tokens)} or shorten the prompt'
    )


def _check_ids(tokens, ids: int):
  bad = [t for t in tokens if not 0 <= t < ids]
  if bad:
    raise ValueError(
      f'token id {bad[0]} is outside the vocabulary: allowed are 0 to {ids - 1}'
    )


def make(
  items: Sequence[Item],
  *,
  ids: int,
  context: int,
  max_new_tokens,
  gamma: int = 0,
  temperature: Any = 0.0,
  top_k: Any = 0,
  top_p: Any = 1.0,
  seed: Any = 0,
  stop_ids: Sequence[int] = (),
  rows: int | None = None,
  length: int | None = None,
  sources: int | None = None,
) -> decode.Request:
  """A batch of prompts as one request, on the host.

  Args:
    items: the prompts and their request numbers.
    ids, context: of the vocabulary without padding; tokens the model can hold.
    max_new_tokens, temperature, top_k, top_p, seed: one value, or one a prompt.
    gamma: of the largest window, for which there is room.
    stop_ids: ids that end a row.
    rows: fills the batch up to this with rows that never start.
    length, sources: of the buffers of tokens and sources; buckets if None.

  Raises:
    ValueError: no prompts, more than rows, or a value that is out of range.
  """
  n, rows = len(items), rows or len(items)
  if not items:
    raise ValueError('no prompts: give at least one')
  if n > rows:
    raise ValueError(f'{n} prompts do not fit into {rows} rows')
  spread = lambda x: np.broadcast_to(np.asarray(x), (n,))
  fill = lambda x: np.pad(spread(x), (0, rows - n), mode='edge')
  new = spread(max_new_tokens)
  if (new < 1).any():
    raise ValueError(f'max_new_tokens={max_new_tokens}: must be at least 1')
  for item, m in zip(items, new, strict=True):
    check(item, max_new_tokens=int(m), context=context, ids=ids)
  lengths = _lengths([x.tokens for x in items], rows)
  limit = lengths + np.pad(new, (0, rows - n))
  need = int(limit.max()) + gamma
  length = length or bucket(need)
  if length < need:
    raise ValueError(f'length={length}: prompts and windows need {need}')
  return decode.Request(
    _buffer([x.tokens for x in items], rows, length),
    lengths,
    limit.astype(np.int32),
    fill(_uint32('request number', [x.number for x in items])),
    fill(_uint32('seed', seed)),
    sampling.settings(rows, fill(temperature), fill(top_k), fill(top_p)),
    np.array([sorted(set(stop_ids)) or [-1]] * rows, np.int32),
    np.full(rows, np.iinfo(np.int32).max, np.int32),
    source_of(items, rows, sources),
  )


def source_of(
  items: Sequence[Item], rows: int, length: int | None = None
) -> types.Source | None:
  """The sources of prompts, as in `make`; None where no prompt has one."""
  texts = [x.source for x in items]
  if not any(map(len, texts)):
    return None
  if not all(map(len, texts)):
    raise ValueError('empty source: an encoder reads at least one token')
  lengths_B = _lengths(texts, rows)
  length = bucket(length or int(lengths_B.max()))
  return types.Source(_buffer(texts, rows, length), lengths_B)


def _lengths(texts: Sequence[Sequence[int]], rows: int) -> np.ndarray:
  """Of each row; 1 for a row that never starts: none would mask everything."""
  return np.array([*map(len, texts), *[1] * (rows - len(texts))], np.int32)


def _buffer(texts: Sequence[Sequence[int]], rows: int, length: int):
  tokens_BL = np.zeros((rows, length), np.int32)
  for row, text in zip(tokens_BL, texts, strict=False):
    row[: len(text)] = text
  return tokens_BL


def _uint32(name: str, value: Any) -> np.ndarray:
  x = np.asarray(value)
  whole = np.issubdtype(x.dtype, np.integer)
  if not whole or (x < 0).any() or (x >= 2**32).any():
    raise ValueError(f'{name}={value}: must be whole, in 0 to 2**32 - 1')
  return x.astype(np.uint32)


def rows_on(layout: sharding.Layout | None, rows: int) -> int:
  """rows, rounded up to what the mesh's data axis divides."""
  data = 1 if layout is None else layout.mesh.shape['data']
  return -(-rows // data) * data


def place(request: decode.Request, layout: sharding.Layout | None):
  """Splits the rows over the mesh's data axis."""
  if layout is None:
    return request
  rows = request.tokens_BL.shape[0]
  if rows != rows_on(layout, rows):
    raise ValueError(
      f'{rows} rows do not divide over {layout.mesh.shape}: '
      'use a multiple of it as batch size'
    )
  return jax.tree.map(
    lambda x: hosts.put(
      x, layout.sharding('batch', *[None] * (np.ndim(x) - 1))
    ),
    request,
  )
