"""Prompts to fixed-shape requests, and the checks that come before tracing."""

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import decode, sampling, sharding

# Token buffers come in these lengths, so that few programs are compiled.
_STEPS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)


def bucket(length: int) -> int:
  """The shortest buffer length of the table that holds `length` tokens."""
  if length <= _STEPS[-1]:
    return _STEPS[bisect.bisect_left(_STEPS, length)]
  return -(-length // 512) * 512


class Item(NamedTuple):
  """A prompt as it is decoded.

  tokens: its ids, at least one.
  number: the request number that keys its randomness, 0 to 2**32 - 1.
  id, category: what reports call it and group it by.
  """

  tokens: Sequence[int]
  number: int
  id: str = ''
  category: str = ''


def items(
  prompts: Iterable[Sequence[int]], numbers: Iterable[int] | None = None
) -> list[Item]:
  """Prompts as items; numbers default to the index."""
  if numbers is None:
    return [Item(tokens, i) for i, tokens in enumerate(prompts)]
  pairs = zip(prompts, numbers, strict=True)
  return [Item(tokens, int(number)) for tokens, number in pairs]


def encode(tokenizer, prompt: str | Sequence[int], *, chat: bool) -> list[int]:
  """Token ids of a prompt; ids are passed through.

  Args:
    tokenizer: an io.tokenizer.Tokenizer.
    prompt: a text, or token ids.
    chat: put a text through the chat template, as a user's turn.

  Raises:
    ValueError: an empty text.
  """
  if not isinstance(prompt, str):
    return [int(t) for t in prompt]
  if not prompt:
    raise ValueError('empty prompt: decoding starts from at least one token')
  if chat:
    prompt = tokenizer.chat([{'role': 'user', 'content': prompt}])
  return tokenizer.encode(prompt)


def check_prompt(tokens, *, max_new_tokens: int, context: int, ids: int):
  """Raises ValueError for a prompt that cannot be decoded as asked."""
  if not len(tokens):
    raise ValueError('empty prompt: decoding starts from at least one token')
  bad = [t for t in tokens if not 0 <= t < ids]
  if bad:
    raise ValueError(
      f'token id {bad[0]} is outside the vocabulary: allowed are 0 to {ids - 1}'
    )
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
) -> decode.Request:
  """A batch of prompts as one request, on the host.

  Args:
    items: the prompts and their request numbers.
    ids: the size of the vocabulary without padding.
    context: tokens that the model can hold.
    max_new_tokens, temperature, top_k, top_p, seed: one value, or one for each
      prompt.
    gamma: the largest window; the buffer has room for it past the last token.
    stop_ids: ids that end a row.
    rows: fills the batch up to this with rows that never start.
    length: of the token buffer; the bucket that fits if None.

  Raises:
    ValueError: what check_prompt and sampling.settings refuse; max_new_tokens
      < 1; gamma < 0; more prompts than rows; a length that is too small.
  """
  if gamma < 0:
    raise ValueError(f'gamma={gamma}: must be 0 (plain decoding) or more')
  n, rows = len(items), rows or len(items)
  if n == 0:
    raise ValueError('no prompts: give at least one')
  if n > rows:
    raise ValueError(f'{n} prompts do not fit into {rows} rows')
  spread = lambda x: np.broadcast_to(np.asarray(x), (n,))
  fill = lambda x: np.pad(spread(x), (0, rows - n), mode='edge')
  new = spread(max_new_tokens)
  if (new < 1).any():
    raise ValueError(f'max_new_tokens={max_new_tokens}: must be at least 1')
  for item, m in zip(items, new, strict=True):
    check_prompt(item.tokens, max_new_tokens=int(m), context=context, ids=ids)
  lengths = np.array(
    [len(x.tokens) for x in items] + [1] * (rows - n), np.int32
  )
  limit = lengths + np.pad(new, (0, rows - n))
  need = int(limit.max()) + gamma
  length = length or bucket(need)
  if length < need:
    raise ValueError(
      f'length={length}: prompts, max_new_tokens and gamma={gamma} need {need}'
    )
  tokens_BL = np.zeros((rows, length), np.int32)
  for row, item in zip(tokens_BL, items, strict=False):
    row[: len(item.tokens)] = item.tokens
  numbers = np.array([x.number for x in items], np.uint32)
  stop = np.array(sorted(set(stop_ids)) or [-1], np.int32)
  return decode.Request(
    tokens_BL,
    lengths,
    limit.astype(np.int32),
    fill(numbers),
    fill(seed).astype(np.uint32),
    sampling.settings(rows, fill(temperature), fill(top_k), fill(top_p)),
    np.broadcast_to(stop, (rows, stop.size)).copy(),
  )


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
    lambda x: jax.device_put(
      x, layout.sharding('batch', *[None] * (np.ndim(x) - 1))
    ),
    request,
  )
