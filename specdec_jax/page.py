"""A static HTML page of answers: the origin of each token, and the calls.

page.html is the template; the page is self-contained and loads nothing.
"""

import itertools
import os
import pathlib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from specdec_jax import machine, show
from specdec_jax.io import files
from specdec_jax.io.tokens import stream

_TEMPLATE = pathlib.Path(__file__).with_name('page.html')
# Kinds of draft tokens that are not in the text.
_REFUSED, _CUT = 'refused', 'cut'


class Token(NamedTuple):
  """A token as the page shows it.

  text: '' inside a character of several tokens.
  kind: of types.ORIGINS, 'refused', or 'cut' (accepted, but past the end).
  numbers: its probabilities and entropy, in words.
  """

  text: str
  kind: str
  numbers: str = ''


def html(
  completions: Mapping[str, Any] | Sequence[Any],
  path: str | os.PathLike,
  *,
  command: str = '',
) -> None:
  """Writes the page of completions from specdec_jax.generate(record=True).

  Args:
    completions: the answers, by title or as a list.
    path: the file, written atomically.
    command: the command that made them, shown on the page.

  Raises:
    ValueError: a path that cannot be written, no answer, or one without record.
  """
  if not isinstance(completions, Mapping):
    completions = {f'Answer {i}': x for i, x in enumerate(completions)}
  if not completions or any(x.record is None for x in completions.values()):
    raise ValueError(
      'nothing to show: want one completion or more of '
      'generate(..., record=True)'
    )
  try:
    files.write(pathlib.Path(path), render(completions, command))
  except OSError as error:
    raise ValueError(
      f'html {path}: cannot be written ({error.strerror}): name another'
    ) from error


def render(completions: Mapping[str, Any], command: str = '') -> str:
  """The page, with its text escaped."""
  # Autoescape: prompts and answers are untrusted text.
  environment = jinja2.Environment(
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters['visible'] = visible
  total = lambda name: sum(x.metrics[name] for x in completions.values())
  return environment.from_string(_TEMPLATE.read_text('utf-8')).render(
    answers=[answer(title, x) for title, x in completions.items()],
    kinds={kind: meaning for kind, (_, _, meaning) in show.KINDS.items()},
    tokens=total('emitted_tokens'),
    calls=total('target_calls'),
    drafted=total('drafted_tokens'),
    accepted=total('accepted_tokens'),
    made={'command': command, 'commit': machine.made_by(*machine.commit())},
  )


def answer(title: str, completion: Any) -> dict[str, Any]:
  """The values of an api.Completion that the template shows."""
  t, kinds = completion.record, completion.origins
  texts = pieces(t.tokenizer, t.prompt, t.tokens)
  kinds = [*kinds, *[_CUT] * (len(texts) - len(kinds))]
  numbers = [_numbers(t, i) for i in range(len(texts))]
  tokens = list(map(Token, texts, kinds, numbers))
  return {
    'title': title,
    'prompt': t.tokenizer.decode(t.prompt, special=True),
    'tokens': tokens[: len(completion.tokens)],
    'calls': [call(t, w, tokens) for w in t.windows],
    'reason': completion.finish_reason,
    'metrics': completion.metrics,
    'setting': t.setting,
  }


def call(t: Any, w: Any, tokens: Sequence[Token]) -> dict[str, Any]:
  """A target call, with the drafts that are not in the text.

  Args:
    t: the record.Record.
    w: the record.Window of the call.
    tokens: of the whole answer.
  """
  taken = min(w.accepted, w.emitted)
  shown = list(tokens[w.start : w.start + w.emitted])
  before = t.prompt + t.tokens[: w.start + taken]
  lost = pieces(t.tokenizer, before, w.draft[taken:])
  kinds = [_CUT] * (w.accepted - taken)
  kinds += [_REFUSED] * (len(w.draft) - w.accepted)
  shown[taken:taken] = map(Token, lost, kinds)
  label = f'{w.accepted} of {len(w.draft)}' if w.draft else 'no draft'
  return {'label': label, 'tokens': shown}


def _numbers(t: Any, i: int) -> str:
  number = lambda x: 'none' if x is None else f'{x:.3g}'
  out = f'id {t.tokens[i]}: p {number(t.p[i])}, q {number(t.q[i])}, '
  out += f'entropy {t.entropy[i]:.2f} bits'
  if t.refused[i] >= 0:
    out += (
      f'; instead of id {t.refused[i]}: p {number(t.refused_p[i])}, '
      f'q {number(t.refused_q[i])}'
    )
  return out


def pieces(tokenizer, before: Sequence[int], ids: Sequence[int]) -> list[str]:
  """The text that each id adds to the text before; '' inside a character.

  Joined they equal the text of all ids, even where a later byte invalidates
  earlier ones, which a stream cannot take back.
  """
  # A few earlier tokens decide on a leading space or half a character, and a
  # run of bytes is decoded as a whole.
  begin, in_run = max(0, len(before) - 16), stream.run_bytes(tokenizer)
  while begin and before[begin] in in_run:
    begin -= 1
  before = [*before[begin:]]
  text = lambda n: tokenizer.decode([*before, *ids[:n]], special=True)
  end = text(len(ids))
  shared = lambda n: len(os.path.commonprefix([end, text(n)]))
  ends = list(itertools.accumulate(map(shared, range(len(ids) + 1)), max))
  ends[-1] = len(end)
  return [end[a:b] for a, b in itertools.pairwise(ends)]


def visible(text: str) -> str:
  """Text in which every character is visible.

  Newlines and tabs get a mark before them. Other control characters, and those
  that change the direction of text, are replaced by their code points.
  """
  return ''.join(map(_visible, text)) or '\u25af'


def _visible(c: str) -> str:
  if c in '\n\t':
    return {'\n': '\u23ce', '\t': '\u21e5'}[c] + c
  # Joiners stay: they shape emoji and scripts, and are harmless.
  shapeless = unicodedata.category(c) in ('Cc', 'Cf', 'Cs', 'Zl', 'Zp')
  return f'[U+{ord(c):04X}]' if shapeless and c not in '\u200c\u200d' else c
