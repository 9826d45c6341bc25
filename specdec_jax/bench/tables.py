"""Prints a benchmark's results as tables and lines; computes no metrics. Lossy
methods show their total variation from the target beside every number."""

import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table

from specdec_jax import hosts, printing, program
from specdec_jax.bench import intervals, records
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.io import files

# Head; path from a row to a value, '' for the row itself; how it is written.
Column = tuple[str, str, str | Callable[[Any], str]]
Console = rich.console.Console


# --- columns -----------------------------------------------------------------


def columns(text: str) -> list[Column]:
  """Reads columns from a text such as 'draft, T=temperature:g, gain:.2fx'.

  Each has a head, if that is not the path, then the path to its value, such as
  quality.0, then a format for the number, or an interval's numbers.
  """
  out: list[Column] = []
  for column in text.split(', '):
    named, _, form = column.partition(':')
    head, _, path = named.rpartition('=')
    number = f'{{:{form.removesuffix("x")}}}' + 'x' * form.endswith('x')
    out.append((head or path, path, number))
  return out


def at(x: Any, path: str) -> Any:
  """Returns what stands at a path; None where something before it is None."""
  for name in path.split('.') if path else ():
    if isinstance(x, Mapping):
      x = x[name]
    elif x is not None:
      x = x[int(name)] if name.isdigit() else getattr(x, name)
  return x


def show(x: Any, form: str | Callable[[Any], str] = '{:.2f}') -> str:
  """Writes a value or an interval, also one read from JSON; '-' for None."""
  if x is None:
    return '-'
  if callable(form):
    return form(x)
  if isinstance(x, Mapping):
    x = intervals.Interval(**x)
  return (
    interval(x, form) if isinstance(x, intervals.Interval) else form.format(x)
  )


def interval(
  x: intervals.Interval, form: str = '{:.2f}', to: str = ' to '
) -> str:
  """Writes '1.35x (1.20 to 1.50)', or '1.35x' if its ends are not known."""
  known = ends(x, form.removesuffix('x'), to)
  return form.format(x.value) + (f' ({known})' if known else '')


def ends(x: Any, form: str = '{:.2f}', to: str = '-') -> str:
  """Writes '1.20-1.50' from low and high, '' if they are not known."""
  return '' if x.low is None else form.format(x.low) + to + form.format(x.high)


def table(
  title: str, rows: Sequence[Any], columns: Sequence[Column]
) -> rich.table.Table:
  """Makes a table for the terminal."""
  out = rich.table.Table(
    title=title,
    title_justify='left',
    box=rich.box.SIMPLE_HEAD,
    padding=(0, 1, 0, 0),
  )
  for i, (head, _, _) in enumerate(columns):
    justify = 'right' if i else 'left'
    out.add_column(head, justify=justify, no_wrap=head != 'reason')
  for row in rows:
    out.add_row(*cells(row, columns))
  return out


def markdown(rows: Iterable[Any], columns: Sequence[Column]) -> list[str]:
  """Returns a table's lines in Markdown."""
  return grid([head for head, *_ in columns], [cells(x, columns) for x in rows])


def grid(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
  """Returns a Markdown table's lines from written cells."""
  every = [head, ['---'] * len(head), *rows]
  return ['| ' + ' | '.join(map(str, row)) + ' |' for row in every]


def cells(row: Any, columns: Sequence[Column]) -> list[str]:
  return [show(at(row, path), form) for _, path, form in columns]


def line(console: Console, name: str, text: str) -> None:
  """Prints a text after a bold word, or for '' below the text before."""
  console.print(f'[bold]{name:9}[/bold]{text}')


def close(
  sentences: Sequence[str],
  document: Any,
  console: Console,
  path: pathlib.Path | None = None,
) -> None:
  """Prints verdict and document (printing.result); path: gets the document."""
  console.print('\n[bold]Verdict[/bold]')
  for sentence in sentences:
    indent = ' ' * (2 + len(sentence) - len(sentence.lstrip()))
    text = textwrap.fill(
      sentence.lstrip(),
      console.width,
      initial_indent=indent,
      subsequent_indent=f'{indent}  ',
      break_long_words=False,
    )
    console.print(text)
  console.print()
  sys.stdout.flush()
  text = printing.result(document)
  if path and hosts.is_first():
    path.parent.mkdir(exist_ok=True)
    files.write(path, text)


# --- what runs ---------------------------------------------------------------


def start(about, found: records.Ceiling, s: records.Setting, console) -> None:
  """Prints machine.describe, the ceiling and the setting."""
  machine(about, console)
  for dtype, gb_s in found.gb_s.items():
    parts = [f'{k} {v:.1f}' for k, v in gb_s.items()][:-2]
    text = (
      f'{dtype} reads {gb_s["sustained"]:.1f} GB/s (median of reads; the '
      f'best single one {gb_s["best"]:.1f}): {", ".join(parts)}'
    )
    line(console, 'Ceiling', text)
  setting(s, console)


def machine(m: Mapping[str, Any], console: Console) -> None:
  """Prints machine.describe."""
  line(
    console,
    'Machine',
    f'{m["cpu"]}, {m["cores"]} cores; {m["platform"]} ({m["device"]}) '
    f'x{m["devices"]}; Python {m["python"]}, jax {m["jax"]}, flax {m["flax"]}',
  )
  changes = ' + changes' if m['dirty'] else ''
  flags = m['XLA_FLAGS'] or '-'
  line(console, '', f'commit {m["commit"][:12]}{changes}; XLA_FLAGS={flags}')


def setting(s: records.Setting, console: Console) -> None:
  named = rich.markup.escape  # a folder may be called model[q4]
  draft = f'; draft {named(s.draft)}, same tokenizer' if s.draft else ''
  weights = ', '.join(
    f'{name} {x / 1e6:.1f}' for name, x in s.weights.items() if x
  )
  about = f'{named(s.target)}, {s.dtype}{draft}; MB: {weights}'
  line(console, 'Target', about)
  x = s.sampling
  warm = f'temperature {x["temperature"]}' if x['temperature'] else 'greedy'
  lossy = '' if s.lossless else ' (LOSSY)'
  line(
    console,
    'Run',
    f'{warm}, top_k {x["top_k"]}, top_p {x["top_p"]}, rule {s.rule}{lossy}; '
    f'batch {s.batch_size}, {s.max_new_tokens} new tokens at most, buffer '
    f'{s.buffer}; first turns',
  )


def calibration(found: calibration_lib.Calibration, tok_s: float, console):
  """Prints how long the parts take. tok_s: plain decoding's ceiling."""
  widths = ', '.join(
    f'v({n}) = {v:.2f}' for n, v in sorted(found.verify.items())
  )
  step = f'plain step {found.step * 1e3:.3g} ms'
  idle = f'proposing nothing {found.idle:.2f}'
  line(console, 'Parts', f'{step}; {widths}; {idle}')
  costs = ', '.join(
    f'{name} {x[max(x)] / max(x):.4f}' for name, x in found.propose.items()
  )
  if costs:
    line(console, '', f'c (a drafted token): {costs}')
  line(console, '', f'ceiling of plain decoding {tok_s:.1f} tok/s')


def plan(s: records.Setting, clock, width: float | None, console) -> None:
  """Prints what was chosen to fit the time. width: half an interval to expect,
  as a share."""
  time = ''
  if clock.limited:
    gone, all = map(printing.time_text, (program.elapsed(), clock.seconds))
    time = f' ({gone} of {all} gone)'
  line(
    console,
    'Plan',
    f'{s.judged_prompts} test prompts, {s.other_prompts} calibration prompts; '
    f'at most {s.max_new_tokens} new tokens, {s.repeats} repeats{time}',
  )
  if width is not None:
    text = f'95 % intervals of an improvement: about +-{width:.0%}'
    line(console, '', f'{text}, by how much calibration prompts differ')
  if s.not_judged:
    names = ', '.join(x or 'no category' for x in s.not_judged)
    line(console, '', f'no test prompt: {rich.markup.escape(names)}')


def phases(seconds: Mapping[str, float]) -> str:
  """Writes where a run's time went, the longest first."""
  order = sorted(seconds, key=seconds.__getitem__, reverse=True)
  parts = [f'{x} {seconds[x]:.0f}' for x in order if seconds[x] >= 0.5]
  return f'{sum(seconds.values()):.0f} s, of which {", ".join(parts)}'


# --- the benchmark -----------------------------------------------------------


def predicted(found: Mapping[str, records.Prediction], s, console) -> None:
  """Prints every method's prediction. s: a records.Setting."""
  if not found:
    what = f'{-(-s.other_prompts // s.batch_size)} '
    what += 'batches of ' * (s.batch_size > 1) + 'calibration prompts'
    console.print(f'Not predicted: {what}, {records.FEWEST} are needed.')
    return
  title = 'Predicted before the test prompts are run'
  console.print(table(title, list(found.items()), _PREDICTED))


def gain_cell(x: intervals.Interval) -> str:
  """Writes an improvement in its colour; '1' for plain decoding."""
  colour = {'win': 'green', 'loss': 'red'}.get(x.outcome, 'default')
  return '1' if x.low == x.high == 1 else f'[{colour}]{interval(x, to="-")}[/]'


def foretold(x: records.Prediction) -> str:
  return '-' if x.vague else f'{x.improvement:.2f}x'


# Of (name of the method, Prediction).
_PREDICTED: list[Column] = [
  *columns('method=0, tokens/window=1.tokens:.2f'),
  *columns('window cost=1.window_cost:.2f'),
  ('improvement', '1', foretold),
  ('90 % interval', '1', lambda x: x.vague or ends(x)),
]
_SPEED: list[Column] = [
  *columns('method=name, tok/s=tok_s:.1f'),
  ('improvement', 'improvement', gain_cell),
  ('whole requests', 'whole', gain_cell),
  ('predicted', 'predicted', foretold),
  *columns('explained=explained.improvement:.2fx'),
  ('first, ms', 'time_to_first_token', lambda x: f'{1000 * x:.1f}'),
  (
    'differing',
    '',
    lambda r: _painted(identity([r.audit], r.alpha.away if r.alpha else '')),
  ),
]
_COUNTS = columns(
  'tokens/window=counts.block_efficiency:.2f, '
  'proposes=counts.proposal_rate:.0%, '
  'accepted=counts.draft_acceptance_rate:.0%'
)
_DRAFTING: list[Column] = [
  *columns('method=name, alpha=alpha.alpha:.2f'),
  *_COUNTS,
  ('at position 1, 2, ...', 'by_position', lambda x: ' '.join(map(show, x))),
]
_CATEGORY: list[Column] = [
  ('category', 'category', rich.markup.escape),
  *columns('method=name, n=prompts'),
  ('improvement', 'improvement', gain_cell),
  *columns('explained=explained.improvement:.2fx'),
  *_COUNTS,
]


def rows(doc: records.Document, console: Console) -> None:
  """Prints the main tables."""
  title = 'Speed (improvement with its 95 % interval)'
  console.print(table(title, doc.rows, _SPEED))
  tok_s = doc.rows[0].tok_s
  assert tok_s
  console.print(
    'The intervals hold all at once, so the best method has paid for being '
    f'chosen. Plain decoding reaches {tok_s / doc.ceiling.tok_s:.2f} of its '
    f'ceiling (reads of {show(doc.ceiling.between, "{:.1f}")} GB/s between the '
    'prompts). Improvement is of decoding alone; whole requests have the '
    'prefill of target and draft. Explained: the prediction with the test '
    "prompts' own acceptance."
  )
  drafting = [r for r in doc.rows if r.gamma]
  console.print(table('Drafting', drafting, _DRAFTING))
  if doc.categories:
    lossy = _lossy(doc)
    away: list[Column] = [('TV, all', 'name', lambda x: lossy[x])]
    every = _CATEGORY + away if lossy else _CATEGORY
    console.print(table('By category', doc.categories, every))


def crossover(doc: records.Document, console: Console) -> None:
  """Prints a row for each batch size."""
  lossy = _lossy(doc)
  methods: list[Column] = [
    (
      x.name + (f'\nTV {lossy[x.name]}' if lossy else ''),
      f'rows.{i}.improvement',
      gain_cell,
    )
    for i, x in enumerate(doc.crossover[0].rows)
    if i
  ]
  differing = lambda x: _painted(
    identity([r.audit for r in x.rows], failed=len(x.failed))
  )
  every: list[Column] = [
    *columns('batch=batch_size, plain tok/s=rows.0.tok_s:.1f'),
    *methods,
    ('differing', '', differing),
  ]
  title = 'By batch size (full pools, prompts read meanwhile)'
  console.print(table(title, doc.crossover, every))


def identity(
  audits: Sequence[records.Audit | None], distance: str = '', failed: int = 0
) -> str:
  """Writes '3 of 28: 3 tie', 'same distribution' or 'LOSSY, TV 0.1', under one
  rule; None among audits is plain decoding's."""
  x, parts = records.together(audits), []
  if x and x.promised == 'distribution':
    parts = ['same distribution']
  elif x and x.promised == 'nothing':
    parts = [f'LOSSY, TV {distance}' if distance else 'LOSSY']
  elif x:
    parts = [f'{len(x.findings)} of {x.requests}' + ':' * bool(x.findings)]
    parts += [f'{x.ties} tie'] * bool(x.ties) + [f'{x.bugs} BUG'] * bool(x.bugs)
  return ' '.join(parts + [f'{failed} FAILED'] * bool(failed))


def _painted(cell: str) -> str:
  return re.sub(r'\d+ (BUG|FAILED)', r'[red]\g<0>[/red]', cell)


def _lossy(doc: records.Document) -> dict[str, str]:
  """Returns each method's distance if the rule is lossy, else {}."""
  if doc.setting.lossless:
    return {}
  return {r.name: r.alpha.away if r.alpha else '-' for r in doc.rows}
