"""Turns prompts to arrays of fixed shapes, and back; checks them before."""

import bisect
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import (
  decode,
  fields,
  hosts,
  metrics,
  sharding,
  types,
)
from specdec_jax import sampling as sampling_lib
from specdec_jax.io import files

# Token buffers come in these lengths, so that few programs are compiled.
_STEPS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
ANY = np.iinfo(np.int32).max  # drafts: as many as a window has


def bucket(length: int) -> int:
  """Finds the table's shortest buffer length that holds `length` tokens."""
  if length <= _STEPS[-1]:
    return _STEPS[bisect.bisect_left(_STEPS, length)]
  return -(-length // 512) * 512


class Item(NamedTuple):
  """A prompt as it is decoded, and what is asked of its row.

  tokens: at least one id; for an encoder-decoder, what its decoder begins with.
  number: the request number that keys its randomness, 0 to 2**32 - 1.
  id, category: what reports call it and group it by.
  source: the ids that an encoder reads; () without one.
  prediction: ids that the answer may repeat, which lookup searches and no model
    reads; for a target without an encoder.
  new: tokens that it may emit. drafts: in a window; 0: plain.
  sampling, stop_ids: how they are drawn, and which of them are the last.
  """

  tokens: Sequence[int]
  number: int
  id: str = ''
  category: str = ''
  source: Sequence[int] = ()
  prediction: Sequence[int] = ()
  new: int = 0
  sampling: sampling_lib.Sampling = sampling_lib.Sampling()
  stop_ids: Sequence[int] = ()
  drafts: int = ANY


def item(model, prompt: Any, number: int, *, chat: bool, most: int = 0) -> Item:
  """Makes an item of a user's prompt; for an encoder a source, with its end.

  model: an io.load.LanguageModel.
  prompt, chat: see encode; a source is never a chat.
  most: tokens that are kept, the last ones of a prompt, the first ones of a
    source and its end; 0: all.

  Raises ValueError as encode; for a source without tokens, or in messages.
  """
  chat = chat and model.start is None
  if model.start is not None and is_chat(prompt):
    raise ValueError(f'{model.label}: an encoder reads a text, not messages')
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
  prompts: Sequence[Sequence[int]],
  numbers: Iterable[int] | None = None,
  **asked,
) -> list[Item]:
  """Makes items of prompts; numbers default to the index.

  asked: other fields of Item, which all of them have.
  """
  numbers = range(len(prompts)) if numbers is None else map(int, numbers)
  pairs = zip(prompts, numbers, strict=True)
  return [Item(*pair, **asked) for pair in pairs]


def listed(x: Any) -> list[Any] | None:
  """Lists the elements of a list or an array; None: it only iterates as one."""
  other = str | bytes | bytearray | Mapping
  iterates = isinstance(x, Iterable) and getattr(x, 'ndim', 1)
  return list(x) if iterates and not isinstance(x, other) else None


def is_id(x: Any) -> bool:
  return hasattr(x, '__index__') and not isinstance(x, bool | np.bool_)


def is_chat(prompt: Any) -> bool:
  """Tells whether a prompt is a conversation, in messages."""
  several = isinstance(prompt, Sequence)  # an iterator would be used up
  return several and any(isinstance(x, Mapping) for x in prompt)


def encode(tokenizer, prompt: Any, *, chat: bool) -> list[int]:
  """Turns a prompt into ids of an io.tokenizer.Tokenizer; ids pass through.

  prompt: a text, token ids, or a conversation, which goes through the chat
    template: a list of messages, dicts with 'role' and 'content'.
  chat: put a text through the template too, as a user's turn.

  Raises ValueError for an empty text, or something that is none of these.
  """
  if isinstance(prompt, str):
    if not prompt:
      raise ValueError('empty prompt: decoding starts from at least one token')
    files.check_unicode(prompt, 'prompt')
    if not chat:
      return tokenizer.encode(prompt)
    prompt = [{'role': 'user', 'content': prompt}]
  found = None if isinstance(prompt, Set) else listed(prompt)
  if found is None:
    raise ValueError(
      f'prompt {fields.short(prompt)}: must be a text, a list of token ids or '
      'a list of messages; several are a list of those, as in [[1, 2, 3]]'
    )
  if is_chat(found):
    if bad := [x for x in found if not isinstance(x, Mapping)]:
      raise ValueError(f'message {fields.short(bad[0])}: must be a dict')
    return tokenizer.encode_chat(found)
  if bad := [t for t in found if not is_id(t)]:
    raise ValueError(
      f'token {fields.short(bad[0])} of a prompt: must be a whole number'
    )
  return [operator.index(t) for t in found]


class TooLong(ValueError):
  """A prompt, source or prediction that the model's context cannot hold."""


def check(
  item: Item, model, new: int | None, context: int | None = None
) -> int:
  """Counts the tokens that a prompt may emit: `new`, or all that fit if None.

  model: has `ids` and `context`. context: tokens there is room for, if less.

  Raises ValueError for a prompt that cannot be decoded as asked.
  """
  tokens, context = item.tokens, context or model.context
  if not len(tokens):
    raise ValueError('empty prompt: decoding starts from at least one token')
  named = ('source', item.source), ('prediction', item.prediction)
  for name, given in (*named, ('prompt', tokens)):
    check_ids(given, model.ids)
    if len(given) > context - (name == 'prompt'):
      raise TooLong(
        f'the {name} has {len(given)} tokens, the context holds {context}: '
        'shorten it'
      )
  if new is None:
    return context - len(tokens)
  if len(tokens) + new > context:
    raise fields.Refusal(
      'max_new_tokens',
      f'{new}',
      f'no room after a prompt of {len(tokens)} tokens in a context of '
      f'{context}; lower it to {context - len(tokens)} or shorten the prompt',
    )
  return new


def check_ids(tokens: Iterable[int], ids: int) -> None:
  """Raises ValueError for the first token outside 0 to ids - 1."""
  for t in tokens:
    if not 0 <= t < ids:
      raise ValueError(
        f'token id {t} is outside the vocabulary: allowed are 0 to {ids - 1}'
      )


def make(
  items: Sequence[Item],
  *,
  gamma: int = 0,
  rows: int | None = None,
  length: int | None = None,
  sources: int | None = None,
  stops: int | None = None,
  mixed: bool = False,
) -> decode.Request:
  """Makes one request from a batch of prompts, on the host.

  items: one or more prompts that fit the model (see check), of which each may
    emit a token.
  gamma: of the largest window, for which there is room.
  rows: fills the batch up to this with rows that never start.
  length, sources: of the buffers of tokens and sources; buckets if None.
  stops: of the lists of stop ids; that of the longest if None.
  mixed: if all are greedy, others may be put beside them.
  """
  n, rows = len(items), rows or len(items)
  assert 0 < n <= rows, f'{n} prompts in {rows} rows'
  assert all(x.new > 0 for x in items), items
  # Rows without a prompt never start.
  each = [*items, *[items[-1]._replace(new=0, stop_ids=())] * (rows - n)]
  column = lambda values, dtype: np.array([*values], dtype)
  lengths = _lengths([x.tokens for x in items], rows)
  limit = lengths + column((x.new for x in each), np.int32)
  need = int(limit.max()) + gamma
  length = length or bucket(need)
  assert length >= need, f'length={length}: prompts and windows need {need}'
  settings = sampling_lib.of([x.sampling for x in each])
  if not mixed and sampling_lib.is_greedy(settings).all():
    settings = settings._replace(temperature_B=None)
  return decode.Request(
    _buffer([x.tokens for x in items], rows, length),
    lengths,
    limit,
    column((x.number for x in each), np.uint32),
    column((x.sampling.seed for x in each), np.uint32),
    settings,
    _stops([x.stop_ids for x in each], stops),
    column((x.drafts for x in each), np.int32),
    source_of(items, rows, sources),
  )


def _stops(lists: Sequence[Sequence[int]], length: int | None) -> np.ndarray:
  """Makes stop_BX from each row's list."""
  sets = [sorted(set(ids)) for ids in lists]
  longest = max(map(len, sets))
  length = length or max(longest, 1)
  assert longest <= length, f'{longest} stop ids, room for {length}'
  return _buffer(sets, len(sets), length, fill=-1)


def source_of(
  items: Sequence[Item], rows: int, length: int | None = None
) -> types.Source | None:
  """Makes sources, or predictions; None where none has one, and no length."""
  texts = [[*x.source, *x.prediction] for x in items]
  if not length and not any(texts):
    return None
  encoded = {len(x.source) > 0 for x in items}
  assert len(encoded) == 1, 'a prompt without a source'
  lengths_B = _lengths(texts, rows)
  length = bucket(length or int(lengths_B.max()))
  return types.Source(_buffer(texts, rows, length), lengths_B)


def _lengths(texts: Sequence[Sequence[int]], rows: int) -> np.ndarray:
  """Counts; 1 for a row that never starts: none would mask everything."""
  return np.array([*map(len, texts), *[1] * (rows - len(texts))], np.int32)


def _buffer(texts: Sequence[Any], rows: int, length: int, fill: int = 0):
  tokens_BL = np.full((rows, length), fill, np.int32)
  for row, text in zip(tokens_BL, texts, strict=False):
    row[: len(text)] = text
  return tokens_BL


class NonFiniteLogits(ValueError):
  """The target's logits were NaN or infinite: no token can follow."""

  def __init__(self, number: int, count: int, label: str = 'the target'):
    """count: the tokens after which a request's were."""
    super().__init__(
      f'request {number}: the logits of {label} are not finite after {count} '
      'new tokens; try dtype float32'
    )


class Ended(NamedTuple):
  """A request that was decoded, on the host.

  start: tokens of its prompt. tokens: prompt and output.
  reason: 'stop' at a stop id, 'length' at its limit, 'non-finite' where the
    logits were not.
  info: its counts: types.Info of one row.
  """

  start: int
  tokens: list[int]
  reason: str
  info: types.Info


def ended(request: decode.Request, out: decode.Output, row: int) -> Ended:
  """Picks one row's request from a batch; both are on the host."""
  tokens = out.tokens_BL[row, : out.lengths_B[row]].tolist()
  reason = 'stop' if tokens[-1] in request.stop_BX[row] else 'length'
  if out.info.broken_B[row]:
    reason = 'non-finite'
  info = metrics.rows(out.info, slice(row, row + 1))
  return Ended(int(request.lengths_B[row]), tokens, reason, info)


def cut(of_tokens: Any, row: int, new: slice) -> Any:
  """Copies a row's new tokens out of arrays that the next step is donated."""
  return jax.tree.map(
    lambda x_BL: np.array(np.asarray(x_BL)[row, new]), of_tokens
  )


def rows_on(layout: sharding.Layout | None, rows: int) -> int:
  """Rounds rows up to what the mesh's data axis divides."""
  data = 1 if layout is None else layout.mesh.shape['data']
  return -(-rows // data) * data


def place(request: decode.Request, layout: sharding.Layout | None):
  """Splits the rows over the mesh's data axis."""
  if layout is None:
    return request
  if (rows := len(request.limit_B)) != rows_on(layout, rows):
    raise ValueError(
      f'{rows} rows: mesh.data={layout.mesh.shape["data"]} has to divide them; '
      'give another bench.batch_size'
    )
  where = lambda x: layout.sharding('batch', *[None] * (np.ndim(x) - 1))
  return jax.tree.map(lambda x: hosts.put(x, where(x)), request)
