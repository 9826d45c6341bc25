"""The page of a run: whole, faithful, escaped, and written or refused."""

import base64
import hashlib
import html.parser
import os
import re
import types

import pytest
import tokenizers

from specdec_jax import api
from specdec_jax.analysis import record, record_page
from specdec_jax.bench import metrics
from specdec_jax.io import tokenizer as tokenizer_lib

BYTES = tokenizer_lib.from_bytes(512, 'bytes')
EVIL = '<script>alert(1)</script>&amp;"\'\u202e\x00\n\tcaf\u00e9 \U0001f469 end'
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
  at = lambda value: [value / 100 if i in refused else 0.0 for i in range(n)]
  made = record.Record(
    prompt=list(prompt.encode()),
    tokens=tokens,
    windows=found,
    p=[0.125 + i / 1000 for i in range(n)],
    q=[None] * n,
    entropy=[1.5] * n,
    refused=[refused.get(i, -1) for i in range(n)],
    refused_p=at(3),
    refused_q=[None] * n,
    tokenizer=BYTES,
    setting=SETTING,
  )
  counts = metrics.total([])._asdict() | {
    'emitted_tokens': n,
    'target_calls': len(found),
    'drafted_tokens': sum(len(w.draft) for w in found),
    'block_efficiency': n / len(found),
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
  """Elements by class; text of marks (<i>) is left out, as of a copy."""

  def __init__(self, page):
    super().__init__()
    self.stack, self.tags, self.text, self.tokens = [], [], {}, []
    self.feed(page)
    self.close()
    assert not self.stack, 'not closed'

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in ('meta', 'link', 'br'):
      self.stack.append((tag, dict(attrs).get('class', '')))

  def handle_endtag(self, tag):
    assert self.stack.pop()[0] == tag

  def handle_data(self, data):
    if self.stack and self.stack[-1][0] == 'i':
      return
    for _, kind in self.stack:
      self.text[kind] = self.text.get(kind, '') + data


def one(*windows, prompt='ask', **changes):
  return record_page.render(
    [('title', completion(prompt, windows, **changes))], 'a --b="<c>"'
  )


def test_text_is_shown_as_it_is_and_nothing_in_it_is_markup():
  page = one(('', '', EVIL), prompt=EVIL)
  seen = Reader(page)
  # What has no shape is marked, and left out of a copy.
  expected = EVIL.replace('\u202e', '').replace('\x00', '')
  assert seen.text['text answer'] == expected
  assert seen.text['text prompt'] == expected
  assert [tag for tag, _ in seen.tags].count('script') == 1
  assert '<b>model</b>' in seen.text['']
  assert 'a --b="<c>"' in seen.text['']
  assert '\x00' not in page and '\u202e' not in page
  assert 'U+202E' in page and 'U+0000' in page
  assert page.count('\u23ce') >= 2 and page.count('\u21e5') >= 2


def test_only_this_script_and_style_may_run_and_nothing_is_loaded():
  page = one(('', '', 'x'))
  for tag in ('script', 'style'):
    inside = re.search(f'<{tag}>(.*?)</{tag}>', page, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}'" in page
  assert "default-src 'none'" in page
  for _, attributes in Reader(page).tags:
    assert not {'src', 'style', 'onclick', 'onload'} & set(attributes)
  assert 'http' not in page.replace('http-equiv', '')
  assert 'prefers-color-scheme:dark' in page


def test_each_token_has_its_origin_and_its_row():
  page = one(('ab', 'xy', 'c'), ('', '', 'd'), ('e', '', 'f'))
  answer = page[page.index('class="text answer"') : page.index('class="bars"')]
  kinds = re.findall(r'class="t (\w+)" data-r="(\w+)"[^>]*>(.)<', answer)
  assert kinds == [
    ('drafted', 'a0t0', 'a'),
    ('drafted', 'a0t1', 'b'),
    ('recovered', 'a0t2', 'c'),
    ('plain', 'a0t3', 'd'),
    ('drafted', 'a0t4', 'e'),
    ('bonus', 'a0t5', 'f'),
  ]
  assert answer.count('tabindex="0"') == 1
  row = re.search('<tr id="a0t2">(.*?)</tr>', page).group(1)
  cells = [re.sub('<.*?>', '', x) for x in row.split('</td>')]
  assert cells[:9] == [
    *('2', 'c', '99', 'recovered', '1', '0.127', '\u2013', '1.50'),
    'x p 0.03, q certain',
  ]
  assert '>certain</td>' in re.search('<tr id="a0t1">.*?</tr>', page).group()


def calls(page):
  """(call, accepted, [(kind, text)]) of every line of the strip."""
  strip = page[page.index('class="calls"') : page.index('</ol>')]
  lines = strip.split('<li>')[1:]
  span = r'<span class="n">(.*?)</span>'
  return [
    (
      *re.findall(span, line),
      re.findall(r'class="t (\w+)">(.*?)</span>', line),
    )
    for line in lines
  ]


def test_the_strip_shows_accepted_refused_and_corrected_by_call():
  page = one(('ab', 'xy', 'c'), ('', '', 'd'), ('', '', 'e'), ('f', '', 'g'))
  assert calls(page) == [
    (
      *('1', '2 of 4'),
      [
        (k, t)
        for k, t in zip(['drafted'] * 2 + ['refused'] * 2, 'abxy', strict=True)
      ]
      + [('recovered', 'c')],
    ),
    ('2\u20133', 'no draft', [('plain', 'd'), ('plain', 'e')]),
    ('4', '1 of 1', [('drafted', 'f'), ('bonus', 'g')]),
  ]


def test_what_comes_after_the_end_is_marked_as_cut():
  c = completion('ask', [('abc', '', 'd')])
  cut = c.record.windows[0]._replace(emitted=2)  # EOS, say, at b
  made = vars(c.record) | dict(tokens=c.tokens[:2], windows=[cut])
  page = record_page.render([('t', completion_of(c, 2, record.Record(**made)))])
  kinds = [('drafted', 'a'), ('drafted', 'b'), ('cut', 'c')]
  assert calls(page) == [('1', '3 of 3', kinds)]
  assert re.findall(r'<i class="(\w+)"></i>', page) == [k for k, _ in kinds]
  # A stop string: the window was whole, and the answer ends inside it.
  page = record_page.render([('t', completion_of(c, 1, c.record))])
  assert [kind for kind, _ in calls(page)[0][2]] == ['drafted'] + ['cut'] * 3
  assert page.count('data-r=') == 1


def completion_of(c, kept, made):
  return types.SimpleNamespace(
    **vars(c)
    | dict(tokens=c.tokens[:kept], origins=c.origins[:kept], record=made)
  )


def test_a_character_of_two_tokens_is_whole_and_half_ones_are_marked():
  page = one(('\u00e9', '', 'x'))
  answer = page[page.index('class="text answer"') : page.index('class="bars"')]
  assert re.findall(r'>([^<]+)</', answer)[:3] == ['\u25af', '\u00e9', 'x']
  # An answer that ends inside a character.
  c = completion('ask', [('', '', 'a'), ('', '', '\u00e9')])
  cut = [c.record.windows[0], c.record.windows[1]._replace(emitted=1)]
  made = vars(c.record) | dict(tokens=c.tokens[:2], windows=cut)
  page = record_page.render([('t', completion_of(c, 2, record.Record(**made)))])
  assert Reader(page).text['text answer'] == 'a\ufffd'


def test_many_answers_have_an_index(tmp_path):
  answers = {
    f'<i>{n}': completion('ask', [('', '', 'x' * n)]) for n in (1, 2, 3)
  }
  record_page.html(answers, tmp_path / 'page.html')
  page = (tmp_path / 'page.html').read_text('utf-8')
  Reader(page)
  assert re.findall(r'<a href="#(a\d)">&lt;i&gt;(\d)</a>', page) == [
    ('a0', '1'),
    ('a1', '2'),
    ('a2', '3'),
  ]
  assert '<b>6</b> tokens' in page and '<b>2.00</b> block' in page
  assert [x.name for x in tmp_path.iterdir()] == ['page.html']


def test_what_cannot_be_written_or_shown_is_refused(tmp_path):
  good = [completion('ask', [('', '', 'x')])]
  with pytest.raises(ValueError, match='there is no folder'):
    record_page.html(good, tmp_path / 'no' / 'page.html')
  with pytest.raises(ValueError, match='not a file'):
    record_page.html(good, tmp_path)
  with pytest.raises(ValueError, match='nothing to show'):
    record_page.html([], tmp_path / 'page.html')
  with pytest.raises(ValueError, match='record=True'):
    record_page.html(
      [completion('ask', [('', '', 'x')], record=None)], tmp_path / 'page.html'
    )
  assert not os.listdir(tmp_path)


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
  assert record_page.pieces(tokenizer, [256], ids) == expected
  assert 'the' + ''.join(expected) == (tokenizer.decode([256, *ids]))
