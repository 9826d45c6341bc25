"""Writes each empirical table's page and the report, from what is stored."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import claims as claims_lib
from experiments import empirical, page
from experiments import loaded as loaded_lib
from experiments.rows import ROOT, Row, Rows
from specdec_jax import program
from specdec_jax.bench import tables
from specdec_jax.io import files


class Page(NamedTuple):
  """An experiment's page."""

  table: empirical.Table
  text: str  # if nothing is stored, how to run it
  outcome: str = ''  # what became of the paper's cells
  commit: str = ''  # that measured all of it
  claims: Sequence[claims_lib.Claim] = ()


def rendered(table: empirical.Table, folder: pathlib.Path, every: Rows) -> Page:
  """Makes the page for what is stored; ValueError for several commits."""
  found = empirical.stored(folder, every)
  run = f'bash experiments/{table.name}/run.sh'
  if not found:
    return Page(table, f'Not run: `{run}`.')
  commits = {name: x['machine']['commit'] for name, x in found.items()}
  if len(set(commits.values())) > 1:
    told = ', '.join(f'{n}.json of {c[:12]}' for n, c in commits.items())
    raise ValueError(
      f'{folder}: results of several commits, {told}: remove the older ones, '
      'and run again to measure them'
    )
  cells = {name: x['cells'] for name, x in found.items()}
  shown = {name: _shown(x, found.get(name)) for name, x in every.items()}
  claims = table.claims(cells, shown)
  why = f' {table.why[0].upper()}{table.why[1:]}.' if claims else ''
  picture = f'![Ours beside the paper](results/{table.name}.png)'
  quick = any(x['quick'] for x in found.values())
  warning = 'QUICK: tiny random models, which say nothing. ' * quick
  outcome = [warning + claims_lib.told(claims) + why, '']
  outcome += [picture, ''] if claims else []
  outcome += claims_lib.lines(claims)
  notes = '\n'.join(f'* {x}' for x in _notes(table, run, found, every))
  tables = page.text(*table.parts(cells, shown))
  text = '\n\n'.join([_caption(found), tables, notes]).rstrip('\n')
  top = '\n'.join(outcome).rstrip('\n')
  return Page(table, text, top, commits.popitem()[1], claims)


def write(found: Page, folder: pathlib.Path) -> None:
  """Writes a page, and its claims' picture."""
  name = found.table.name
  if found.claims:
    files.write(folder / f'{name}.png', claims_lib.figure(found.claims))
  page.write(folder, found.table.home, found.text, outcome=found.outcome)


def _caption(found: Mapping[str, Any]) -> str:
  """Says which commit and machine measured which rows."""
  made_on: dict[str, list[str]] = {}
  for name, x in found.items():
    made_on.setdefault(page.made_on(x['machine']), []).append(name)
  if len(made_on) == 1:
    return made_on.popitem()[0]
  return ' '.join(f'{", ".join(x)}: {made}' for made, x in made_on.items())


def _shown(row: Row, doc) -> Row:
  """Returns the row with stored results, a toy if its target fails its gate.

  Its drafts are those that were measured, wherever their models are now.
  """
  if not doc:
    return row
  names = {x.get('draft') for x in doc['cells']}
  drafts = tuple(x for x in row.drafts if x.name in names)
  failed = doc['gate'] and not loaded_lib.Gate(**doc['gate']).passed
  name = f'toy {row.name}' if failed else row.name
  return dataclasses.replace(row, name=name, drafts=drafts)


def _notes(
  table: empirical.Table, run: str, found: Mapping[str, Any], every: Rows
) -> list[str]:
  """Says what was not run, and whether the targets do their tasks."""
  out = []
  for name, row in every.items():
    if name not in found:
      trained = f'`{row.command}`, then ' if row.command else ''
      out.append(f'{name}: not run; {trained}`{run} --rows={name}`')
  if table.theirs:
    out.append(table.theirs.format(run=run))
  for name, doc in found.items():
    if doc['gate']:
      x = loaded_lib.Gate(**doc['gate'])
      least = f'{x.least:.1f}'
      if x.metric == 'bleu':
        least += f' and {loaded_lib.DISTINCT:.0%}'
      out.append(
        f'{name}: the target has {x.metric.upper()} {x.value:.1f} on {x.texts} '
        f'texts, {x.distinct:.0%} of its answers are distinct (a toy below '
        f'{least}).'
      )
  return out


# --- all of them --------------------------------------------------------------


def run(tables: Sequence[empirical.Table]) -> bool:
  """Writes report.md and README's summary; ValueError for several commits."""
  output, folders = empirical.folders_of(tables)
  program.open_workdir(str(output))
  found = pages(tables, folders, [empirical.rows(x) for x in tables])
  files.write(output / 'report.md', markdown(found))
  if output == ROOT / 'results':
    page.fill(ROOT / 'README.md', summary(found), 'tables')
  print(summary(found), f'{output}/report.md', sep='\n\n')
  return True


def pages(
  tables: Sequence[empirical.Table],
  folders: Sequence[pathlib.Path],
  every: Sequence[Rows],
) -> list[Page]:
  """Makes the tables' pages; ValueError for several commits, or no results."""
  found = [rendered(*x) for x in zip(tables, folders, every, strict=True)]
  commits = {x.table.name: x.commit for x in found if x.commit}
  if not commits:
    raise ValueError('no results of any table; run one without --render first')
  if len(set(commits.values())) > 1:
    told = ', '.join(f'{name} of {c[:12]}' for name, c in commits.items())
    raise ValueError(
      f'results of several commits, {told}: run the older tables again'
    )
  return found


def _heads(table: empirical.Table) -> tuple[str, str]:
  """Reads the title and the claim in an experiment's README."""
  title, claim = (table.home / 'README.md').read_text('utf-8').split('\n\n')[:2]
  return title.removeprefix('# '), claim.removeprefix('**Claim.** ')


def summary(found: Sequence[Page]) -> str:
  """Writes a line for each table: outcomes, and why."""
  outcomes = claims_lib.OUTCOMES[:4]
  lines = []
  for x in found:
    link = f'experiments/{x.table.name}/README.md'
    why = x.table.why if x.commit else 'not run'
    for of, counts in (claims_lib.counts(x.claims) or {'-': {}}).items():
      told = [counts.get(name, '-') for name in outcomes]
      lines.append([f'[{_heads(x.table)[0]}]({link})', of, *told, why])
      why = ''
  (commit,) = {x.commit[:7] for x in found if x.commit}
  what = f"the papers' tables, with models that run here (commit {commit})"
  return '\n'.join(tables.grid([what, 'of', *outcomes, 'why'], lines))


def markdown(found: Sequence[Page]) -> str:
  """Joins all pages, without their pictures."""
  parts = ["# The papers' empirical tables", summary(found)]
  for x in found:
    outcome = [y for y in x.outcome.split('\n\n') if y and y[0] != '!']
    title, claim = _heads(x.table)
    parts += [f'## {title}', claim, *outcome, x.text]
  return '\n\n'.join(parts)
