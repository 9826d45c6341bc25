"""The certificate: every promise, its measured figure and its bound."""

import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import rich.padding
import rich.text

from specdec_jax import decode, fields, machine, printing
from specdec_jax.bench import tables
from specdec_jax.certify import (
  base,
  counted,
  enumerated,
  hardware,
  identity,
  invariance,
  steps,
)
from specdec_jax.io import files


class Row(NamedTuple):
  """A checked promise, as certificate.json has it, with its base.Figure.

  passed: None where it does not apply. case: what failed, or why it does not.
  """

  name: str
  text: str
  passed: bool | None
  seconds: float
  reached: str = ''
  bound: str = ''
  size: str = ''
  case: str = ''


def encoder_decoder(subject: base.Subject, amount: int) -> base.Figure:
  """Checks the promises about models, where encoders read sources.

  The models are T5s, a target and a draft of different shapes, and tables that
  depend on the source too. Sources and prompts differ in length.

  amount: how many drafters; above 1 every rule of chains runs, else the first.
  """
  full = amount > 1
  if subject.model is not None:
    raise base.NotChecked('a model of your own is certified without sources')
  # eagle refuses an encoder by name.
  names = [x for x in subject.drafters if x not in ('eagle', base.TREE)]
  if not names:
    raise base.NotChecked('eagle drafts for decoders alone')
  subject = subject._replace(
    rules=subject.rules if full else subject.rules[:1],
    drafters={name: subject.drafters[name] for name in names[:amount]},
    encoder=True,
  )
  # Not the machine, the null check, and what knows no model; the last is this.
  parts = PROMISES[3:-1]
  # Reading sources is not what needs the amounts of the full tier.
  figures = _check_all(parts, subject, full=False)
  rules = ', '.join(rule.name for rule in subject.apart())
  return base.Figure(
    f'{len(figures)} of {len(parts)} promises hold',
    'theirs',
    '; '.join(
      [f'rules {rules}', f'drafters {", ".join(subject.drafters)}', *figures]
    ),
  )


# What counts texts, or compares them with plain decoding's.
COMPARING = (
  'joint-distribution-tables',
  'joint-distribution-transformer',
  'invariance',
)


def null_check(subject: base.Subject, amount: int) -> base.Figure:
  """Checks plain decoding in speculation's place; a failure is no rule's fault.

  amount: 1 takes the full tier's amounts; n takes 1/n of the quick tier's.
  """
  subject = subject._replace(
    rules=(base.PLAIN_RULE,),
    drafters={decode.PLAIN.name: lambda world, gamma: (decode.PLAIN, ())},
    supplied=(),
  )
  parts = [
    promise._replace(quick=max(1, promise.quick // amount))
    for promise in PROMISES
    if promise.name in COMPARING
  ]
  figures = _check_all(parts, subject, full=amount == 1)
  passed = f'{len(figures)} of {len(parts)} hold'
  if len(figures) < len(parts):
    raise base.Broken(passed)
  reached = f'{passed} of plain decoding against itself'
  return base.Figure(reached, 'theirs', '; '.join(figures))


def _check_all(promises, subject: base.Subject, *, full: bool) -> list[str]:
  """Lists promises' figures; raises base.Broken if one fails."""
  rows = []
  for promise in promises:
    rows.append(check(promise, subject, full=full))
    if rows[-1].passed is False:
      raise base.Broken(f'{promise.name}: {rows[-1].case}')
  return [f'{row.name} {row.reached}' for row in rows if row.passed]


# name, text, check; amounts of the quick and the full tier; seconds.
PROMISES = (
  base.Promise(
    'machine',
    'this machine computes as it should: products, chances, a window, a text',
    hardware.decodes_right, 40, 400, 2, about=()),
  base.Promise(
    'null-check',
    'plain decoding against plain decoding: the tests find nothing in it',
    null_check, 4, 1, 3),
  base.Promise(
    'window-distribution',
    'one window: exact distribution of each rule, by injected noise',
    enumerated.window_distribution, 2000, 10_000, 4, about=('rule',)),
  base.Promise(
    'windows-enumerated',
    'some windows: joint distribution by every outcome of every draw',
    enumerated.windows_enumerated, 3, 3, 8, about=('rule', 'drafter')),
  base.Promise(
    'long-rows',
    "every q is what was drawn from, every p the target's, to gamma 8",
    steps.long_rows, steps.QUICK, 288, 3, about=('rule', 'drafter')),
  base.Promise(
    'joint-distribution-tables',
    'some windows: joint distribution with the production keys, table models',
    counted.tables, counted.QUICK_TABLES, 2**20, 6, about=('rule', 'drafter')),
  base.Promise(
    'joint-distribution-transformer',
    'some windows: joint distribution of a transformer, ragged batches, EOS',
    counted.transformer, 2**15, 2**22, 6),
  base.Promise(
    'greedy-identity',
    'greedy text in float64 and on tables, whatever drafts it',
    identity.greedy_identity, identity.QUICK, 1_000_000, 9),
  base.Promise(
    'audited-identity',
    'greedy and coupled text in float32 and bfloat16, audited',
    # p and q are float32 whatever the model's dtype: for a rule or drafter of
    # the user's, the promises above say as much.
    identity.audited_identity, 2_000, 100_000, 10, about=('model',)),
  base.Promise(
    'kernel-identity',
    'greedy text on the CPU kernels: the same bits at every width and batch',
    identity.kernel_identity, 2_000, 100_000, 5, about=('drafter',)),
  base.Promise(
    'invariance',
    'tokens do not depend on batch, row, padding or devices',
    invariance.invariance, invariance.QUICK, 1_000, 12),
  base.Promise(
    'pool',
    'tokens do not depend on when a request is given which row of a pool',
    invariance.pooled, invariance.QUICK_POOL, 500, 5),
  base.Promise(
    'accounting',
    'emitted is counted: histograms, origins, ends',
    invariance.accounting, 10_000, 100_000, 3, about=('rule', 'drafter')),
  base.Promise(
    'encoder-decoder',
    'the promises about models, where encoders read sources',
    # A drafter of the user's need not read sources.
    encoder_decoder, 1, 99, 10, about=()),
)  # fmt: skip


def choose(only: Sequence[str], supplied: Sequence[str]) -> list[base.Promise]:
  """Picks the promises named in `only`, or all about the user's own parts."""
  names = [promise.name for promise in PROMISES]
  for name in only:
    if name not in names:
      raise ValueError(f'only={name!r}: {fields.choices(name, names)}')
  if only:
    return [promise for promise in PROMISES if promise.name in only]
  return [x for x in PROMISES if not supplied or set(supplied) & set(x.about)]


def check(promise: base.Promise, subject: base.Subject, *, full: bool) -> Row:
  """Checks one promise: its figure, or its failing case."""
  start, passed = time.perf_counter(), False
  figure, case = base.Figure('', '', ''), ''
  try:
    figure = promise.check(subject, promise.full if full else promise.quick)
    passed = True
  except base.NotChecked as why:
    passed, case = None, str(why)
  except base.Broken as error:
    case = str(error)
  except Exception as error:  # a user's rule may raise anything
    case = f'raised {type(error).__name__}: {error}'
  # XLA aborts after some thousand compiled programs in one process.
  jax.clear_caches()
  seconds = time.perf_counter() - start
  return Row(promise.name, promise.text, passed, seconds, *figure, case)


def rows(promises, subject: base.Subject, full: bool, console):
  """Checks promises, one at a time; prints and yields the row of each."""
  marks = {
    True: '[green]holds[/green]',
    None: 'not checked',
    False: '[red]FAILS[/red]',
  }
  for promise in printing.track(promises, 'promises'):
    row = check(promise, subject, full=full)
    console.print(
      f'{marks[row.passed]}  [bold]{row.name}[/bold]: {row.text} '
      f'({row.seconds:.1f} s)',
      highlight=False,
    )
    reached = [f'{row.reached}  (bound {row.bound})', row.size]
    for line in reached if row.passed else [row.case]:
      text = rich.text.Text(line)
      console.print(rich.padding.Padding(text, (0, 0, 0, 7), expand=False))
    yield row


def run(
  subject: base.Subject,
  chosen: Sequence[base.Promise],
  *,
  full: bool,
  folder: pathlib.Path | None,
) -> bool:
  """Checks and prints promise by promise; the last line is JSON.

  Writes certificate.md (what is printed) and certificate.json into `folder`,
  unless it is None. Returns whether no promise failed and some were checked.
  """
  console = printing.console()
  console.record = True
  about: dict[str, Any] = dict(
    tier='full' if full else 'quick',
    seed=subject.seed,
    rules=[rule.name for rule in subject.rules],
    drafters=list(subject.drafters),
    model=subject.model_path or None,
    machine=machine.describe(),
  )
  tables.machine(about['machine'], console)
  _print_head(about, chosen, len(subject.pairs()), console)
  done: list[Row] = []
  doc: dict[str, Any] = about
  for row in rows(chosen, subject, full, console):
    done.append(row)
    passed = [row.passed for row in done]
    skipped = f', {passed.count(None)} not checked' if None in passed else ''
    verdict = (
      f'{passed.count(True)} of {len(done)} promises hold{skipped} '
      f'({sum(row.seconds for row in done):.0f} s).'
    )
    holds = True in passed and False not in passed
    doc = {**about, 'promises': done, 'passed': holds, 'verdict': [verdict]}
    if folder:  # after every promise: the full tier may be interrupted
      files.write(folder / 'certificate.json', printing.compact(doc))
      page = f'{console.export_text(clear=False)}\n{verdict}'
      page = f'# Certificate of exactness\n\n```\n{page}\n```\n'
      files.write(folder / 'certificate.md', page)
  tables.close(doc['verdict'], doc, console)
  return doc['passed']


def _print_head(about: dict[str, Any], chosen, pairs: int, console) -> None:
  """Prints the subject, and how long its certificate takes."""
  model = f'model {about["model"]}; ' if about['model'] else ''
  minutes = math.ceil(sum(x.seconds for x in chosen) * pairs / 60)
  full = about['tier'] == 'full'
  wait = 'hours' if full else f'about {minutes} min on two cores'
  console.print(
    f'[bold]Subject[/bold]  {model}rules {", ".join(about["rules"])}; drafters '
    f'{", ".join(about["drafters"])}; {about["tier"]} tier, seed '
    f'{about["seed"]}\n'
    f'[bold]Takes[/bold]    {wait}: {len(chosen)} of {len(PROMISES)} promises, '
    f'{pairs} pairs of rule and drafter\n',
    highlight=False,
  )
