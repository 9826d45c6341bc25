"""The certificate: every promise, its measured figure and its bound."""

import pathlib
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import jax
import rich.console

from specdec_jax import runtime
from specdec_jax.bench import machine, tables
from specdec_jax.certify import base, counted, enumerated, identity, invariance
from specdec_jax.io import files

PROMISES = (
  base.Promise(
    'window-distribution',
    'one window: exact distribution of each rule, by injected noise',
    enumerated.window_distribution,
    quick=2000,
    full=10_000,
    about=('rule',),
    seconds=8,
  ),
  base.Promise(
    'windows-enumerated',
    'three windows: joint distribution by every outcome of every draw',
    enumerated.windows_enumerated,
    quick=3,
    full=3,
    about=('rule', 'drafter'),
    seconds=9,
  ),
  base.Promise(
    'joint-distribution-tables',
    'three windows: joint distribution with the production keys, table models',
    counted.tables,
    quick=counted.QUICK_TABLES,
    full=2**23,
    about=('rule', 'drafter'),
    seconds=5,
  ),
  base.Promise(
    'joint-distribution-transformer',
    'three windows: joint distribution of a transformer, ragged batches, EOS',
    counted.transformer,
    quick=2**15,
    full=2**22,
    about=('rule', 'drafter', 'model'),
    seconds=9,
  ),
  base.Promise(
    'greedy-identity',
    'greedy text in float64 and on tables, whatever drafts it',
    identity.greedy_identity,
    quick=identity.QUICK,
    full=1_000_000,
    about=('rule', 'drafter', 'model'),
    seconds=14,
  ),
  base.Promise(
    'audited-identity',
    'greedy and coupled text in float32 and bfloat16, audited',
    identity.audited_identity,
    quick=2_000,
    full=100_000,
    about=('rule', 'drafter', 'model'),
    seconds=10,
  ),
  base.Promise(
    'invariance',
    'tokens do not depend on batch, row, padding or devices',
    invariance.invariance,
    quick=48,
    full=1_000,
    about=('rule', 'drafter', 'model'),
    seconds=12,
  ),
  base.Promise(
    'accounting',
    'emitted is counted: histograms, origins, ends',
    invariance.accounting,
    quick=10_000,
    full=100_000,
    about=('rule', 'drafter'),
    seconds=4,
  ),
)


def choose(only: Sequence[str], brought: Sequence[str]) -> list[base.Promise]:
  """The promises named in `only`, or all about the parts given by the user.

  Raises:
    ValueError: an unknown name.
  """
  names = [promise.name for promise in PROMISES]
  for name in only:
    if name not in names:
      raise ValueError(f'only={name!r}: allowed are {", ".join(names)}')
  if only:
    return [promise for promise in PROMISES if promise.name in only]
  return [x for x in PROMISES if not brought or set(brought) & set(x.about)]


def check(
  promise: base.Promise, subject: base.Subject, *, full: bool
) -> dict[str, Any]:
  """Checks one promise; returns a row with its figure or its failing case.

  held: None where the promise does not apply; `case` is the reason.
  """
  start = time.perf_counter()
  row: dict[str, Any] = dict(name=promise.name, text=promise.text, held=False)
  try:
    figure = promise.check(subject, promise.full if full else promise.quick)
    row |= dict(held=True) | figure._asdict()
  except base.NotChecked as why:
    row |= dict(held=None, case=str(why))
  except base.Broken as error:
    row['case'] = str(error)
  except Exception as error:  # a user's rule may raise anything
    row['case'] = f'raised {type(error).__name__}: {error}'
  # XLA aborts after some thousand compiled programs in one process.
  jax.clear_caches()
  return row | dict(seconds=time.perf_counter() - start)


def run(
  subject: base.Subject,
  chosen: Sequence[base.Promise],
  *,
  full: bool,
  folder: pathlib.Path | None,
) -> bool:
  """Checks and prints promise by promise; the last line is JSON.

  Writes certificate.md and certificate.json into `folder`, None for nowhere.
  Returns whether all promises held.
  """
  console = runtime.console()
  doc: dict[str, Any] = dict(
    tier='full' if full else 'quick',
    seed=subject.seed,
    rules=list(subject.rules),
    drafters=list(subject.drafters),
    machine=machine.describe(),
    promises=[],
  )
  if subject.model is not None:
    doc['model'] = subject.model.path
  tables.machine(doc['machine'], console)
  pairs = len(subject.pairs())
  minutes = max(1, round(sum(x.seconds for x in chosen) * pairs / 60))
  wait = 'hours' if full else f'about {minutes} min on two cores'
  console.print(
    f'[bold]Subject[/bold]  {_subject(doc)}\n'
    f'[bold]Takes[/bold]    {wait}: {len(chosen)} of {len(PROMISES)} promises, '
    f'{pairs} pairs of rule and drafter\n',
    highlight=False,
  )
  for promise in runtime.track(chosen, 'promises'):
    row = check(promise, subject, full=full)
    doc['promises'].append(row)
    _print_row(row, console)
    conclude(doc)
    if folder:  # after every promise: the full tier may be interrupted
      files.write(folder / 'certificate.json', runtime.compact(doc))
      files.write(folder / 'certificate.md', markdown(doc))
  tables.close(doc['verdict'], doc, console)
  return doc['held']


def conclude(doc: dict[str, Any]) -> None:
  """Adds 'held' (false if nothing was checked) and the verdict to doc."""
  held = [row['held'] for row in doc['promises']]
  seconds = sum(row['seconds'] for row in doc['promises'])
  doc['held'] = True in held and False not in held
  skipped = f', {held.count(None)} not checked' if None in held else ''
  doc['verdict'] = [
    f'{held.count(True)} of {len(held)} promises hold{skipped} '
    f'({seconds:.0f} s).'
  ]


def _subject(doc: dict[str, Any]) -> str:
  model = f'model {doc["model"]}; ' if 'model' in doc else ''
  return (
    f'{model}rules {", ".join(doc["rules"])}; drafters '
    f'{", ".join(doc["drafters"])}; {doc["tier"]} tier, seed {doc["seed"]}'
  )


def _print_row(row: dict[str, Any], console: rich.console.Console) -> None:
  mark = {
    True: '[green]holds[/green]',
    None: 'not checked',
    False: '[red]FAILS[/red]',
  }[row['held']]
  console.print(
    f'{mark}  [bold]{row["name"]}[/bold]: {row["text"]} '
    f'({row["seconds"]:.1f} s)',
    highlight=False,
  )
  lines = [row.get('case', '')]
  if row['held']:
    lines = [f'{row["reached"]}  (bound {row["bound"]})', row['size']]
  for line in lines:
    console.print(
      textwrap.indent(textwrap.fill(line, console.width - 9), ' ' * 7),
      highlight=False,
      markup=False,
    )


def markdown(doc: dict[str, Any]) -> str:
  """The certificate as a Markdown page."""
  m = doc['machine']
  lines = [
    '# Certificate of exactness',
    '',
    f'Subject: {_subject(doc)}. {machine.made_by(m["commit"], m["dirty"])}, '
    f'{m["cpu"]}, {m["cores"]} cores, {m["platform"]}, '
    f'Python {m["python"]}, jax {m["jax"]}.',
    '',
    '| promise | | reached | bound | tried | seconds |',
    '|---|---|---|---|---|---|',
  ]
  mark = {True: 'holds', None: 'not checked', False: '**FAILS**'}
  for row in doc['promises']:
    figure = [row.get('case', ''), '', '']
    if row['held']:
      figure = [row['reached'], row['bound'], row['size']]
    cells = [row['text'], mark[row['held']], *figure, f'{row["seconds"]:.1f}']
    cells = [' '.join(x.replace('|', '\\|').split()) for x in cells]
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, '', *doc['verdict']])
