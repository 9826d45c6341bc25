"""Prints the results of a benchmark as tables and lines.

Computes no metrics. Lossy methods show their distance from the target, a total
variation, beside every number.
"""

import pathlib
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table

from specdec_jax import hosts, printing, program
from specdec_jax.bench import intervals, records
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.io import files

# Head; attributes from a row to a value, '' for the row itself; its format.
Column = tuple[str, str, str | Callable[[Any], str]]
Console = rich.console.Console


def table(
  title: str, rows: Sequence[Any], columns: Sequence[Column]
) -> rich.table.Table:
  """Rows as a table; a value of None is '-'."""
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
    out.add_row(*(_cell(row, path, form) for _, path, form in columns))
  return out


def _cell(x: Any, path: str, form: str | Callable[[Any], str]) -> str:
  for name in path.split('.') if path else ():
    if x is not None:
      x = x[int(name)] if name.isdigit() else getattr(x, name)
  return show(x, form)


def show(x: Any, form: str | Callable[[Any], str] = '{:.2f}') -> str:
  if x is None:
    return '-'
  return form(x) if callable(form) else form.format(x)


def line(console: Console, name: str, text: str) -> None:
  """Prints a text behind a bold word, or below that of the line before."""
  console.print(f'[bold]{name:9}[/bold]{text}')


def close(
  sentences: Sequence[str],
  document: Any,
  console: Console,
  path: pathlib.Path | None = None,
) -> None:
  """Prints the verdict and the document (printing.result), which it also writes
  to a path."""
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
  """Prints machine.describe, the ceiling and the setting of a benchmark."""
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
  """Prints the times of the parts. tok_s: the ceiling of plain decoding."""
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
  """Prints what was chosen to fit the time.

  s: as planned. width: half of an interval to expect, as a share.
  """
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


# --- the benchmark -----------------------------------------------------------


def predicted(found: Mapping[str, records.Prediction], s, console) -> None:
  """Prints what is predicted of every method, in a records.Setting."""
  if not found:
    what = f'{-(-s.other_prompts // s.batch_size)} '
    what += 'batches of ' * (s.batch_size > 1) + 'calibration prompts'
    console.print(f'Not predicted: {what}, {records.FEWEST} are needed.')
    return
  title = 'Predicted before the test prompts are run'
  console.print(table(title, list(found.items()), _PREDICTED))


def gain_cell(x: intervals.Interval) -> str:
  """The improvement of a method; '1' of plain decoding."""
  colour = {'win': 'green', 'loss': 'red'}.get(x.outcome, 'default')
  if x.low == x.high == 1:
    return '1'
  return f'[{colour}]{x.value:.2f}{ends(x, " ({})")}[/]'


def ends(x, form: str = '{}') -> str:
  """The ends of an interval, '' where they are not known."""
  return '' if x.low is None else form.format(f'{x.low:.2f}-{x.high:.2f}')


TIMES = '{:.2f}x'
# Of (name of the method, Prediction).
_PREDICTED: list[Column] = [
  ('method', '0', '{}'),
  ('tokens/window', '1.tokens', '{:.2f}'),
  ('window cost', '1.window_cost', '{:.2f}'),
  ('improvement', '1.improvement', TIMES),
  ('90 % interval', '1', ends),
]
_SPEED: list[Column] = [
  ('method', 'name', '{}'),
  ('tok/s', 'tok_s', '{:.1f}'),
  ('improvement', 'improvement', gain_cell),
  ('whole requests', 'whole', gain_cell),
  ('predicted', 'predicted.improvement', TIMES),
  ('explained', 'explained.improvement', TIMES),
  ('first, ms', 'time_to_first_token', lambda x: f'{1000 * x:.1f}'),
  (
    'differing',
    '',
    lambda r: identity([r.audit], r.alpha.away if r.alpha else ''),
  ),
]
_COUNTS: list[Column] = [
  ('tokens/window', 'counts.block_efficiency', '{:.2f}'),
  ('proposes', 'counts.proposal_rate', '{:.0%}'),
  ('accepted', 'counts.draft_acceptance_rate', '{:.0%}'),
]
_DRAFTING: list[Column] = [
  ('method', 'name', '{}'),
  ('alpha', 'alpha.alpha', '{:.2f}'),
  *_COUNTS,
  ('at position 1, 2, ...', 'by_position', lambda x: ' '.join(map(show, x))),
]
_CATEGORY: list[Column] = [
  ('category', 'category', rich.markup.escape),
  ('method', 'name', '{}'),
  ('n', 'prompts', '{}'),
  ('improvement', 'improvement', gain_cell),
  ('explained', 'explained.improvement', TIMES),
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
    columns = _CATEGORY + away if lossy else _CATEGORY
    console.print(table('By category', doc.categories, columns))


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
  differing = lambda x: identity([r.audit for r in x.rows], '', len(x.failed))
  columns: list[Column] = [
    ('batch', 'batch_size', '{}'),
    ('plain tok/s', 'rows.0.tok_s', '{:.1f}'),
    *methods,
    ('differing', '', differing),
  ]
  title = 'By batch size (full pools, prompts read meanwhile)'
  console.print(table(title, doc.crossover, columns))


def identity(
  audits: Sequence[records.Audit | None], distance: str = '', failed: int = 0
) -> str:
  """A cell of audits: '3 of 28: 3 tie', 'same distribution', 'LOSSY, TV 0.1'.

  audits: of one rule; None among them is plain decoding's.
  """
  x, parts = records.together(audits), []
  if x and x.promised == 'distribution':
    parts = ['same distribution']
  elif x and x.promised == 'nothing':
    parts = [f'LOSSY, TV {distance}' if distance else 'LOSSY']
  elif x:
    parts = [f'{len(x.findings)} of {x.requests}' + ':' * bool(x.findings)]
    parts += [f'{x.ties} tie'] if x.ties else []
    parts += [f'[red]{x.bugs} BUG[/red]'] if x.bugs else []
  if failed:
    parts.append(f'[red]{failed} FAILED[/red]')
  return ' '.join(parts)


def _lossy(doc: records.Document) -> dict[str, str]:
  """The distance of each method if the rule is lossy, else {}."""
  if doc.setting.lossless:
    return {}
  return {r.name: r.alpha.away if r.alpha else '-' for r in doc.rows}
