"""Shows replies with the origin of each token: in a terminal, and in a page."""

import itertools
import json
import math
import operator
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rich.console
import rich.live
import rich.text

from specdec_jax import machine, metrics
from specdec_jax.io import files

# Origin: (style, marks for output without styles, meaning). No style is colour
# alone: NO_COLOR removes colours, and not every reader sees them.
KINDS = {
  'drafted': ('bold green', '[]', 'drafted and accepted'),
  'recovered': ('underline red', '<>', 'recovered: replaces a wrong draft'),
  'bonus': ('italic cyan', '{}', 'bonus: one more, all drafts were right'),
  'plain': ('', '', 'plain: nothing was drafted, one pass for one token'),
}
PAGE = pathlib.Path(__file__).parent / 'serve' / 'page.html'
_WINDOW = 'tokens', 'origins', 'texts', 'entropies', 'refused', 'q'
_COUNTS = 'emitted_tokens', 'target_calls', 'drafted_tokens', 'accepted_tokens'


# --- a terminal --------------------------------------------------------------


def legend(out: rich.console.Console) -> None:
  """Prints a line for each kind of token, marked as in replies."""
  for kind, (_, _, meaning) in KINDS.items():
    line = mark([(kind, meaning)], styled=out.is_terminal)
    out.print(rich.text.Text('  ').append_text(line))


def mark(runs: Iterable[tuple[str, str]], *, styled: bool) -> rich.text.Text:
  """Joins (origin, text) pairs; runs of equal origin share marks."""
  out = rich.text.Text()
  seen = (x for x in runs if x[1])  # no end of sequence, or half a character
  for kind, run in itertools.groupby(seen, operator.itemgetter(0)):
    style, marks, _ = KINDS[kind]
    text = ''.join(x for _, x in run)
    if styled:
      out.append(text, style)
    else:
      out.append(marks[:1] + text + marks[1:])
  return out


def reply(out: rich.console.Console, pieces: Iterable[Any]) -> str:
  """Prints the pieces of api.stream, a pass each; returns their counts."""
  runs, calls = [], 0
  waiting = rich.text.Text('compiling', style='dim')
  with rich.live.Live(waiting, console=out, auto_refresh=False) as live:
    for piece in pieces:
      calls += 1
      runs += zip(piece.origins, piece.texts, strict=True)
      live.update(mark(runs, styled=out.is_terminal), refresh=out.is_terminal)
  if not out.is_terminal:  # rich.live ends the line on terminals only
    out.print()
  origins = [kind for kind, _ in runs]
  counts = ', '.join(f'{origins.count(k)} {k}' for k in KINDS)
  return (
    f'{len(origins)} tokens in {calls} passes: block efficiency '
    f'{metrics.ratio(len(origins), calls):.2f} ({counts})'
  )


# --- a page ------------------------------------------------------------------


def html(
  completions: Mapping[str, Any] | Sequence[Any],
  path: str | os.PathLike,
  *,
  command: str = '',
) -> None:
  """Writes a page of completions from specdec_jax.generate(record=True).

  completions: by title or as a list. command: what made them, for display.
    Raises ValueError for none, one without record, or a path not writable.
  """
  if not isinstance(completions, Mapping):
    completions = {f'Answer {i}': x for i, x in enumerate(completions)}
  if not completions or any(x.record is None for x in completions.values()):
    raise ValueError(
      'nothing to show: want one completion or more of '
      'generate(..., record=True)'
    )
  try:
    files.write(pathlib.Path(path), page(completions, command))
  except OSError as error:
    why = f'cannot be written ({error.strerror}): name another'
    raise ValueError(f'html {path}: {why}') from error


def page(completions: Mapping[str, Any], command: str = '') -> str:
  """Puts the answers into serve/page.html, whose script draws them."""
  setting = next(iter(completions.values())).record.setting
  made_by = machine.made_by(*machine.commit())
  record = {
    'setting': setting | {'command': command, 'commit': made_by},
    'answers': [_answer(title, x) for title, x in completions.items()],
  }
  # ASCII, and without a '<' that could end the element it stands in.
  text = json.dumps(record).replace('<', r'\u003c')
  return PAGE.read_text('utf-8').replace('>null<', f'>{text}<')


def _answer(title: str, x: Any) -> dict[str, Any]:
  """Returns what the page draws from a completion.Completion."""
  counts = {name: x.metrics[name] for name in _COUNTS}
  if len(x.record.windows) < x.metrics['target_calls']:
    # A stop string came: what was decoded after it is not drawn, nor counted.
    some = x.record.windows
    accepted = x.origins.count('drafted')
    drafted = accepted + sum(len(w.refused) for w in some)
    found = len(x.tokens), len(some), drafted, accepted
    counts = dict(zip(_COUNTS, found, strict=True))
  return {
    'title': title,
    'prompt': x.record.prompt,
    'windows': [
      {name: getattr(w, name) for name in _WINDOW}
      | {'p': [*map(math.exp, w.logprobs or [])]}
      for w in x.record.windows
    ],
    'counts': counts,
    'reason': x.finish_reason,
  }
