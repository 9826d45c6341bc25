"""The certificate: every promise, the figure it reached, its bound."""

import pathlib
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import jax
import rich.console

from specdec_jax import runtime
from specdec_jax.bench import machine, tables
from specdec_jax.certify import (
  base,
  counted,
  draws,
  enumerated,
  identity,
  invariance,
  kernel,
)
from specdec_jax.io import files

PROMISES = (
  base.Promise(
    'window-law',
    'one window: exact law of each rule, by injected noise',
    enumerated.window_law,
    quick=2000,
    full=10_000,
    of=('rule',),
  ),
  base.Promise(
    'coupled-identity',
    'one window: a coupled rule says what plain sampling says',
    enumerated.coupled_identity,
    quick=10_000,
    full=1_000_000,
    of=('rule',),
  ),
  base.Promise(
    'windows-enumerated',
    'three windows: joint law by every outcome of every draw',
    enumerated.enumerated_windows,
    quick=3,
    full=3,
    of=('rule', 'drafter'),
  ),
  base.Promise(
    'joint-law-tables',
    'three windows: joint law with the production keys, table models',
    counted.joint_law_of_tables,
    quick=counted.QUICK_TABLES,
    full=2**24,
    of=('rule', 'drafter'),
  ),
  base.Promise(
    'joint-law-transformer',
    'three windows: joint law of a transformer, ragged batches, EOS',
    counted.joint_law_of_transformer,
    quick=counted.QUICK_TRANSFORMER,
    full=2**22,
    of=('rule', 'drafter', 'model'),
  ),
  base.Promise(
    'kernel-law',
    'two windows: every draw on peaked laws, and its independence',
    kernel.kernel_law,
    quick=2**20,
    full=2**26,
    of=('rule',),
  ),
  base.Promise(
    'one-draw',
    'one draw over 49,152 tokens with a flat tail of mass 0.01',
    draws.one_draw,
    quick=2**20,
    full=2**24,
    of=(),
  ),
  base.Promise(
    'greedy-identity',
    'greedy text in float64 and on tables, whatever drafts it',
    identity.greedy_identity,
    quick=identity.QUICK,
    full=1_000_000,
    of=('rule', 'drafter', 'model'),
  ),
  base.Promise(
    'audited-identity',
    'greedy and coupled text in float32 and bfloat16, audited',
    identity.audited_identity,
    quick=5_000,
    full=100_000,
    of=('rule', 'drafter', 'model'),
  ),
  base.Promise(
    'self-draft',
    'a draft that is the target has everything accepted',
    identity.self_draft,
    quick=50_000,
    full=1_000_000,
    of=('rule', 'drafter', 'model'),
  ),
  base.Promise(
    'invariance',
    'tokens do not depend on batch, row, padding, devices, gamma',
    invariance.invariance,
    quick=100,
    full=1_000,
    of=('rule', 'drafter', 'model'),
  ),
  base.Promise(
    'accounting',
    'emitted is counted; accepted lengths follow their law',
    invariance.accounting,
    quick=10_000,
    full=100_000,
    of=('rule', 'drafter'),
  ),
)


def choose(only: Sequence[str], own: Sequence[str]) -> list[base.Promise]:
  """The promises named by `only`, or all that concern what the user brought.

  Raises:
    ValueError: a name that no promise has.
  """
  names = [promise.name for promise in PROMISES]
  for name in only:
    if name not in names:
      raise ValueError(f'only={name!r}: allowed are {", ".join(names)}')
  if only:
    return [promise for promise in PROMISES if promise.name in only]
  return [p for p in PROMISES if not own or set(own) & set(p.of)]


def check(
  promise: base.Promise, subject: base.Subject, *, full: bool
) -> dict[str, Any]:
  """One promise as a row: its figure, or its failing case.

  held: None where there was nothing to check; case says why.
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
  # A process can hold some thousand compiled programs, then XLA aborts.
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

  Writes certificate.md and certificate.json into the folder. True if all held.
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
  console.print(
    f'[bold]Subject[/bold]  {_subject(doc)}\n',
    highlight=False,
  )
  for promise in runtime.track(chosen, 'promises'):
    row = check(promise, subject, full=full)
    doc['promises'].append(row)
    _print_row(row, console)
    conclude(doc)
    if folder:  # after every promise: a tier of hours may be cut short
      files.write(folder / 'certificate.json', runtime.compact(doc))
      files.write(folder / 'certificate.md', markdown(doc))
  tables.close(doc['verdict'], doc, console)
  return doc['held']


def conclude(doc: dict[str, Any]) -> None:
  """Adds held (false too if nothing could be checked) and the verdict."""
  kept = [row['held'] for row in doc['promises']]
  seconds = sum(row['seconds'] for row in doc['promises'])
  doc['held'] = True in kept and False not in kept
  skipped = f', {kept.count(None)} not checked' if None in kept else ''
  doc['verdict'] = [
    f'{kept.count(True)} of {len(kept)} promises hold{skipped} '
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
  for row in doc['promises']:
    mark = {True: 'holds', None: 'not checked', False: '**FAILS**'}
    cells = [row['text'], mark[row['held']]]
    if row['held']:
      cells += [row['reached'], row['bound'], row['size']]
    else:
      cells += [row['case'], '', '']
    cells.append(f'{row["seconds"]:.1f}')
    lines.append(
      '| '
      + ' | '.join(' '.join(x.replace('|', '\\|').split()) for x in cells)
      + ' |'
    )
  return '\n'.join([*lines, '', *doc['verdict']])
