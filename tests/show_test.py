"""Replies in a terminal and a page: faithful, and no markup of text."""

import dataclasses
import io
import json
import math
import os
import re

import pytest
import rich.console

from specdec_jax import completion, show

EVIL = '<script>alert(1)</script><!--&amp;"\'\\\n\tcaf\u00e9\u2028 null end'


def console(**options) -> rich.console.Console:
  return rich.console.Console(file=io.StringIO(), width=80, **options)


def pieces(windows):
  """A stream of (text, origin) windows of one letter a token."""
  for window in windows:
    both = [(x, kind) for text, kind in window for x in text]
    texts, origins = (list(x) for x in zip(*both, strict=True))
    yield completion.Piece('', [*map(ord, texts)], origins, texts)


WINDOWS = [
  [('a', 'plain')],
  [('bcd', 'drafted'), ('e', 'bonus')],
  [('f', 'drafted'), ('g', 'recovered')],
  [('h', 'recovered')],
]


def test_marks_who_made_each_token_and_counts_without_a_terminal():
  out = console()
  counts = show.reply(out, pieces(WINDOWS))
  assert out.file.getvalue() == 'a[bcd]{e}[f]<gh>\n'
  assert counts == (
    '8 tokens in 4 passes: block efficiency 2.00 '
    '(4 drafted, 2 recovered, 1 bonus, 1 plain)'
  )


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
  found = []
  for taken, dead, last in windows:
    own = 'recovered' if dead else 'bonus' if taken else 'plain'
    texts = [*taken, *last]
    piece = completion.Piece(
      text=taken + last,
      tokens=[*map(ord, texts)],
      origins=['drafted'] * len(taken) + [own] * len(last),
      texts=texts,
      logprobs=[-0.125 - i for i in range(len(texts))],
      entropies=[0.25] * len(texts),
      refused=[(ord(x), x) for x in dead],
      q=[0.5] * len(taken + dead),
    )
    found.append(piece)
  setting = {'target': '<b>model</b>', 'temperature': 0.0, 'draft': None}
  accepted = sum(len(taken) for taken, _, _ in windows)
  counts = dict(
    emitted_tokens=sum(len(w.tokens) for w in found),
    target_calls=len(found),
    drafted_tokens=accepted + sum(len(w.refused) for w in found),
    accepted_tokens=accepted,
  )
  whole = completion.Completion(
    *('', [], []),
    finish_reason='length',
    metrics=counts,
    record=completion.Record(prompt, found, setting),
  )
  return dataclasses.replace(whole, **changes)


def record_in(page):
  """The text of the script of a page that holds the record."""
  return re.search('id="record">(.*?)</script', page, re.DOTALL)[1]


def drawn(found):
  """What page.html draws of a completion."""
  page = show.page({'<i>title': found}, 'a --b="<c>"')
  return json.loads(record_in(page))


def test_hostile_text_is_data_and_no_markup():
  found = answered(EVIL, [('', '', EVIL)])
  page = show.page({EVIL: found}, EVIL)
  text = record_in(page)
  assert text.isascii() and not set(text) & set('<\n')
  (answer,) = json.loads(text)['answers']
  assert answer['title'] == answer['prompt'] == EVIL
  assert ''.join(answer['windows'][0]['texts']) == EVIL
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


def test_windows_have_what_the_page_draws():
  windows = ('ab', 'xy', 'c'), ('', '', 'd')
  (answer,) = drawn(answered('ask', windows))['answers']
  first, second = answer['windows']
  assert first == dict(
    tokens=[97, 98, 99],
    origins=['drafted', 'drafted', 'recovered'],
    texts=['a', 'b', 'c'],
    entropies=[0.25] * 3,
    refused=[[120, 'x'], [121, 'y']],
    q=[0.5] * 4,
    p=[math.exp(-0.125 - i) for i in range(3)],
  )
  assert second['origins'] == ['plain'] and second['q'] == []
  assert [*answer['counts'].values()] == [4, 2, 4, 2]
  assert (answer['prompt'], answer['reason']) == ('ask', 'length')


def test_what_came_after_a_stop_string_is_not_counted():
  """A window is drawn; two more were decoded before the stop was seen."""
  found = answered('ask', [('ab', 'x', 'c')])
  (window,) = found.record.windows
  counts = dict(
    emitted_tokens=9, target_calls=3, drafted_tokens=8, accepted_tokens=6
  )
  origins = dict(tokens=window.tokens, origins=window.origins)
  (answer,) = drawn(dataclasses.replace(found, metrics=counts, **origins))[
    'answers'
  ]
  assert [*answer['counts'].values()] == [3, 1, 3, 2]


def test_the_page_is_written_or_refused(tmp_path):
  answers = [answered('ask', [('', '', 'x' * n)]) for n in (1, 2)]
  for wrong in [], [answered('', [], record=None)]:
    with pytest.raises(ValueError, match='nothing to show: .* record=True'):
      show.html(wrong, tmp_path / 'page.html')
  assert not os.listdir(tmp_path)
  show.html(answers, tmp_path / 'page.html')
  text = (tmp_path / 'page.html').read_text('utf-8')
  found = json.loads(record_in(text))['answers']
  assert [x['title'] for x in found] == ['Answer 0', 'Answer 1']
