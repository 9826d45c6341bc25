"""One static page of answers: who made each token, and what each call cost.

Everything is in the page; it loads nothing. Colours are from a set that
colour-blind readers tell apart, and every kind has an underline of its own.
"""

import base64
import collections
import hashlib
import itertools
import os
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from specdec_jax import sampling, types
from specdec_jax.analysis import output_file, record, show
from specdec_jax.analysis.record_style import SCRIPT, STYLE
from specdec_jax.bench import machine, metrics
from specdec_jax.io import files

_PAGE = string.Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 style-src '$style_hash'; script-src '$script_hash'">
<title>Who made each token</title><style>$style</style></head><body>
<header><h1>Who made each token</h1>
$headline$legend$settings$index</header>
<main>$answers</main>
<div id="panel" role="status" hidden></div>
<script>$script</script></body></html>""")

# Of the windows' drafts that are not in the text.
_REFUSED, _CUT = 'refused', 'cut'
_COLUMNS = ('#', 'token', 'id', 'made by', 'call') + (
  'p',
  'q',
  'entropy, bits',
  'instead of the draft',
)
_NONE = '\u2013'


def html(
  completions: Mapping[str, Any] | Sequence[Any],
  path: str | os.PathLike,
  *,
  command: str = '',
) -> None:
  """Writes the page of completions from specdec_jax.generate(record=True).

  Args:
    completions: the answers; by their titles, or a list.
    path: the file, which is written whole or not at all.
    command: how they were made, to be shown.

  Raises:
    ValueError: a path that cannot be written, no answer, or one without record.
  """
  file = output_file.check_writable('html', path)
  if not isinstance(completions, Mapping):
    completions = {f'Answer {i}': x for i, x in enumerate(completions)}
  if not completions or any(x.record is None for x in completions.values()):
    raise ValueError(
      'nothing to show: want one completion or more of '
      'generate(..., record=True)'
    )
  files.write(file, render(list(completions.items()), command))


def render(answers: Sequence[tuple[str, Any]], command: str = '') -> str:
  """The page; answers: (title, completion)."""
  settings = [x.record.setting for _, x in answers]
  one = all(x == settings[0] for x in settings)
  return _PAGE.substitute(
    style=STYLE,
    script=SCRIPT,
    style_hash=_sha256(STYLE),
    script_hash=_sha256(SCRIPT),
    headline=_headline([x for _, x in answers]),
    legend=_legend(),
    settings=_settings(settings[0] if one else {}, command),
    index=_index(answers) if len(answers) > 1 else '',
    answers=''.join(
      _answer(i, title, x, _rows({} if one else x.record.setting))
      for i, (title, x) in enumerate(answers)
    ),
  )


def _sha256(text: str) -> str:
  digest = hashlib.sha256(text.encode()).digest()
  return f'sha256-{base64.b64encode(digest).decode()}'


# --- text --------------------------------------------------------------------


def visible(text: str) -> str:
  """Escaped; what has no shape of its own gets a mark.

  Marks of white space come before it and are not selected, so that a copy is
  the text. Other control characters, and those that change the direction of
  what follows, are replaced by theirs.
  """
  return ''.join(map(_character, text))


def _character(c: str) -> str:
  mark = lambda text: f'<i class="m" aria-hidden="true">{text}</i>'
  if c in '\n\t':
    return mark({'\n': '\u23ce', '\t': '\u21e5'}[c]) + c
  # Joiners shape emoji and scripts, and harm nothing.
  shapeless = unicodedata.category(c) in ('Cc', 'Cf', 'Cs', 'Zl', 'Zp')
  if shapeless and c not in '\u200c\u200d':
    return f'<i class="c">U+{ord(c):04X}</i>'
  return escape(c)


def pieces(tokenizer, before: Sequence[int], ids: Sequence[int]) -> list[str]:
  """The text that each id adds to what comes before; '' inside a character.

  Together they are what all add, also where a later byte makes earlier ones
  no character, which a stream cannot take back.
  """
  text = lambda n: tokenizer.decode([*before, *ids[:n]], special=True)
  whole = text(len(ids))
  shared = lambda n: len(os.path.commonprefix([whole, text(n)]))
  ends = list(itertools.accumulate(map(shared, range(len(ids) + 1)), max))
  ends[-1] = len(whole)
  return [whole[a:b] for a, b in itertools.pairwise(ends)]


def _flat(shown: str) -> str:
  """Visible text on one line: the marks of new lines without these."""
  return shown.replace('</i>\n', '</i>')


def _token(text: str, kind: str, extra: str = '') -> str:
  inside = visible(text) or '<i class="m">\u25af</i>'
  return f'<span class="t {kind}"{extra}>{inside}</span>'


# --- head --------------------------------------------------------------------


def _headline(completions: Sequence[Any]) -> str:
  m = metrics.total(
    [metrics.Summary(**x.metrics) for x in completions]
  )._asdict()
  rate = m['draft_acceptance_rate']
  cards = {
    'tokens': m['emitted_tokens'],
    'target calls': m['target_calls'],
    'block efficiency': _number(m['block_efficiency']),
    'drafts proposed': m['drafted_tokens'],
    'drafts accepted': str(m['accepted_tokens'])
    + ('' if rate is None else f' ({rate:.0%})'),
  }
  items = (f'<li><b>{v}</b> {k}</li>' for k, v in cards.items())
  return f'<ul class="cards">{"".join(items)}</ul>'


def _legend() -> str:
  meanings = {kind: meaning for kind, (_, _, meaning) in show.KINDS.items()}
  meanings |= {
    _REFUSED: 'a draft that was refused, or came after one that was',
    _CUT: 'accepted, but past the end',
  }
  items = (
    f'<li>{_token("token", kind)} {escape(meaning)}</li>'
    for kind, meaning in meanings.items()
  )
  return (
    f'<ul class="legend">{"".join(items)}</ul><p class="hint">Point at a token,'
    ' or tab to a text and use the arrow keys, to see p, q and entropy; the '
    'same numbers are in the table below each text. \u23ce marks a new line, '
    '\u25af a part of a character.</p>'
  )


def _rows(values: dict[str, Any]) -> str:
  rows = (
    f'<dt>{escape(str(k))}</dt><dd>{visible(str(v))}</dd>'
    for k, v in values.items()
    if v not in (None, '')
  )
  return f'<dl>{"".join(rows)}</dl>' if values else ''


def _settings(setting: dict[str, Any], command: str) -> str:
  m = machine.describe()
  commit = m['commit'][:12] + ' + changes' * m['dirty']
  law = "under the run's sampling settings"
  if setting and setting['temperature'] < sampling.GREEDY_BELOW:
    law = 'at temperature 1, without cuts: the run is greedy'
  rows = _rows(
    setting
    | {'p, q, entropy': law, 'command': command, 'commit': commit}
    | {'jax': f'{m["jax"]}, {m["platform"]}, {m["cpu"]}'}
  )
  return f'<details open><summary>Settings</summary>{rows}</details>'


def _index(answers: Sequence[tuple[str, Any]]) -> str:
  rows = ''.join(
    f'<tr><td><a href="#a{i}">{visible(title)}</a></td>'
    f'<td>{x.metrics["emitted_tokens"]}</td>'
    f'<td>{x.metrics["target_calls"]}</td>'
    f'<td>{_number(x.metrics["block_efficiency"])}</td></tr>'
    for i, (title, x) in enumerate(answers)
  )
  head = _cells('th', ('answer', 'tokens', 'target calls', 'block efficiency'))
  return (
    f'<nav><div class="scroll"><table><thead><tr>{head}</tr></thead>'
    f'<tbody>{rows}</tbody></table></div></nav>'
  )


def _cells(tag: str, texts: Iterable[Any]) -> str:
  return ''.join(f'<{tag}>{x}</{tag}>' for x in texts)


def _number(x: float | None) -> str:
  return _NONE if x is None else f'{x:.2f}'


def _probability(x: float | None) -> str:
  return _NONE if x is None else f'{x:.3g}'


# --- an answer ---------------------------------------------------------------


def _answer(number: int, title: str, completion: Any, settings: str) -> str:
  t, m = completion.record, completion.metrics
  prompt = visible(t.tokenizer.decode(t.prompt, special=True))
  texts = _continued(t, 0, t.tokens)
  kept, kinds = len(completion.tokens), completion.origins
  tokens = ''.join(
    _token(
      text,
      kind,
      f' data-r="a{number}t{i}" tabindex="{-1 if i else 0}"',
    )
    for i, (text, kind) in enumerate(zip(texts, kinds, strict=False))
  )
  counts = collections.Counter(kinds)
  made = ', '.join(f'{counts[k]} {k}' for k in types.ORIGINS[1:] if counts[k])
  opened = ' open' if len(t.prompt) <= 200 else ''
  return (
    f'<section id="a{number}"><h2>{visible(title)}</h2>'
    f'<p>{kept} tokens in {m["target_calls"]} target calls: block efficiency '
    f'{_number(m["block_efficiency"])} ({made}). It ended by '
    f'{completion.finish_reason}.</p>{settings}'
    f'<details{opened}><summary>Prompt, {len(t.prompt)} tokens</summary>'
    f'<div class="text prompt">{prompt}</div></details>'
    f'<div class="text answer" role="group" aria-label="answer">{tokens}</div>'
    f'<details open><summary>Target calls, one after the other</summary>'
    f'{_calls(t, texts, kinds, kept)}</details>'
    f'<details><summary>Every token as a table</summary>'
    f'{_table(number, t, texts, kinds)}</details></section>'
  )


def _calls(t: record.Record, texts, kinds, kept: int) -> str:
  """The strip of accepted lengths, as Figure 1 of Leviathan et al. 2023.

  A line for each call: what was accepted, what was refused, what the target put
  in its place. Calls without a draft that follow each other share a line.
  """
  bars, lines, plain = [], [], []

  def close():
    if plain:
      text = ''.join(
        _token(texts[i], kinds[i] if i < kept else _CUT) for _, i in plain
      )
      first, last = plain[0][0], plain[-1][0]
      calls = f'{first}' if first == last else f'{first}\u2013{last}'
      lines.append((calls, 'no draft', text))
      plain.clear()

  for number, w in enumerate(t.windows, 1):
    taken = min(w.accepted, w.emitted)
    refused = len(w.draft) - w.accepted
    end = ['end' if w.draft else 'none'] * (w.emitted > taken)
    cut = [_CUT] * (w.accepted - taken)
    bars.append(['drafted'] * taken + cut + end + [_REFUSED] * refused)
    if not w.draft and w.emitted:
      plain.append((number, w.start))
      continue
    close()
    at = range(w.start, w.start + w.emitted)
    line = [_token(texts[i], kinds[i] if i < kept else _CUT) for i in at]
    rest = _continued(t, w.start + taken, w.draft[taken:])
    named = cut + [_REFUSED] * refused
    dead = [_token(*x) for x in zip(rest, named, strict=True)]
    line[taken:taken] = dead
    lines.append((number, f'{w.accepted} of {len(w.draft)}', ''.join(line)))
  close()
  bar = lambda cells: ''.join(f'<i class="{c}"></i>' for c in cells)
  drawn = ''.join(f'<span>{bar(cells)}</span>' for cells in bars)
  rows = ''.join(
    f'<li><span class="n">{a}</span><span class="n">{b}</span>'
    f'<span class="text">{_flat(c)}</span></li>'
    for a, b, c in lines
  )
  return (
    f'<div class="bars" aria-hidden="true">{drawn}</div><p class="hint">A '
    'column for each call: squares are drafts, full if accepted, and the dot '
    'is the target\'s own token.</p><ol class="calls">'
    '<li class="head"><span class="n">call</span><span class="n">accepted'
    f'</span><span>tokens</span></li>{rows}</ol>'
  )


def _continued(t: record.Record, index: int, ids: Sequence[int]) -> list[str]:
  """The text of ids in place of the tokens from an index on."""
  # A few tokens before are enough to know of a space or half a character.
  before = (t.prompt + t.tokens[:index])[-16:]
  return pieces(t.tokenizer, before, ids)


def _table(number: int, t: record.Record, texts, kinds) -> str:
  call = [n for n, w in enumerate(t.windows, 1) for _ in range(w.emitted)]
  certain = {n for n, w in enumerate(t.windows, 1) if w.draft and w.q is None}
  rows = []
  for i, kind in enumerate(kinds):
    sure = call[i] in certain
    q = _probability(t.q[i])
    instead = ''
    if t.refused[i] >= 0:
      (text,) = _continued(t, i, [t.refused[i]])
      refused_q = 'certain' if sure else _probability(t.refused_q[i])
      instead = (
        f'{_flat(_token(text, _REFUSED))} p {_probability(t.refused_p[i])}, '
        f'q {refused_q}'
      )
    cells = (
      i,
      _flat(_token(texts[i], kind)),
      t.tokens[i],
      kind,
      call[i],
      _probability(t.p[i]),
      'certain' if sure and kind == 'drafted' else q,
      f'{t.entropy[i]:.2f}',
      instead,
    )
    rows.append(f'<tr id="a{number}t{i}">{_cells("td", cells)}</tr>')
  return (
    f'<div class="scroll"><table><thead><tr>{_cells("th", _COLUMNS)}</tr>'
    f'</thead><tbody>{"".join(rows)}</tbody></table></div>'
  )
