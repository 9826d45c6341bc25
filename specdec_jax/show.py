"""Prints a reply as it is generated, with the origin of each token marked."""

from collections.abc import Iterable
from typing import Any

import rich.console
import rich.live
import rich.text

from specdec_jax import metrics
from specdec_jax.io import tokenizer as tokenizer_lib

# Origin: (style, marks for output without styles, meaning). No style is colour
# alone: NO_COLOR removes colours, and not every reader sees them.
KINDS = {
  'drafted': ('bold green', '[]', 'drafted and accepted'),
  'recovered': ('underline red', '<>', 'recovered: replaces a wrong draft'),
  'bonus': ('italic cyan', '{}', 'bonus: one more, all drafts were right'),
  'plain': ('', '', 'plain: nothing was drafted, one pass for one token'),
}


def legend(out: rich.console.Console) -> None:
  """Prints a line for each kind of token, marked as in replies."""
  for kind, (_, _, meaning) in KINDS.items():
    line = mark([(kind, meaning)], styled=out.is_terminal)
    out.print(rich.text.Text('  ').append_text(line))


def mark(runs: Iterable[tuple[str, str]], *, styled: bool) -> rich.text.Text:
  """(origin, text) pairs as one text; runs of equal origin share marks."""
  out, last, close = rich.text.Text(), None, ''
  for kind, text in runs:
    if not text:  # end of sequence, or half a character
      continue
    style, marks, _ = KINDS[kind]
    if styled:
      out.append(text, style)
      continue
    if kind != last:
      out.append(close + marks[:1])
      last, close = kind, marks[1:]
    out.append(text)
  return out.append(close)


def reply(
  out: rich.console.Console,
  tokenizer: tokenizer_lib.Tokenizer,
  pieces: Iterable[Any],
) -> str:
  """Prints the pieces of api.stream as they come, then a sentence of counts.

  A piece is one pass of the target. Its tokens are decoded one by one, as its
  text does not show where each token ends.
  """
  decoder, runs, origins, calls = tokenizer.stream(), [], [], 0
  waiting = rich.text.Text('compiling', style='dim')
  with rich.live.Live(waiting, console=out, auto_refresh=False) as live:
    for piece in pieces:
      calls += 1
      for kind, token in zip(piece.origins, piece.tokens, strict=True):
        runs.append((kind, decoder.push(token)))
      origins += piece.origins
      live.update(mark(runs, styled=out.is_terminal), refresh=out.is_terminal)
    if runs:  # what waited for more, such as half a character
      runs.append((runs[-1][0], decoder.text[decoder.ready :]))
      live.update(mark(runs, styled=out.is_terminal), refresh=out.is_terminal)
  if not out.is_terminal:  # rich.live ends the line on terminals only
    out.print()
  counts = ', '.join(f'{origins.count(k)} {k}' for k in KINDS)
  return (
    f'{len(origins)} tokens in {calls} passes: block efficiency '
    f'{metrics.ratio(len(origins), calls):.2f} ({counts})'
  )
