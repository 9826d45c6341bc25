"""The page of a run: faithful, escaped, and written or refused."""

import html.parser
import os
import re

import pytest
import tokenizers

from specdec_jax import api, page, record
from specdec_jax.io import tokenizer as tokenizer_lib

BYTES = tokenizer_lib.from_bytes(512, 'bytes')
EVIL = '<script>alert(1)</script>&amp;{{ 7 * 7 }}"\'\u202e\x00\n\tcaf\u00e9 end'
SETTING = {'target': '<b>model</b>', 'temperature': 0.0, 'draft': None}


def completion(prompt, windows, **changes):
  """windows: (accepted text, refused text, the target's own text)."""
  tokens, kinds, found, refused = [], [], [], {}
  for taken, dead, last in windows:
    a, d, z = (list(x.encode()) for x in (taken, dead, last))
    found.append(
      record.Window(len(tokens), (*a, *d), None, len(a), len(a) + len(z))
    )
    if d:
      refused[len(tokens) + len(a)] = d[0]
    own = 'recovered' if d else 'bonus' if a else 'plain'
    tokens += a + z
    kinds += ['drafted'] * len(a) + [own] * len(z)
  n = len(tokens)
  made = record.Record(
    prompt=list(prompt.encode()),
    tokens=tokens,
    windows=found,
    p=[0.125 + i / 1000 for i in range(n)],
    q=[None] * n,
    entropy=[1.5] * n,
    refused=[refused.get(i, -1) for i in range(n)],
    refused_p=[0.03] * n,
    refused_q=[None] * n,
    tokenizer=BYTES,
    setting=SETTING,
  )
  counts = {
    'emitted_tokens': n,
    'target_calls': len(found),
    'drafted_tokens': sum(len(w.draft) for w in found),
    'accepted_tokens': sum(w.accepted for w in found),
  }
  fields = dict(
    text=bytes(tokens).decode(errors='replace'),
    tokens=tokens,
    finish_reason='length',
    origins=kinds,
    metrics=counts,
    record=made,
  )
  return api.Completion(**fields | changes)


class Reader(html.parser.HTMLParser):
  """The text inside the elements of each class, and all tags."""

  def __init__(self, page):
    super().__init__()
    self.stack, self.tags, self.text = [], [], {}
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in ('meta', 'td', 'th'):
      self.stack.append((tag, dict(attrs).get('class', '')))

  def handle_endtag(self, tag):
    assert self.stack.pop()[0] == tag

  def handle_data(self, data):
    for tag, kind in self.stack:
      self.text[kind or tag] = self.text.get(kind or tag, '') + data


def one(*windows, prompt='ask', **changes):
  found = completion(prompt, windows, **changes)
  return page.render({'<i>title': found}, 'a --b="<c>"')


def answer(text):
  return text[text.index('class="text answer"') : text.index('Target calls')]


def test_hostile_text_is_shown_and_is_no_markup():
  text = one(('', '', EVIL), prompt=EVIL)
  seen = Reader(text)
  shown = EVIL.replace('\u202e', '[U+202E]').replace('\x00', '[U+0000]')
  shown = shown.replace('\n\t', '\u23ce\n\u21e5\t')
  assert seen.text['text prompt'] == shown
  # A character of several tokens is in the last; the others are marked.
  for character, marks in (('[U+202E]', 2), ('\u00e9', 1)):
    shown = shown.replace(character, '\u25af' * marks + character)
  assert seen.text['text answer'] == shown
  assert '<b>model</b>' in seen.text['dd'] and 'a --b="<c>"' in seen.text['dd']
  assert seen.text['h2'] == '<i>title'
  assert '\x00' not in text and '\u202e' not in text
  for tag, attributes in seen.tags:
    assert tag not in ('script', 'b model', 'i')
    assert not {'src', 'onclick', 'onload'} & set(attributes)
  assert "default-src 'none'" in text
  assert 'http' not in text.replace('http-equiv', '')
  assert 'prefers-color-scheme: dark' in text


def calls(text):
  """(call, accepted, [(kind, text)]) of every target call."""
  return [
    (
      *re.findall(r'<td class="n">(.*?)(?=<td)', row),
      re.findall(r'class="t (\w+)"[^>]*>(.*?)</span>', row),
    )
    for row in re.findall('<tr class="call">(.*?)</tr>', text)
  ]


def test_tokens_and_calls_have_their_origins_and_numbers():
  text = one(('ab', 'xy', 'c'), ('', '', 'd'), ('e', '', 'f'))
  found = re.findall(r'class="t (\w+)" title="(.*?)">(.)<', answer(text))
  kinds = 'drafted drafted recovered plain drafted bonus'.split()
  assert [(kind, x) for kind, _, x in found] == [
    *zip(kinds, 'abcdef', strict=True)
  ]
  assert found[1][1] == 'id 98: p 0.126, q none, entropy 1.50 bits'
  assert found[2][1].endswith('bits; instead of id 120: p 0.03, q none')
  assert '<b>6</b> tokens' in text and '<b>2.00</b> block' in text
  assert '<b>3 of 5</b> drafts' in text
  kinds = ['drafted'] * 2 + ['refused'] * 2 + ['recovered']
  assert calls(text) == [
    ('1', '2 of 4', [*zip(kinds, 'abxyc', strict=True)]),
    ('2', 'no draft', [('plain', 'd')]),
    ('3', '1 of 1', [('drafted', 'e'), ('bonus', 'f')]),
  ]


def test_what_comes_after_the_end_is_marked_as_cut():
  c = completion('ask', [('abc', '', 'd')])
  window = c.record.windows[0]._replace(emitted=2)  # EOS, say, at b
  made = vars(c.record) | dict(tokens=c.tokens[:2], windows=[window])
  fields = vars(c) | dict(tokens=c.tokens[:2], origins=c.origins[:2])
  fields['record'] = record.Record(**made)
  (found,) = calls(page.render({'t': api.Completion(**fields)}))
  kinds = ['drafted', 'drafted', 'cut']
  assert found == ('1', '3 of 3', [*zip(kinds, 'abc', strict=True)])
  # A stop string: the window was emitted, and the text ends inside it.
  fields = vars(c) | dict(tokens=c.tokens[:1], origins=c.origins[:1])
  text = page.render({'t': api.Completion(**fields)})
  assert [kind for kind, _ in calls(text)[0][2]] == ['drafted'] + ['cut'] * 3
  assert answer(text).count('class="t ') == 1


def test_the_file_has_an_index_or_is_refused(tmp_path):
  answers = [completion('ask', [('', '', 'x' * n)]) for n in (1, 2)]
  for wrong, path, match in (
    (answers, tmp_path / 'no' / 'page.html', 'cannot be written .No such'),
    (answers, tmp_path, 'cannot be written'),
    ([], tmp_path / 'page.html', 'nothing to show'),
    ([completion('', [], record=None)], tmp_path / 'page.html', 'record=True'),
  ):
    with pytest.raises(ValueError, match=match):
      page.html(wrong, path)
  assert not os.listdir(tmp_path)
  page.html(answers, tmp_path / 'page.html')
  text = (tmp_path / 'page.html').read_text('utf-8')
  assert re.findall(r'<a href="#(a\d)">(.*?)</a>', text) == [
    ('a1', 'Answer 0'),
    ('a2', 'Answer 1'),
  ]
  assert '<section id="a2">' in text


def byte_fallback() -> tokenizer_lib.Tokenizer:
  """As Llama 2's: 0 to 255 are bytes, 256 is ' the'."""
  vocab = {f'<0x{b:02X}>': b for b in range(256)} | {'\u2581the': 256}
  inner = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab, [], byte_fallback=True)
  )
  d = tokenizers.decoders
  inner.decoder = d.Sequence(
    [d.Replace('\u2581', ' '), d.ByteFallback(), d.Fuse(), d.Strip(' ', 1, 0)]
  )
  return tokenizer_lib.Tokenizer('fallback', inner)


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
  tokenizer = byte_fallback()
  assert page.pieces(tokenizer, [256], ids) == expected
  assert 'the' + ''.join(expected) == (tokenizer.decode([256, *ids]))
