"""The certificate: every promise, its measured figure and its bound."""

import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import rich.console
import rich.padding
import rich.text

from specdec_jax import decode, machine, printing
from specdec_jax.bench import tables
from specdec_jax.certify import (
  base,
  counted,
  enumerated,
  identity,
  invariance,
  kernels,
  paths,
)
from specdec_jax.io import files


def encoder_decoder(subject: base.Subject, amount: int) -> base.Figure:
  """The promises about models, where encoders read sources.

  The models are T5s, a target and a draft of different shapes, and tables that
  depend on the source too. The lengths of sources and prompts differ.

  amount: how many drafters; the first rule with one, every rule with more.
  """
  full = amount > 1
  if subject.model is not None:
    raise base.NotChecked('a model of your own is certified without sources')
  # eagle refuses an encoder by name.
  names = [name for name in subject.drafters if name != 'eagle'][:amount]
  if not names:
    raise base.NotChecked('eagle drafts for decoders alone')
  subject = subject._replace(
    rules=subject.rules if full else subject.rules[:1],
    drafters={name: subject.drafters[name] for name in names},
    encoder=True,
  )
  rows = []
  # Not the null check; the next knows no model; the last is this.
  for promise in PROMISES[2:-1]:
    rows.append(check(promise, subject, full=full))
    if rows[-1]['held'] is False:
      raise base.Broken(f'{promise.name}: {rows[-1]["case"]}')
  held = [row for row in rows if row['held']]
  rules = ', '.join(rule.name for rule in subject.rules)
  return base.Figure(
    f'{len(held)} of {len(rows)} promises hold',
    'theirs',
    f'rules {rules}; drafters {", ".join(names)}; '
    + '; '.join(f'{row["name"]} {row["reached"]}' for row in held),
  )


# What counts texts, or compares them with plain decoding's.
COMPARING = (
  'joint-distribution-tables',
  'joint-distribution-transformer',
  'invariance',
)


def null_check(subject: base.Subject, amount: int) -> base.Figure:
  """Plain decoding in the place of speculative decoding: nothing may differ.

  What fails here is no fault of a rule or drafter.

  amount: 1 takes whole amounts of the full tier; more, that part of the quick
    tier's.
  """
  full = amount == 1
  subject = subject._replace(
    rules=(base.PLAIN_RULE,),
    drafters={decode.PLAIN.name: lambda world, gamma: (decode.PLAIN, ())},
    brought=(),
  )
  rows = []
  for promise in PROMISES:
    if promise.name in COMPARING:
      part = promise._replace(quick=max(1, promise.quick // amount))
      rows.append(check(part, subject, full=full))
      if rows[-1]['held'] is not True:
        raise base.Broken(f'{promise.name}: {rows[-1]["case"]}')
  return base.Figure(
    f'{len(rows)} of {len(rows)} hold of plain decoding against itself',
    'theirs',
    '; '.join(f'{row["name"]} {row["reached"]}' for row in rows),
  )


PROMISES = (
  base.Promise(
    'null-check',
    'plain decoding against plain decoding: the tests find nothing in it',
    null_check,
    quick=4, full=1, seconds=3,
  ),
  base.Promise(
    'window-distribution',
    'one window: exact distribution of each rule, by injected noise',
    enumerated.window_distribution,
    quick=2000, full=10_000, seconds=4, about=('rule',)
  ),
  base.Promise(
    'windows-enumerated',
    'some windows: joint distribution by every outcome of every draw',
    enumerated.windows_enumerated,
    quick=3, full=3, seconds=8, about=('rule', 'drafter')
  ),
  base.Promise(
    'long-rows',
    'every q is what was drawn from, every p the target\'s, to gamma 8',
    paths.long_rows,
    quick=paths.QUICK, full=288, seconds=3, about=('rule', 'drafter')
  ),
  base.Promise(
    'joint-distribution-tables',
    'some windows: joint distribution with the production keys, table models',
    counted.tables,
    quick=counted.QUICK_TABLES, full=2**23, seconds=6, about=('rule', 'drafter')
  ),
  base.Promise(
    'joint-distribution-transformer',
    'some windows: joint distribution of a transformer, ragged batches, EOS',
    counted.transformer,
    quick=2**15, full=2**22, seconds=6
  ),
  base.Promise(
    'greedy-identity',
    'greedy text in float64 and on tables, whatever drafts it',
    identity.greedy_identity,
    quick=identity.QUICK, full=1_000_000, seconds=9
  ),
  base.Promise(
    'audited-identity',
    'greedy and coupled text in float32 and bfloat16, audited',
    identity.audited_identity,
    quick=2_000, full=100_000, seconds=10,
    # p and q are float32 whatever the model's dtype: for a rule or drafter of
    # the user's, the promises above say as much.
    about=('model',),
  ),
  base.Promise(
    'kernel-identity',
    'greedy text on the CPU kernels: the same bits at every width and batch',
    kernels.kernel_identity,
    quick=2_000, full=100_000, seconds=5, about=('drafter',)
  ),
  base.Promise(
    'invariance',
    'tokens do not depend on batch, row, padding or devices',
    invariance.invariance,
    quick=invariance.QUICK, full=1_000, seconds=12
  ),
  base.Promise(
    'accounting',
    'emitted is counted: histograms, origins, ends',
    invariance.accounting,
    quick=10_000, full=100_000, seconds=3, about=('rule', 'drafter')
  ),
  base.Promise(
    'encoder-decoder',
    'the promises about models, where encoders read sources',
    encoder_decoder,
    quick=1, full=99, seconds=10,
    # A drafter of the user's need not read sources.
    about=(),
  ),
)  # fmt: skip


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

  Writes certificate.md (what is printed) and certificate.json into `folder`,
  None for nowhere. Returns whether no promise failed and some were checked.
  """
  console = printing.console()
  console.record = True
  doc: dict[str, Any] = dict(
    tier='full' if full else 'quick',
    seed=subject.seed,
    rules=[rule.name for rule in subject.rules],
    drafters=list(subject.drafters),
    model=subject.model_path or None,
    machine=machine.describe(),
    promises=[],
  )
  tables.machine(doc['machine'], console)
  _print_head(doc, chosen, len(subject.pairs()), console)
  for promise in printing.track(chosen, 'promises'):
    doc['promises'].append(check(promise, subject, full=full))
    show(doc['promises'][-1], console)
    held = [row['held'] for row in doc['promises']]
    seconds = sum(row['seconds'] for row in doc['promises'])
    skipped = f', {held.count(None)} not checked' if None in held else ''
    doc['held'] = True in held and False not in held
    doc['verdict'] = [
      f'{held.count(True)} of {len(held)} promises hold{skipped} '
      f'({seconds:.0f} s).'
    ]
    if folder:  # after every promise: the full tier may be interrupted
      files.write(folder / 'certificate.json', printing.compact(doc))
      page = '\n'.join([console.export_text(clear=False), *doc['verdict']])
      page = f'# Certificate of exactness\n\n```\n{page}\n```\n'
      files.write(folder / 'certificate.md', page)
  tables.close(doc['verdict'], doc, console)
  return doc['held']


def _print_head(doc, chosen, pairs: int, console) -> None:
  """The subject, and how long its certificate takes."""
  model = f'model {doc["model"]}; ' if doc['model'] else ''
  minutes = math.ceil(sum(x.seconds for x in chosen) * pairs / 60)
  full = doc['tier'] == 'full'
  wait = 'hours' if full else f'about {minutes} min on two cores'
  console.print(
    f'[bold]Subject[/bold]  {model}rules {", ".join(doc["rules"])}; drafters '
    f'{", ".join(doc["drafters"])}; {doc["tier"]} tier, seed {doc["seed"]}\n'
    f'[bold]Takes[/bold]    {wait}: {len(chosen)} of {len(PROMISES)} promises, '
    f'{pairs} pairs of rule and drafter\n',
    highlight=False,
  )


def show(row: dict[str, Any], console: rich.console.Console) -> None:
  """Prints a row of check."""
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
    text = rich.text.Text(line)
    console.print(rich.padding.Padding(text, (0, 0, 0, 7), expand=False))
