"""Pages for experiments: tables, what made them, results beside a README."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax import machine, printing
from specdec_jax.bench import intervals, records, tables, verdict
from specdec_jax.io import files

# Pages, what a run writes, and tests: no number depends on them, so that they
# are not counted as changes of the code.
WRITTEN = (':!*.md', ':!experiments/*/results/*', ':!tests')
MARKS = '<!-- filled by run.sh -->', '<!-- end -->'


class Part(NamedTuple):
  """A page's table, below a text; columns: as for tables.columns."""

  about: str
  columns: str
  rows: Sequence[Any]


def text(*parts: Part) -> str:
  """Writes parts one below the other."""
  return '\n\n'.join(
    '\n'.join(
      [x.about, '', *tables.markdown(x.rows, tables.columns(x.columns))]
    )
    for x in parts
  )


def near(gain: intervals.Interval) -> str:
  """Returns '~' where an interval holds 1 or is not known, else ''."""
  return '~' * (gain.outcome not in ('win', 'loss'))


def asked(q: Mapping[str, Any]) -> str:
  """Writes '16 questions of question.jsonl (sha256 119565adbab8)'."""
  return (
    f'{q["questions"]} questions of {q["file"]} (sha256 {q["sha256"][:12]})'
  )


def refuted(row: Mapping[str, Any]) -> str:
  """Writes ' [parts: 0.86x]' where a row is not what its parts explain."""
  measured, explained = row['improvement']['value'], row.get('explained')
  if not measured or not explained:
    return ''
  told = explained['improvement']
  contradicted = verdict.contradiction(measured, told)
  return f' [parts: {told:.2f}x]' if contradicted else ''


def plain(doc: Any) -> Any:
  """Returns a document as its JSON is read."""
  return json.loads(printing.compact(doc))


def kept(known: Mapping[str, Any] | None, doc: Mapping[str, Any]) -> list:
  """Returns an older document's cells if all else is as in doc."""
  same = lambda x: {name: x[name] for name in doc if name != 'cells'}
  if known and same(known) == plain(same(doc)):
    return known['cells']
  return []


def differing(audit: Mapping[str, Any], failed: int = 0) -> str:
  """Writes tables.identity for an audit as its JSON is read."""
  found = tuple(records.Finding(**x) for x in audit['findings'])
  given = records.Audit(**{**audit, 'findings': found})
  return tables.identity([given], failed=failed)


def away(alpha: Mapping[str, Any] | None) -> str:
  """Writes records.Alpha.away; older results have other fields beside it."""
  return records.Alpha(None, (alpha or {}).get('total_variation')).away


def made_here() -> dict[str, Any]:
  """Returns machine.describe(), with `commit` and `dirty` without WRITTEN."""
  commit, dirty = machine.commit(*WRITTEN)
  return machine.describe() | {'commit': commit, 'dirty': dirty}


def made_on(m: dict[str, Any]) -> str:
  """Writes machine.describe's commit and machine."""
  return (
    f'{machine.made_by(m["commit"], m["dirty"])}, {m["cores"]} cores, '
    f'{m["cpu"]}, {m["device"]}, jax {m["jax"]}.'
  )


def filled(page: str, lines: Sequence[str], name: str = '') -> str:
  """Replaces the lines between a page's marks.

  page: a README's text. name: the block's, on a page with several. Raises
  ValueError for a page without the two marks.
  """
  first, last = (
    mark.replace(' -->', f' {name} -->') if name else mark for mark in MARKS
  )
  if any(page.count(mark) != 1 for mark in (first, last)):
    raise ValueError(f'a README needs each of {first} and {last} once')
  before, rest = page.split(first)
  return before + '\n'.join([first, '', *lines, '', last]) + rest.split(last)[1]


def fill(readme: pathlib.Path, text: str, name: str = '') -> None:
  """Puts a text between the marks of a page."""
  page = filled(readme.read_text('utf-8'), text.split('\n'), name)
  files.write(readme, page.removesuffix('\n'))


def save(
  folder: pathlib.Path | None,
  home: pathlib.Path,
  doc,
  text: str,
  name: str = '',
  picture: bytes = b'',
) -> None:
  """Writes NAME.json and NAME.png beside what `write` does, into a folder."""
  if folder is not None:
    name = name or home.name
    files.write(folder / f'{name}.json', printing.compact(doc))
    if picture:
      files.write(folder / f'{name}.png', picture)
    write(folder, home, text, name)


def write(
  folder: pathlib.Path,
  home: pathlib.Path,
  text: str,
  name: str = '',
  outcome: str = '',
) -> None:
  """Writes NAME.md for the experiment that lives in home.

  Fills the README too if the folder is the experiment's own, home/results.

  text: the README's block. name: that block's, if it has several; else the
  experiment's. outcome: what stands above it, in a block of that name.
  """
  name = name or home.name
  beside = outcome.replace('](results/', '](') + '\n\n' * bool(outcome)
  files.write(folder / f'{name}.md', beside + text)
  if folder.resolve() == home.resolve() / 'results':
    readme = home / 'README.md'
    fill(readme, text, '' if name == home.name else name)
    if outcome:
      fill(readme, outcome, 'outcome')
