import io

import pytest
import rich.console

from specdec_jax import api, show
from specdec_jax.io import tokenizer


def console(**options) -> rich.console.Console:
  return rich.console.Console(file=io.StringIO(), width=80, **options)


def pieces(windows):
  """A stream of (text, origin) windows of one byte a token."""
  for window in windows:
    tokens = [b for text, _ in window for b in text.encode()]
    origins = [kind for text, kind in window for _ in text.encode()]
    yield api.Piece('', tokens, origins)


WINDOWS = [
  [('a', 'plain')],
  [('bcd', 'drafted'), ('e', 'bonus')],
  [('f', 'drafted'), ('g', 'recovered')],
  [('h', 'recovered')],
]


def test_marks_who_made_each_token_and_counts_without_a_terminal():
  out = console()
  line = show.reply(out, tokenizer.from_bytes(256, 'test'), pieces(WINDOWS))
  assert out.file.getvalue() == 'a[bcd]{e}[f]<gh>\n'
  assert line == (
    '8 tokens in 4 passes: block efficiency 2.00 '
    '(4 drafted, 2 recovered, 1 bonus, 1 plain)'
  )


def test_a_character_made_by_two_windows_is_shown_once_and_whole():
  out, text = console(), '\u00e9'.encode()
  windows = [([text[0]], ['drafted']), ([text[1]], ['bonus'])]
  stream = (api.Piece('', *window) for window in windows)
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
