"""Text as its ids come: what may be shown, and where a stop string cuts."""

import os

import numpy as np
import pytest
import tokenizers

from specdec_jax.io import tokenizer
from specdec_jax.io.tokens import stream
from tests.io import tiny

HALF = '\ufffd'


def fallback(words=('▁', 'a', 'b', '▁a', 'é', 'ab'), merges=(), strip=True):
  """As of Llama 2: ids 3 to 258 are bytes, which stand for other characters."""
  spelled = [f'<0x{byte:02X}>' for byte in range(256)]
  vocab = ['<unk>', '<s>', '</s>', *spelled, *words]
  inner = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      {x: i for i, x in enumerate(vocab)},
      [*merges],
      unk_token='<unk>',
      byte_fallback=True,
      fuse_unk=True,
    )
  )
  d = tokenizers.decoders
  steps = [d.Replace('▁', ' '), d.ByteFallback(), d.Fuse()]
  inner.decoder = d.Sequence(steps + [d.Strip(' ', 1, 0)] * strip)
  inner.add_special_tokens(['<s>', '</s>'])
  return tokenizer.Tokenizer('fallback', inner, eos_ids=(2,), bos_id=1)


def metaspace():
  """As of T5: no bytes, and the first space of all is left out."""
  words = ['▁', 'a', 'b', '▁a', 'é', '▁▁']
  inner = tokenizers.Tokenizer(
    tokenizers.models.Unigram([(x, -1.0) for x in words], 0)
  )
  inner.decoder = tokenizers.decoders.Metaspace()
  inner.add_special_tokens(['</s>'])
  return tokenizer.Tokenizer('metaspace', inner, eos_ids=(6,))


KINDS = {
  'bytes': lambda: tokenizer.from_bytes(512, 'bytes'),
  'byte level': lambda: tokenizer.Tokenizer('level', tiny.byte_tokenizer()),
  'fallback': fallback,
  'no strip': lambda: fallback(strip=False),
  'metaspace': metaspace,
}


def some_ids(t, rng) -> list[int]:
  """Characters whole and cut, words, special tokens and an id of no token."""
  spelled = t.inner.token_to_id('<0x00>')
  out = []
  for _ in range(rng.integers(2, 9)):
    text = rng.choice(['你好', '😀', 'é', 'a b', ' ', HALF, 'ab'])
    if spelled is None:
      ids = t.inner.encode(text).ids
    else:
      ids = [spelled + b for b in text.encode()]
    whole = rng.random() < 0.7
    out += ids if whole else ids[: rng.integers(0, len(ids)) + 1]
    # The last ids are words or special tokens, those past them nothing.
    out += rng.integers(t.size - 6, t.size + 1, rng.integers(0, 3)).tolist()
  return out


@pytest.mark.parametrize('kind', KINDS)
def test_a_stream_is_the_text_of_its_ids_and_takes_nothing_back(kind):
  t, rng = KINDS[kind](), np.random.default_rng(0)
  for _ in range(100):
    stream, ids, shown = t.stream(), some_ids(t, rng), ''
    for n, i in enumerate(ids, 1):
      shown += stream.push(i)
      assert stream.text == t.decode(ids[:n])
      assert shown == stream.text[: stream.ready]
    assert t.decode(ids).startswith(shown)


def cut_by_hand(t, ids, stop):
  """(text, tokens): at the first token after which a stop string is there."""
  for n in range(1, len(ids) + 1):
    sure = t.decode(ids[:n]).rstrip(HALF)
    ends = [(sure.find(x) + len(x), sure.find(x)) for x in stop if x in sure]
    if ends:
      return sure[: min(ends)[1]], n
  return t.decode(ids), len(ids)


@pytest.mark.parametrize('kind', KINDS)
def test_a_stop_string_cuts_where_it_is_first_complete(kind):
  t, rng = KINDS[kind](), np.random.default_rng(1)
  cuts = 0
  for _ in range(150):
    ids = some_ids(t, rng)
    text = t.decode(ids[: rng.integers(1, len(ids))])
    at = int(rng.integers(0, len(text) + 1))
    stop = ['好 ', '😀a', text[at : at + 2] or 'aa']
    stream, shown = t.stream(stop), ''
    for n, i in enumerate(ids, 1):  # noqa: B007  n is read below
      shown += stream.push(i)
      if stream.stopped:
        break
    assert (stream.text, n) == cut_by_hand(t, ids, stop)
    cuts += stream.stopped
    # What was shown on the way is the beginning of what is kept.
    assert os.path.commonprefix([shown, stream.text]) == shown
    assert not stream.stopped or shown == stream.text
  assert 20 < cuts < 150


def test_bytes_that_become_invalid_were_not_shown():
  """Three bytes are a character; a fourth makes all four U+FFFD."""
  t = fallback()
  ids = [3 + b for b in '你好'.encode()]
  stream = t.stream()
  assert [stream.push(i) for i in ids[:4]] == [''] * 4
  assert stream.text == t.decode(ids[:4]) == HALF * 4
  assert [stream.push(i) for i in (*ids[4:], 260)] == ['', '', '你好a']
  # A special token has no text and does not end a run.
  stream = t.stream()
  pieces = [stream.push(i) for i in (*ids[:3], 2, ids[3], 260)]
  assert pieces == ['', '', '', '', '', HALF * 4 + 'a']
  # A stop string is complete before the run is.
  stream = t.stream(['你'])
  assert [stream.push(i) for i in ids[:3]] == [''] * 3
  assert (stream.stopped, stream.text) == (True, '')


def test_what_may_begin_a_stop_string_waits():
  t = tokenizer.from_bytes(256, 'x')
  stream = t.stream(['<end>', 'dd'])
  shown = [stream.push(i) for i in b'a<en d<e']
  assert shown == ['a', '', '', '', '<en ', '', 'd', '']
  assert [stream.push(i) for i in b'nd'] == ['', '']
  assert stream.push(ord('>')) == '' and stream.stopped
  assert stream.text == 'a<en d'
  # Of two beginnings the longer one waits.
  stream = t.stream(['aab', 'aad'])
  assert [stream.push(i) for i in b'aaac'] == ['', '', 'a', 'aac']


def test_half_a_character_is_no_stop_string():
  t = tokenizer.from_bytes(256, 'x')
  stream = t.stream([HALF])
  assert ''.join(stream.push(i) for i in '🙂x'.encode()) == '🙂x'
  stream.push(0xFF)
  assert not stream.stopped
  stream.push(ord('y'))
  assert stream.stopped and stream.text == '🙂x'


def test_pieces_of_a_page_know_the_run_of_bytes_before_them():
  t = fallback()
  run = [3 + b for b in ('你' * 6 + '好').encode()]
  assert stream.texts_of(t, run[:18], run[18:]) == ['', '', '好']


@pytest.mark.parametrize(
  'ids, expected',
  [
    ([65, 256, 256], ['A', ' the', ' the']),
    ([0xC3, 0xA9, 256], ['', '\u00e9', ' the']),
    # The last byte takes the character back: a stream has shown it by then.
    ([0xC3, 0xA9, 0xFF, 256], ['\ufffd', '', '\ufffd\ufffd', ' the']),
    ([0xE2, 0x82], ['\ufffd', '\ufffd']),
  ],
)
def test_byte_tokens_are_together_the_text_of_all(ids, expected):
  """256 stands for ' the'; the tokenizer has three ids before the bytes."""
  t, ids = fallback(['▁the']), [3 + i for i in ids]
  assert stream.texts_of(t, [259], ids) == expected
  assert 'the' + ''.join(expected) == t.decode([259, *ids])


@pytest.mark.parametrize('kind', KINDS)
def test_bytes_of_ids_are_together_those_of_the_text_they_add(kind):
  """Alone many decode to less: without a space, or as U+FFFD."""
  t, rng = KINDS[kind](), np.random.default_rng(0)
  # Ids of no token, and a run of bytes that is not UTF-8, are not joined.
  every = [i for i in range(t.size) if t.inner.id_to_token(i) is not None]
  whole = lambda ids: t.decode([*t.encode('a')[-1:], *ids], special=True)
  for _ in range(200):
    ids = rng.choice(every, 6).tolist()
    found = b''.join(stream.bytes_of(t, i) for i in ids)
    if HALF not in (text := whole(ids)):
      assert found.decode() == text.removeprefix(whole([]))
  half = '😀'.encode()[:2]
  if spelled := [t.inner.token_to_id(f'<0x{b:02X}>') for b in half]:
    ids = t.encode('😀')[-4:-2] if None in spelled else spelled
    if kind != 'metaspace':
      assert b''.join(stream.bytes_of(t, i) for i in ids) == half
  assert stream.bytes_of(t, t.size + 5) == b''
