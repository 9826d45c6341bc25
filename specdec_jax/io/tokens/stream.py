"""Makes text from ids that come one by one."""

import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any

from specdec_jax.io.tokens import words


class Stream:
  """Text from ids as they come, cut where a stop string is completed.

  text: so far, as Tokenizer.decode gives it; before the stop string.
  ready: how many of its first characters no later id changes or cuts off.
  stopped: whether a stop string was completed; no id may follow.

  Text may change after an id is read. Half a character waits for the other
  half. `tokenizers` decodes a run of bytes (<0xE4>, as in Llama 2) as a whole:
  each is U+FFFD unless all are UTF-8.
  """

  def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
    """tokenizer: an io.tokenizer.Tokenizer. stop: texts, none empty."""
    self.text, self.ready, self.stopped = '', 0, False
    self._tokenizer, self._stop = tokenizer, stop
    # The ids of the last settled piece of text, _read of them, and those after
    # it. A token's text may depend on the token before it.
    self._ids: list[int] = []
    self._read = self._settled = 0
    self._bytes = run_bytes(tokenizer)
    self._in_run = False

  def push(self, i: int) -> str:
    """Reads an id; returns the text that became ready, '' while it waits."""
    assert not self.stopped
    shown, new = self.ready, self._settled
    self._decode(i)
    # A stop string was not in the text before, so it ends in what is new. Not
    # in U+FFFD at the end, which may be half a character.
    reach = max(map(len, self._stop), default=0)
    sure = self.text.rstrip('\ufffd')
    cut = _find_stop(sure, self._stop, max(0, new - reach))
    if cut is not None:
      self.text, self.ready, self.stopped = self.text[:cut], cut, True
    else:
      settled = self.text[: self._settled]
      starts = [x[:n] for x in self._stop for n in range(1, len(x))]
      begun = (len(x) for x in starts if settled.endswith(x))
      self.ready = len(settled) - max(begun, default=0)
    return self.text[shown : self.ready]

  def _decode(self, i: int) -> None:
    decode = self._tokenizer.decode
    self._ids.append(i)
    before = decode(self._ids[: self._read])
    new = decode(self._ids)[len(before) :]
    self.text = self.text[: self._settled] + new
    # Ids without text, such as special ones, do not end a run.
    if self._bytes and not _is_hidden(self._tokenizer, i):
      self._in_run = i in self._bytes
    if new and not self._in_run and not new.endswith('\ufffd'):
      del self._ids[: self._read]
      self._read, self._settled = len(self._ids), len(self.text)


def _find_stop(text: str, stop: Sequence[str], start: int) -> int | None:
  """Returns where to cut: the start of the stop string completed first. Not the
  one that begins first: a stream would have cut before it ends."""
  found = ((text.find(x, start), x) for x in stop)
  ends = [(at + len(x), at) for at, x in found if at >= 0]
  return min(ends)[1] if ends else None


@functools.lru_cache(maxsize=8)  # 512 searches
def run_bytes(tokenizer: Any) -> set[int]:
  """Returns the byte ids that decode in runs; none without byte fallback."""
  inner = tokenizer.inner
  if inner.decoder is None or inner.decoder.decode(['<0x41>']) != 'A':
    return set()
  spelled = (f'<0x{byte:{x}}>' for byte in range(256) for x in ('02X', '02x'))
  found = map(inner.token_to_id, spelled)
  return {i for i in found if i is not None}


def _is_hidden(tokenizer: Any, i: int) -> bool:
  """Tells whether decode drops an id: a special token, or none at all."""
  return not tokenizer.decode([i]) and (
    tokenizer.inner.id_to_token(i) is None
    or bool(tokenizer.decode([i], special=True))
  )


@functools.lru_cache(maxsize=1 << 16)
def bytes_of(tokenizer: Any, i: int) -> bytes:
  """Returns the bytes that an id adds to a text; alone it may have fewer."""
  inner, known = tokenizer.inner, words.byte_characters()
  token, decoder = inner.id_to_token(i) or '', inner.decoder
  if i in run_bytes(tokenizer):
    return bytes([int(token[3:5], 16)])
  if decoder and decoder.decode(['\u0120']) == ' ' and known.keys() >= {*token}:
    return bytes(known[x] for x in token)
  before = tokenizer.encode('a')[-1:]
  text = tokenizer.decode([*before, i], special=True)
  return text[len(tokenizer.decode(before, special=True)) :].encode()


def texts_of(tokenizer, before: Sequence[int], ids: Sequence[int]) -> list[str]:
  """Returns the text that each id adds; '' inside a character. Joined they
  equal the whole text, even where a later byte invalidates earlier ones, which
  a stream cannot take back."""
  # A few earlier tokens decide on a leading space or half a character, and a
  # run of bytes is decoded as a whole.
  begin, in_run = max(0, len(before) - 16), run_bytes(tokenizer)
  while begin and before[begin] in in_run:
    begin -= 1
  before = [*before[begin:]]
  text = lambda n: tokenizer.decode([*before, *ids[:n]], special=True)
  end = text(len(ids))
  shared = lambda n: len(os.path.commonprefix([end, text(n)]))
  ends = list(itertools.accumulate(map(shared, range(len(ids) + 1)), max))
  ends[-1] = len(end)
  return [end[a:b] for a, b in itertools.pairwise(ends)]
