"""The audit's document as tables and sentences, on stdout and in files."""

import io
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.console
import rich.markup

from specdec_jax import runtime
from specdec_jax.bench import audit, report, tables, verdict
from specdec_jax.io import files

# Markup of the verdicts; what a terminal shows in red.
_SHOWN = {'tie': 'tie', 'BUG': '[red]BUG[/red]'}


def finish(doc: dict[str, Any], folder: pathlib.Path | None) -> bool:
  """Prints everything, the JSON last, and saves it; true if nothing is wrong.

  Adds the verdict to the document. Into the folder: audit.json and audit.md.
  """
  doc['verdict'] = sentences(doc)
  console = runtime.console()
  tables.machine(doc, console)
  tables.setting(doc, console)
  console.print()
  _tables(doc, console, rich.box.SIMPLE_HEAD)
  report.close(doc, console)
  if folder:
    files.write(folder / 'audit.json', runtime.compact(doc))
    files.write(folder / 'audit.md', markdown(doc))
  return verdict.sound(_named(doc))


def markdown(doc: dict[str, Any]) -> str:
  """The tables and the verdict without colours."""
  file = io.StringIO()
  console = rich.console.Console(file=file, width=400, color_system=None)
  console.print('# Audit against plain decoding\n')
  console.print('```')
  tables.machine(doc, console)
  tables.setting(doc, console)
  console.print('```\n')
  _tables(doc, console, rich.box.MARKDOWN)
  console.print('\n' + '\n\n'.join(doc['verdict']), highlight=False)
  lines = file.getvalue().splitlines()
  return '\n'.join(line.rstrip() for line in lines)


def sentences(doc: dict[str, Any]) -> list[str]:
  """What failed, the counts in one line, and what they do not show."""
  t = doc['total']
  bugs = f'[red]{t["bugs"]} BUG[/red]' if t['bugs'] else '0 BUG'
  rate = t['per_1000_tokens']
  ties = '1 tie' if t['ties'] == 1 else f'{t["ties"]} ties'
  out = verdict.failures(_named(doc))
  out.append(
    f'{t["texts"]} texts, {t["tokens"]} tokens compared: {t["identical"]} '
    f'identical, {ties}, {bugs}; first divergences per 1,000 tokens: '
    f'{"-" if rate is None else f"{rate:.2f}"}, unexplained ones at most '
    f'{t["bugs_at_most"]:.2f} (95 %, taking tokens as independent).'
  )
  out += [
    f'{row["name"]} had no draft accepted: its texts test little.'
    for row in doc['rows']
    if row['gamma'] and not row['accepted_tokens']
  ]
  return out


def _named(doc) -> list[tuple[str, dict[str, Any]]]:
  return [(row['name'], row) for row in doc['rows']]


def _tables(doc, console, box: rich.box.Box) -> None:
  summary = tables.new_table(
    'Texts against plain decoding',
    'method',
    'texts',
    'tokens',
    'drafts accepted',
    'identical',
    'tie',
    'BUG',
    'failed',
    box=box,
  )
  for row in doc['rows']:
    a = row['audit']
    counts = ['-'] * 3
    if a:
      counts = [a['requests'] - a['differing'], a['ties'], a['bugs']]
    summary.add_row(
      row['name'],
      str(a['requests'] if a else doc['rows'][1]['audit']['requests']),
      str(a['tokens'] if a else row['emitted_tokens']),
      f'{row["accepted_tokens"]} of {row["drafted_tokens"]}' if a else '-',
      *map(str, counts),
      str(len(row['broken'])),
    )
  console.print(summary)
  found = [(r['name'], x) for r in doc['rows'] for x in _findings(r)]
  if found:
    console.print(_divergences(found, box))
    console.print(
      f'A tie: the gap is at most {audit.FACTOR} times the noise. Gap: what '
      'logits must move by for either token to win. Noise: what they move by '
      'between passes of one token and of a window, or one rounding.',
      highlight=False,
    )


def _findings(row) -> list[dict[str, Any]]:
  return row['audit']['findings'] if row['audit'] else []


def _divergences(found: Sequence[tuple[str, dict]], box):
  """A row each; long ids and tokens are cut."""
  out = tables.new_table(
    'First divergences',
    'prompt',
    'method',
    'at',
    'plain',
    'other',
    'gap',
    'noise',
    'gap/noise',
    'verdict',
    box=box,
  )
  out.add_column('reason', justify='left', overflow='fold')
  for name, x in found:
    over = x['gap'] / x['noise'] if x['gap'] and x['noise'] else None
    out.add_row(
      rich.markup.escape(_cut(x['id'], 20)),
      name,
      str(x['position']),
      _token(x['plain'], x['plain_text']),
      _token(x['other'], x['other_text']),
      *(map(_small, (x['gap'], x['noise'], over))),
      _SHOWN[x['verdict']],
      x['reason'],
    )
  return out


def _token(token: int | None, text: str | None) -> str:
  if token is None or text is None:
    return '-'
  return rich.markup.escape(f'{token} {_cut(repr(text), 12)}')


def _cut(text: str, size: int) -> str:
  return text if len(text) <= size else f'{text[: size - 2]}..'


def _small(x: float | None) -> str:
  return '-' if x is None else f'{x:.2g}'
