"""Prints the results of the benchmark and of the audit as tables.

Computes no metrics. Lossy methods show their distance from the target, a total
variation, beside every number.
"""

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table

from specdec_jax import printing, program
from specdec_jax.bench import audit as audit_lib
from specdec_jax.bench import intervals


def table(
  title: str,
  rows: Sequence[Any],
  columns: Mapping[str, Callable[[Any], str]],
) -> rich.table.Table:
  """Rows as a table. columns: head -> function from a row to its cell."""
  out = rich.table.Table(
    title=title,
    title_justify='left',
    box=rich.box.SIMPLE_HEAD,
    padding=(0, 1, 0, 0),
  )
  for i, head in enumerate(columns):
    justify = 'right' if i else 'left'
    out.add_column(head, justify=justify, no_wrap=head != 'reason')
  for row in rows:
    out.add_row(*(cell(row) for cell in columns.values()))
  return out


def close(
  sentences: Sequence[str], document: Any, console: rich.console.Console
) -> None:
  """Prints the verdict and, as the last line, the document as JSON."""
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
  print(printing.compact(document))


# --- what runs ---------------------------------------------------------------


def _line(console, name: str, text: str) -> None:
  console.print(f'[bold]{name:9}[/bold]{text}')


def machine(m, console) -> None:
  """Prints machine.describe."""
  _line(
    console,
    'Machine',
    f'{m["cpu"]}, {m["cores"]} cores; {m["platform"]} ({m["device"]}) '
    f'x{m["devices"]}; Python {m["python"]}, jax {m["jax"]}, flax {m["flax"]}',
  )
  changes = ' + changes' if m['dirty'] else ''
  flags = m['XLA_FLAGS'] or '-'
  _line(console, '', f'commit {m["commit"][:12]}{changes}; XLA_FLAGS={flags}')


def start(doc, console) -> None:
  """Prints the machine, the ceiling and the setting of a benchmark.Document."""
  machine(doc.machine, console)
  for dtype, found in doc.ceiling.gb_s.items():
    parts = [f'{k} {v:.1f}' for k, v in found.items()][:-2]
    text = (
      f'{dtype} reads {found["sustained"]:.1f} GB/s (median of reads; the '
      f'best single one {found["best"]:.1f}): {", ".join(parts)}'
    )
    _line(console, 'Ceiling', text)
  setting(doc.setting, console)


def setting(s, console) -> None:
  """Prints a plan.Setting."""
  draft = f'; draft {s.draft}, same tokenizer' if s.draft else ''
  weights = ', '.join(
    f'{name} {x / 1e6:.1f}' for name, x in s.weights.items() if x
  )
  _line(console, 'Target', f'{s.target}, {s.dtype}{draft}; MB: {weights}')
  x = s.sampling
  warm = f'temperature {x["temperature"]}' if x['temperature'] else 'greedy'
  lossy = '' if s.lossless else ' (LOSSY)'
  _line(
    console,
    'Run',
    f'{warm}, top_k {x["top_k"]}, top_p {x["top_p"]}, rule {s.rule}{lossy}; '
    f'batch {s.batch_size}, {s.max_new_tokens} new tokens at most, buffer '
    f'{s.buffer}; first turns',
  )


def plan(doc, clock, width: float | None, console) -> None:
  """Prints what was chosen to fit the time.

  Args:
    doc: benchmark.Document.
    clock: budget.Clock.
    width: half of the interval to expect, as a share; None: not known.
  """
  s, time = doc.setting, ''
  if clock.limited:
    gone, all = map(printing.time_text, (program.elapsed(), clock.seconds))
    time = f' ({gone} of {all} gone)'
  counts = f'{s.judged_prompts} prompts judged, {s.other_prompts} others'
  _line(
    console,
    'Plan',
    f'{counts} to predict from; at most {s.max_new_tokens} new tokens, '
    f'{s.repeats} repeats{time}',
  )
  if width is not None:
    text = f'95 % intervals of an improvement: about +-{width:.0%}'
    _line(console, '', f'{text}, by how much the other prompts differ')
  if s.not_judged:
    names = ', '.join(x or 'no category' for x in s.not_judged)
    _line(console, '', f'not judged: {rich.markup.escape(names)}')


def calibration(doc, console) -> None:
  """Prints the calibration and the ceiling of a benchmark.Document."""
  c, rows = doc.calibration, doc.setting.batch_size
  widths = ', '.join(f'v({n}) = {v:.2f}' for n, v in sorted(c.verify.items()))
  step = f'plain step {c.step * 1e3:.3g} ms'
  _line(console, 'Parts', f'{step}; {widths}; proposing nothing {c.idle:.2f}')
  costs = ', '.join(
    f'{name} {x[max(x)] / max(x):.4f}' for name, x in c.propose.items()
  )
  if costs:
    _line(console, '', f'c (a drafted token): {costs}')
  limit = f'ceiling of plain decoding {doc.ceiling.tok_s:.1f} tok/s'
  _line(console, '', f'{limit}; the step alone gives {rows / c.step:.1f}')


# --- the benchmark -----------------------------------------------------------


def predicted(doc, console) -> None:
  """Prints predict.Prediction by method; doc: benchmark.Document."""
  if not doc.predicted:
    alone = 'No prediction: it needs two prompts or more.'
    console.print(alone if doc.calibration.propose else 'Plain decoding only.')
    return
  columns = {
    'method': lambda x: x[0],
    'tokens/window': lambda x: _show(x[1].tokens),
    'window cost': lambda x: _show(x[1].window_cost),
    'improvement': lambda x: _times(x[1].improvement),
    '90 % interval': lambda x: ends(x[1]),
    'best gamma': lambda x: str(x[1].best_gamma or '0 (none)'),
  }
  title = 'Predicted before the judged prompts are run'
  console.print(table(title, list(doc.predicted.items()), columns))


def rows(doc, console) -> None:
  """The main tables; doc: benchmark.Document."""
  gain = lambda prediction: prediction and prediction.improvement
  over = lambda a, b: a / b if a and b else None
  speed = {
    'method': lambda r: r.name,
    'tok/s': lambda r: _show(r.tok_s, '{:.1f}'),
    'improvement': lambda r: gain_cell(r.improvement) if r.gamma else '1',
    'whole requests': lambda r: gain_cell(r.whole) if r.gamma else '1',
    'predicted': lambda r: _times(gain(r.predicted)),
    'measured/p.': lambda r: _show(
      over(r.improvement.value, gain(r.predicted))
    ),
    'explained': lambda r: _times(gain(r.explained)),
    'first, ms': lambda r: _show(r.time_to_first_token * 1e3, '{:.1f}'),
    'differing': lambda r: identity([r.audit], distance(r.alpha)),
  }
  title = 'Speed (improvement with its 95 % interval over prompts)'
  console.print(table(title, doc.rows, speed))
  console.print(_widths([r.improvement for r in doc.rows if r.gamma]))
  share = over(doc.rows[0].tok_s, doc.ceiling.tok_s)
  console.print(
    f'Plain decoding reaches {_show(share)} of its ceiling (reads of '
    f'{_show(doc.ceiling.between, "{:.1f}")} GB/s between the prompts). '
    'Improvement is of decoding '
    'alone; whole requests have the prefill of target and draft. '
    "Explained: the prediction with the judged prompts' own acceptance."
  )
  drafting = {
    'method': lambda r: r.name,
    'alpha': lambda r: _show(r.alpha and r.alpha.alpha),
    'if proposed': lambda r: _show(r.alpha and r.alpha.alpha_where_proposed),
    **_COUNTS,
    'drafts/window': lambda r: _show(
      over(r.counts.drafted_tokens, r.counts.target_calls)
    ),
    'at position 1, 2, ...': lambda r: ' '.join(
      map(_show, r.counts.acceptance_per_position[: r.gamma])
    ),
  }
  console.print(table('Drafting', [r for r in doc.rows if r.gamma], drafting))
  if doc.categories:
    _categories(doc, console)
  elif doc.setting.batch_size > 1:
    console.print(
      'No table by category: a batch holds prompts of several; set '
      'bench.batch_size=1.'
    )
  console.print(
    f'Repeated 8-grams in the text: {_show(doc.repeated_8grams, "{:.0%}")}'
  )


def _widths(found: Sequence[intervals.Interval]) -> str:
  """What the intervals of a table are, and how wide."""
  widths = [f'{x.width:.0%}' for x in found if x.width is not None]
  if not widths:
    return (
      f'No intervals: they need {intervals.FEWEST} prompts, in two batches or '
      'more.'
    )
  low, high = (f(widths, key=lambda x: float(x[:-1])) for f in (min, max))
  ends = low if low == high else f'{low} to +-{high}'
  return (
    f'The {len(widths)} intervals hold all at once (95 %), so the best method '
    f'has paid for being chosen: +-{ends}.'
  )


# Of a benchmark.Row or Category.
_COUNTS = {
  'tokens/window': lambda r: _show(r.counts.block_efficiency),
  'proposes': lambda r: _show(r.counts.proposal_rate, '{:.0%}'),
  'accepted': lambda r: _show(r.counts.draft_acceptance_rate, '{:.0%}'),
}


def _categories(doc, console) -> None:
  lossy = _lossy(doc)
  columns = {
    'category': lambda c: rich.markup.escape(c.category),
    'method': lambda c: c.name,
    'n': lambda c: str(c.prompts),
    'improvement': lambda c: gain_cell(c.improvement),
    'predicted': lambda c: _times(c.predicted and c.predicted.improvement),
    'explained': lambda c: _times(c.explained.improvement),
    **_COUNTS,
  } | ({'TV, all': lambda c: lossy[c.name]} if lossy else {})
  console.print(table('By category', doc.categories, columns))


def crossover(doc, console) -> None:
  """Prints a row for each batch size; doc: benchmark.Document."""
  lossy = _lossy(doc)
  gain = lambda i: lambda x: gain_cell(x.rows[i].improvement)
  columns = {
    'batch': lambda x: str(x.batch_size),
    'plain tok/s': lambda x: _show(x.rows[0].tok_s, '{:.1f}'),
  }
  for i, row in enumerate(doc.crossover[0].rows[1:], 1):
    tv = f'\nTV {lossy[row.name]}' if lossy else ''
    columns[row.name + tv] = gain(i)
  columns['fastest'] = lambda x: ', '.join(
    f'{drafter} {gamma or "-"}' for drafter, gamma in x.best_gamma.items()
  )
  columns['differing'] = lambda x: identity(
    [row.audit for row in x.rows], failed=len(x.failed)
  )
  console.print(table('By batch size', doc.crossover, columns))


def identity(audits, distance: str = '', failed: int = 0) -> str:
  """A cell of audits: '3 of 28: 3 tie', 'same distribution', 'LOSSY, TV 0.1'.

  audits: of one rule; None among them is plain decoding's.
  """
  audits = [x for x in audits if x]
  promised = audits[0].promised if audits else ''
  parts = ['same distribution'] if promised == 'distribution' else []
  if promised == 'nothing':
    parts = [f'LOSSY, TV {distance}' if distance else 'LOSSY']
  elif promised == 'tokens':
    differing = sum(len(x.findings) for x in audits)
    of = sum(x.requests for x in audits)
    parts = [f'{differing} of {of}' + ':' * bool(differing)]
    if ties := sum(x.ties for x in audits):
      parts.append(f'{ties} tie')
    if bugs := sum(x.bugs for x in audits):
      parts.append(f'[red]{bugs} BUG[/red]')
  if failed:
    parts.append(f'[red]{failed} FAILED[/red]')
  return ' '.join(parts)


def distance(alpha) -> str:
  """Total variation between p and what is emitted; '' without alpha."""
  if not alpha:
    return ''
  away = alpha.total_variation
  return 'unknown' if away is None else f'{away:.2g}'


def _lossy(doc) -> dict[str, str]:
  """The distance of each method if the rule is lossy, else {}."""
  if doc.setting.lossless:
    return {}
  return {row.name: distance(row.alpha) or '-' for row in doc.rows}


# --- the audit ---------------------------------------------------------------


def audit(report, console) -> None:
  """Prints the comparison of each method's texts; report: identity.Report."""
  failed = lambda r: sum(x.method == r.name for x in report.failed)
  columns = {
    'method': lambda r: r.name,
    'texts': lambda r: str(r.audit.requests),
    'tokens': lambda r: str(r.audit.tokens),
    'drafts accepted': lambda r: (
      f'{r.counts.accepted_tokens} of {r.counts.drafted_tokens}'
    ),
    'identical': lambda r: str(r.audit.requests - len(r.audit.findings)),
    'tie': lambda r: str(r.audit.ties),
    'BUG': lambda r: str(r.audit.bugs),
    'failed': lambda r: str(failed(r)),
  }
  console.print(table('Texts against plain decoding', report.rows, columns))
  found = [(r.name, x) for r in report.rows for x in r.audit.findings]
  if not found:
    return
  columns = {
    'prompt': lambda x: rich.markup.escape(_cut(x[1].id, 20)),
    'method': lambda x: x[0],
    'at': lambda x: str(x[1].position),
    'plain': lambda x: _token(x[1].plain, x[1].plain_text),
    'other': lambda x: _token(x[1].other, x[1].other_text),
    'gap': lambda x: _show(x[1].gap, '{:.2g}'),
    'noise': lambda x: _show(x[1].noise, '{:.2g}'),
    'rounding': lambda x: _show(x[1].rounding, '{:.2g}'),
    'verdict': lambda x: x[1].verdict,
    'reason': lambda x: x[1].reason,
  }
  console.print(table('First divergences', found, columns))
  console.print(
    f'A tie: the gap is at most {audit_lib.FACTOR} times the noise, and the '
    'noise what rounding explains. Gap: what logits must move by for either '
    'token to win. Noise: what they move by between passes of one token and '
    'of a window. Rounding: what they move by in passes of one token, where '
    'each weight moves by up to one rounding.'
  )


# --- cells -------------------------------------------------------------------


def _token(token: int | None, text: str | None) -> str:
  if token is None or text is None:
    return '-'
  return rich.markup.escape(f'{token} {_cut(repr(text), 12)}')


def _cut(text: str, size: int) -> str:
  return text if len(text) <= size else f'{text[: size - 2]}..'


def gain_cell(x: intervals.Interval) -> str:
  colour = {'win': 'green', 'loss': 'red'}.get(x.outcome, 'default')
  if x.value is None:
    return x.outcome
  return f'[{colour}]{x.value:.2f}{ends(x, " ({})")}[/]'


def ends(x, form: str = '{}') -> str:
  """The ends of an interval, '' where they are not known."""
  return '' if x.low is None else form.format(f'{x.low:.2f}-{x.high:.2f}')


def _show(x: float | None, form: str = '{:.2f}') -> str:
  return '-' if x is None else form.format(x)


def _times(x: float | None) -> str:
  return _show(x, '{:.2f}x')
