"""Replies in a terminal and a page: faithful, and no markup of text."""

import html.parser
import io
import json
import math
import os
import re

import pytest
import rich.console

from specdec_jax import completion, record, show
from specdec_jax.io import tokenizer
from specdec_jax.io.tokens import stream
from tests.io import stream_test

BYTES = tokenizer.from_bytes(512, 'bytes')
EVIL = '<script>alert(1)</script><!--&amp;"\'\\\n\tcaf\u00e9\u2028 null end'


def console(**options) -> rich.console.Console:
  return rich.console.Console(file=io.StringIO(), width=80, **options)


def pieces(windows):
  """A stream of (text, origin) windows of one byte a token."""
  for window in windows:
    tokens = [b for text, _ in window for b in text.encode()]
    origins = [kind for text, kind in window for _ in text.encode()]
    yield completion.Piece('', tokens, origins)


WINDOWS = [
  [('a', 'plain')],
  [('bcd', 'drafted'), ('e', 'bonus')],
  [('f', 'drafted'), ('g', 'recovered')],
  [('h', 'recovered')],
]


def test_marks_who_made_each_token_and_counts_without_a_terminal():
  out = console()
  counts = show.reply(out, tokenizer.from_bytes(256, 'test'), pieces(WINDOWS))
  assert out.file.getvalue() == 'a[bcd]{e}[f]<gh>\n'
  assert counts == (
    '8 tokens in 4 passes: block efficiency 2.00 '
    '(4 drafted, 2 recovered, 1 bonus, 1 plain)'
  )


def test_a_character_made_by_two_windows_is_shown_once_and_whole():
  out, text = console(), '\u00e9'.encode()
  windows = [([text[0]], ['drafted']), ([text[1]], ['bonus'])]
  stream = (completion.Piece('', *window) for window in windows)
  show.reply(out, tokenizer.from_bytes(256, 'test'), stream)
  assert out.file.getvalue() == '{\u00e9}\n'


@pytest.mark.parametrize('no_color', [False, True])
def test_styles_tell_kinds_apart_even_without_colours(no_color):
  seen = set()
  for kind in show.KINDS:
    out = console(
      force_terminal=True, color_system='standard', no_color=no_color
    )
    out.print(show.mark([(kind, 'x')], styled=True))
    seen.add(out.file.getvalue())
  assert len(seen) == len(show.KINDS)


def test_brackets_of_the_text_are_text():
  assert show.mark([('plain', '[bold]x')], styled=True).plain == '[bold]x'


# --- the page ----------------------------------------------------------------


def answered(prompt, windows, **changes):
  """windows: (accepted text, refused text, the target's own text)."""
  tokens, kinds, found = [], [], []
  for taken, dead, last in windows:
    a, d, z = (list(x.encode()) for x in (taken, dead, last))
    found.append(record.Window([*a, *d], [0.5] * len(a + d), len(a), [*a, *z]))
    own = 'recovered' if d else 'bonus' if a else 'plain'
    tokens += a + z
    kinds += ['drafted'] * len(a) + [own] * len(z)
  setting = {'target': '<b>model</b>', 'temperature': 0.0, 'draft': None}
  counts = dict(
    emitted_tokens=len(tokens),
    target_calls=len(found),
    drafted_tokens=sum(len(w.draft) for w in found),
    accepted_tokens=sum(w.accepted for w in found),
  )
  fields = dict(
    text='',
    tokens=tokens,
    finish_reason='length',
    origins=kinds,
    metrics=counts,
    logprobs=[-0.125 - i for i in range(len(tokens))],
    entropies=[0.25] * len(tokens),
    record=record.Record([*prompt.encode()], found, BYTES, setting),
  )
  return completion.Completion(**fields | changes)


class Reader(html.parser.HTMLParser):
  """Texts of the scripts of a page, by id, as a browser finds their ends."""

  def __init__(self, page):
    super().__init__()
    self.inside, self.text = None, {}
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.inside = dict(attrs).get('id', '') if tag == 'script' else None

  def handle_endtag(self, tag):
    self.inside = None

  def handle_data(self, data):
    if self.inside is not None:
      self.text[self.inside] = self.text.get(self.inside, '') + data


def drawn(found):
  """What page.html draws of a completion."""
  page = show.page({'<i>title': found}, 'a --b="<c>"')
  return json.loads(Reader(page).text['record'])


def test_hostile_text_is_data_and_no_markup():
  found = answered(EVIL, [('', '', EVIL)])
  page = show.page({EVIL: found}, EVIL)
  text = Reader(page).text['record']
  assert text.isascii() and not set(text) & set('<\n')
  (answer,) = json.loads(text)['answers']
  assert answer['title'] == answer['prompt'] == EVIL
  # A character of several tokens is in the last of them.
  texts = [t['text'] for t in answer['windows'][0]['tokens']]
  assert ''.join(texts) == EVIL and '' in texts
  setting = json.loads(text)['setting']
  assert setting['command'] == EVIL and setting['target'] == '<b>model</b>'
  # All else is the page as it lies.
  assert page.replace(text, 'null') == show.PAGE.read_text('utf-8')


def test_the_page_loads_nothing_and_shows_the_kinds_as_elsewhere():
  text = show.PAGE.read_text('utf-8')
  assert text.count('\n') <= 350
  # The second line: nor does it make markup, or a program, of text.
  loads = r'https?:|@import|url\(|\ssrc=|rel="stylesheet'
  parses = r'HTML\b|\beval|Function\(|document\.write|DOMParser'
  assert not re.findall(f'{loads}|{parses}', text)
  for kind, (_, _, meaning) in show.KINDS.items():
    assert f'<span class="t {kind}">token</span> {meaning}' in text


def tokens_of(window):
  return [(t['kind'], t['text']) for t in window['tokens']]


def test_tokens_and_windows_have_their_origins_and_numbers():
  windows = ('ab', 'xy', 'c'), ('', '', 'd'), ('e', '', 'f')
  (answer,) = drawn(answered('ask', windows))['answers']
  first, second, third = answer['windows']
  kinds = ['drafted'] * 2 + ['refused'] * 2 + ['recovered']
  assert tokens_of(first) == [*zip(kinds, 'abxyc', strict=True)]
  assert tokens_of(second) == [('plain', 'd')]
  assert tokens_of(third) == [('drafted', 'e'), ('bonus', 'f')]
  numbers = [(w['accepted'], w['drafted']) for w in answer['windows']]
  assert numbers == [(2, 4), (0, 0), (1, 1)]
  known = [[t.get(x) for x in ('id', 'p', 'q')] for t in first['tokens'][1:]]
  p = math.exp(-1.125), math.exp(-2.125)
  refused = [[ord(x), None, 0.5] for x in 'xy']
  assert known == [[98, p[0], 0.5], *refused, [99, p[1], None]]
  assert [*answer['counts'].values()] == [6, 3, 5, 3]
  assert answer['reason'] == 'length'


def test_what_comes_after_the_end_is_marked_as_cut():
  whole = answered('ask', [('abc', '', 'd')])
  window = whole.record.windows[0]._replace(tokens=[*b'ab'])  # EOS, say, at b
  cut = dict(tokens=[*b'ab'], origins=['drafted'] * 2, logprobs=None)
  short = whole.record._replace(windows=[window])
  of = lambda **changes: drawn(answered('', [], **vars(whole) | cut | changes))
  (found,) = of(record=short)['answers'][0]['windows']
  assert tokens_of(found) == [('drafted', 'a'), ('drafted', 'b'), ('cut', 'c')]
  assert found['accepted'] == found['drafted'] == 3
  assert found['tokens'][2]['q'] == 0.5
  # A stop string: the window was emitted, and the text ends inside it.
  (found,) = of()['answers'][0]['windows']
  assert tokens_of(found)[1:] == [('drafted', 'b'), ('cut', 'c'), ('cut', 'd')]


def test_the_page_is_written_or_refused(tmp_path):
  answers = [answered('ask', [('', '', 'x' * n)]) for n in (1, 2)]
  for wrong, path, match in (
    (answers, tmp_path / 'no' / 'page.html', 'cannot be written .No such'),
    (answers, tmp_path, 'cannot be written'),
    ([], tmp_path / 'page.html', 'nothing to show'),
    ([answered('', [], record=None)], tmp_path / 'page.html', 'record=True'),
  ):
    with pytest.raises(ValueError, match=match):
      show.html(wrong, path)
  assert not os.listdir(tmp_path)
  show.html(answers, tmp_path / 'page.html')
  text = (tmp_path / 'page.html').read_text('utf-8')
  found = json.loads(Reader(text).text['record'])['answers']
  assert [x['title'] for x in found] == ['Answer 0', 'Answer 1']


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
  t, ids = stream_test.fallback(['▁the']), [3 + i for i in ids]
  assert stream.texts_of(t, [259], ids) == expected
  assert 'the' + ''.join(expected) == t.decode([259, *ids])
