"""Pages of the experiments: tables, what made them, results beside a README."""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax import machine, printing
from specdec_jax.bench import intervals, verdict
from specdec_jax.io import files

# Pages, what a run writes, and tests: no number depends on them, so that they
# are not counted as changes of the code.
WRITTEN = (':!*.md', ':!experiments/*/results/*', ':!tests')
MARKS = '<!-- filled by run.sh -->', '<!-- end -->'


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
  """The lines of a table."""
  every = [head, ['---'] * len(head), *rows]
  return ['| ' + ' | '.join(map(str, row)) + ' |' for row in every]


class Part(NamedTuple):
  """A table of a page, below what it says of itself.

  columns: such as 'draft, T=temperature:g, plain=quality.0, speed:.2fx': the
    path of a value in a row, after its head if that is another word, and before
    the format of the number (of all three numbers of an interval).
  """

  about: str
  columns: str
  rows: Sequence[Any]


def lines(part: Part) -> list[str]:
  """The lines of a part, and an empty one."""
  columns = []
  for column in part.columns.split(', '):
    named, _, form = column.partition(':')
    head, _, path = named.rpartition('=')
    times = form.endswith('x')
    form = f'{{:{form.removesuffix("x")}}}' + 'x' * times
    columns.append((head or path, path, form))
  rows = [
    [_shown(_at(row, path), form) for _, path, form in columns]
    for row in part.rows
  ]
  return [part.about, '', *table([x for x, *_ in columns], rows), '']


def _at(found: Any, path: str) -> Any:
  """What stands at a path such as quality.0."""
  for name in path.split('.'):
    if isinstance(found, Mapping):
      found = found[name]
    elif name.isdigit():
      found = found[int(name)]
    else:
      found = getattr(found, name)
  return found


def _shown(found: Any, form: str) -> str:
  """A cell; '-' where there is nothing."""
  if isinstance(found, Mapping):
    found = intervals.Interval(**found)
  if isinstance(found, intervals.Interval):
    return interval(found, form)
  return '-' if found is None else form.format(found)


def interval(x: intervals.Interval, form: str = '{:.2f}') -> str:
  """0.61 (0.59 to 0.63), or 0.61 if its ends are not known."""
  show = form.format
  ends = '' if x.low is None else f' ({show(x.low)} to {show(x.high)})'
  return show(x.value) + ends


def refuted(row: Mapping[str, Any]) -> str:
  """' [parts: 0.86x]' where a benchmark's row is not what its parts explain."""
  measured, explained = row['improvement']['value'], row.get('explained')
  if not measured or not explained:
    return ''
  told = explained['improvement']
  contradicted = verdict.contradiction(measured, told)
  return f' [parts: {told:.2f}x]' if contradicted else ''


def plain(doc: Any) -> Any:
  """A document as its JSON is read."""
  return json.loads(printing.compact(doc))


def kept(known: Mapping[str, Any] | None, doc: Mapping[str, Any]) -> list:
  """The cells of an older document, if all else of it is as in doc."""
  same = lambda x: {name: x[name] for name in doc if name != 'cells'}
  if known and same(known) == plain(same(doc)):
    return known['cells']
  return []


def differing(audit: Mapping[str, Any], failed: int = 0) -> str:
  """What differs from plain decoding: '3 of 28: 2 tie 1 BUG', or what may."""
  told = {'distribution': 'same distribution', 'nothing': 'LOSSY'}
  parts = [told.get(audit['promised'], '')]
  if audit['promised'] == 'tokens':
    verdicts = [x['verdict'] for x in audit['findings']]
    parts = [f'{len(verdicts)} of {audit["requests"]}' + ':' * bool(verdicts)]
    parts += [f'{verdicts.count(x)} {x}' for x in dict.fromkeys(verdicts)]
  return ' '.join(parts + [f'{failed} FAILED'] * bool(failed))


def distance(alpha: Mapping[str, Any] | None) -> str:
  """Total variation between p and what is emitted; '' without alpha."""
  if not alpha:
    return ''
  away = alpha['total_variation']
  return 'unknown' if away is None else f'{away:.2g}'


def made_by() -> dict[str, Any]:
  """`commit` and `dirty` of machine.describe, of the code alone: WRITTEN."""
  commit, dirty = machine.commit(*WRITTEN)
  return {'commit': commit, 'dirty': dirty}


def made_on(m: dict[str, Any]) -> str:
  """The commit and the machine of machine.describe."""
  return (
    f'{machine.made_by(m["commit"], m["dirty"])}, {m["cores"]} cores, '
    f'{m["cpu"]}, {m["device"]}, jax {m["jax"]}.'
  )


def filled(page: str, lines: Sequence[str], name: str = '') -> str:
  """The page with these lines between its marks.

  Args:
    page: the text of a README.
    lines: to put there in place of what is there.
    name: of the block, on a page with several.

  Raises:
    ValueError: a page without the two marks.
  """
  first, last = (
    mark.replace(' -->', f' {name} -->') if name else mark for mark in MARKS
  )
  if any(page.count(mark) != 1 for mark in (first, last)):
    raise ValueError(f'a README needs each of {first} and {last} once')
  before, rest = page.split(first)
  return before + '\n'.join([first, '', *lines, '', last]) + rest.split(last)[1]


def fill(home: pathlib.Path, text: str, name: str = '') -> None:
  """Puts a text between the marks of the README.md of a folder."""
  readme = home / 'README.md'
  page = filled(readme.read_text('utf-8'), text.split('\n'), name)
  files.write(readme, page.removesuffix('\n'))


def save(
  folder: pathlib.Path | None,
  home: pathlib.Path,
  doc,
  text: str,
  name: str = '',
) -> None:
  """NAME.json beside what `write` writes; nothing without a folder."""
  if folder is not None:
    name = name or home.name
    files.write(folder / f'{name}.json', printing.compact(doc))
    write(folder, home, text, name)


def write(
  folder: pathlib.Path, home: pathlib.Path, text: str, name: str = ''
) -> None:
  """Writes NAME.md of the experiment that lives in home.

  Fills the README too if the folder is the experiment's own, home/results.

  name: of the README's block, if it has several; else the experiment's.
  """
  name = name or home.name
  files.write(folder / f'{name}.md', text)
  if folder.resolve() == home.resolve() / 'results':
    fill(home, text, '' if name == home.name else name)
