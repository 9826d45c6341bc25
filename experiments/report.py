"""One page of all empirical tables, from what is stored alone."""

import base64
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jinja2
import markdown_it

from experiments import claims as claims_lib
from experiments import empirical, page
from experiments import rows as rows_lib
from specdec_jax import program
from specdec_jax.io import files

_ROOT = pathlib.Path(__file__).parents[1]
_TEMPLATE = pathlib.Path(__file__).with_name('report.html')
# Those of the README.
_BRIEF = {
  'leviathan_table2',
  'leviathan_table3',
  'leviathan_table5',
  'block_verification_table1',
}


class Section(NamedTuple):
  """An experiment: its README's title and claim, and its page.

  page: None if nothing is stored; text then says how to run it.
  figures: PNGs.
  """

  name: str
  title: str
  claim: str
  text: str
  page: empirical.Page | None
  figures: list[bytes]


def run(tables: Sequence[empirical.Table]) -> bool:
  """Writes report.md and report.html; of the experiments' own results, the
  README's tables too.

  Raises:
    ValueError: results of several commits, or none.
  """
  output, folders = empirical.folders_of(tables)
  program.open_workdir(str(output))
  found = sections(tables, folders, [empirical.rows(x) for x in tables])
  files.write(output / 'report.md', markdown(found))
  files.write(output / 'report.html', html(found))
  if output == _ROOT / 'results':
    page.fill(_ROOT, brief(found), 'tables')
  print(summary(found), f'{output}/report.md and report.html', sep='\n\n')
  return True


def sections(
  tables: Sequence[empirical.Table],
  folders: Sequence[pathlib.Path],
  every: Sequence[Mapping[str, rows_lib.Row]],
) -> list[Section]:
  """A Section of each table; every: the rows of each.

  Raises:
    ValueError: results of several commits, or none at all.
  """
  given = zip(tables, folders, every, strict=True)
  found = [_section(*x) for x in given]
  commits = {x.name: x.page.commit for x in found if x.page}
  if not commits:
    raise ValueError(
      f'{folders[0].parent}: no results of any table; run one first, or '
      'bash experiments/run_all.sh --empirical'
    )
  if len(set(commits.values())) > 1:
    told = ', '.join(f'{name} of {c[:12]}' for name, c in commits.items())
    raise ValueError(
      f'results of several commits, {told}: run the older tables again'
    )
  return found


def _section(table: empirical.Table, folder: pathlib.Path, every) -> Section:
  name, head = table.home.name, (table.home / 'README.md').read_text('utf-8')
  title, claim = head.split('\n\n')[:2]
  about = name, title.removeprefix('# '), claim.removeprefix('**Claim.** ')
  if not empirical.stored(folder, every):
    text = f'Not run: `bash experiments/{name}/run.sh`.'
    return Section(*about, text, None, [])
  made = empirical.rendered(table, folder, every)
  figures = [claims_lib.figure(made.claims)] if made.claims else []
  figures += [table.figure(made.cells)] if table.figure else []
  return Section(*about, made.text, made, figures)


def summary(found: Sequence[Section]) -> str:
  """What made them, and for each table what became of the paper's cells."""
  (caption, *_), lines = [x.page.caption for x in found if x.page], []
  for x in found:
    told = 'not run'
    if x.page:
      told = "none of the paper's rows was run"
      if x.page.claims:
        told = claims_lib.counted(x.page.claims)
    lines.append([x.name, x.title, told])
  head = ['experiment', '', "the paper's cells"]
  return '\n'.join([caption, '', *page.table(head, lines)])


def brief(found: Sequence[Section]) -> str:
  """Small tables for the README: what the paper prints, and ours."""
  (caption, *_), parts = [x.page.caption for x in found if x.page], []
  for x in found:
    if x.name in _BRIEF and x.page and x.page.claims:
      link = f'[{x.title}](experiments/{x.name}/README.md), theirs / ours'
      parts.append('\n'.join([f'{link}:', '', *_pivot(x.page.claims)]))
  return '\n\n'.join([*parts, caption])


def _pivot(every: Sequence[claims_lib.Claim]) -> list[str]:
  """A line for each draft; what a cell's name ends with is its column."""
  cells: dict[tuple[str, str], dict[str, str]] = {}
  for x in every:
    line, _, column = x.cell.rpartition(', ')
    told = f'{x.prints} / {claims_lib.value(x)}'
    cells.setdefault((line, x.place), {})[column] = told
  columns = list(dict.fromkeys(x for line in cells.values() for x in line))
  return page.table(
    ['the paper', 'ours', *columns],
    [
      [*names, *(line.get(x, '') for x in columns)]
      for names, line in cells.items()
    ],
  )


def markdown(found: Sequence[Section]) -> str:
  parts = ["# The papers' empirical tables", summary(found)]
  for x in found:
    parts += [f'## {x.title}', x.claim, x.text]
  return '\n\n'.join(parts)


def html(found: Sequence[Section]) -> str:
  """A page that loads nothing: figures are inside it."""
  parser = markdown_it.MarkdownIt('commonmark', {'html': False})
  show = parser.enable('table').render
  made = [
    x._asdict()
    | {'claim': show(x.claim), 'text': show(x.text)}
    | {'figures': [base64.b64encode(y).decode() for y in x.figures]}
    for x in found
  ]
  environment = jinja2.Environment(
    autoescape=True, undefined=jinja2.StrictUndefined
  )
  template = environment.from_string(_TEMPLATE.read_text('utf-8'))
  return template.render(sections=made, summary=show(summary(found)))
