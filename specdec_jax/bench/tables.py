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

from specdec_jax import runtime
from specdec_jax.bench import audit as audit_lib
from specdec_jax.bench import metrics


def table(
  title: str,
  rows: Sequence[Any],
  columns: Mapping[str, Callable[[Any], str]],
  *,
  box: rich.box.Box = rich.box.SIMPLE_HEAD,
) -> rich.table.Table:
  """Rows as a table. columns: head -> function from a row to its cell."""
  out = rich.table.Table(
    title=title, title_justify='left', box=box, padding=(0, 1, 0, 0)
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
    console.print(text, highlight=False)
  console.print()
  sys.stdout.flush()
  print(runtime.compact(document))


# --- what runs ---------------------------------------------------------------


def _line(console, name: str, text: str) -> None:
  console.print(
    f'[bold]{name}[/bold]{" " * (9 - len(name))}{text}', highlight=False
  )


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


def ceiling(gb_s, console) -> None:
  """Prints benchmark.Ceiling.gb_s."""
  for dtype, found in gb_s.items():
    parts = ', '.join(f'{k} {v:.1f}' for k, v in found.items() if k != 'best')
    best = f'{found["best"]:.1f} GB/s'
    _line(console, 'Ceiling', f'{dtype} reads {best}: {parts}')


def setting(s, console) -> None:
  """Prints a plan.Setting."""
  x = s.sampling
  warm = (
    'greedy' if x['temperature'] == 0 else f'temperature {x["temperature"]}'
  )
  draft = f'; draft {s.draft}, same tokenizer' if s.draft else ''
  _line(console, 'Target', f'{s.target}, {s.dtype}{draft}')
  lossy = '' if s.lossless else ' (LOSSY)'
  _line(
    console,
    'Run',
    f'{warm}, top_k {x["top_k"]}, top_p {x["top_p"]}, rule {s.rule}{lossy}; '
    f'batch {s.batch_size}, {s.max_new_tokens} new tokens, buffer {s.buffer}; '
    'first turns',
  )


def judged(s, console) -> None:
  """Prints the numbers of prompts and the categories left out."""
  counts = f'{s.judged_prompts} prompts judged, {s.other_prompts} others'
  _line(console, '', f'{counts} to predict from')
  if s.not_judged:
    names = ', '.join(x or 'no category' for x in s.not_judged)
    why = 'not judged, for their only prompt is among the others'
    names = rich.markup.escape(names)
    _line(console, '', f'{why}: {names}; give two of each')


def calibration(c, ceiling: float, batch_size: int, console) -> None:
  """Prints a timing.Calibration; ceiling: benchmark.Ceiling.tok_s."""
  widths = ', '.join(f'v({n}) = {v:.2f}' for n, v in c.verify.items())
  idle = ', '.join(f'{v:.2f}' for v in c.idle.values())
  step = f'plain step {c.step * 1e3:.3g} ms'
  _line(console, 'Parts', f'{step}; {widths}; proposing nothing {idle}')
  if c.c:
    costs = ', '.join(f'{k}: {v:.4f}' for k, v in c.c.items())
    _line(console, '', f'c (a drafted token) {costs}')
  limit = f'ceiling of plain decoding {ceiling:.1f} tok/s'
  _line(console, '', f'{limit}; the step alone gives {batch_size / c.step:.1f}')


# --- the benchmark -----------------------------------------------------------


def predicted(found: Mapping[str, Any], console) -> None:
  """Prints predict.Prediction by method."""
  if not found:
    console.print('No prediction: it needs two prompts or more.')
    return
  columns = {
    'method': lambda x: x[0],
    'tokens/window': lambda x: _show(x[1].tokens),
    'window cost': lambda x: _show(x[1].window_cost),
    'improvement': lambda x: _times(x[1].improvement),
    'from alpha': lambda x: _times(x[1].improvement_from_alpha),
    'best gamma': lambda x: str(x[1].best_gamma or '0 (none)'),
  }
  title = 'Predicted before the judged prompts are run'
  console.print(table(title, list(found.items()), columns))


def rows(doc, console) -> None:
  """The main tables; doc: benchmark.Document."""
  gain = lambda prediction: prediction and prediction.improvement
  over = lambda r: _over(r.improvement.median, gain(r.predicted))
  depths = lambda r: map(_show, r.counts.acceptance_per_position)
  speed = {
    'method': lambda r: r.name,
    'tok/s': lambda r: _range(r.tok_s, 1),
    'improvement': lambda r: _gain(r.improvement) if r.gamma else '1',
    'predicted': lambda r: _times(gain(r.predicted)),
    'measured/p.': lambda r: _show(over(r)),
    'explained': lambda r: _times(gain(r.explained)),
    'differing': lambda r: identity([r.audit], distance(r.alpha)),
  }
  title = 'Speed (median, and least to most of the repeats)'
  console.print(table(title, doc.rows, speed))
  share = _over(doc.rows[0].tok_s.median, doc.ceiling.tok_s)
  console.print(
    f'Plain decoding reaches {_show(share)} of its ceiling. Explained: the '
    "prediction with the judged prompts' own acceptance.",
    highlight=False,
  )
  if left_out := sum(r.tok_s.too_short for r in doc.rows):
    console.print(
      f'{left_out} timings are too short to measure (decoding took no longer '
      'than the prefill varies) and left out.',
      highlight=False,
    )
  drafting = {
    'method': lambda r: r.name,
    'alpha': lambda r: _show(r.alpha and r.alpha.alpha),
    'if proposed': lambda r: _show(r.alpha and r.alpha.alpha_where_proposed),
    'tokens/window': lambda r: _show(r.counts.block_efficiency),
    'proposes': lambda r: _percent(r.counts.proposal_rate),
    'accepted': lambda r: _percent(r.counts.draft_acceptance_rate),
    'at position 1, 2, ...': lambda r: ' '.join(depths(r)),
    'c': lambda r: _show(r.cost_coefficient, '.3f'),
    'v': lambda r: _show(r.verify),
  }
  console.print(table('Drafting', [r for r in doc.rows if r.gamma], drafting))
  work = {
    'method': lambda r: r.name,
    'first, ms': lambda r: _ms(r.time_to_first_token),
    'gap p50': lambda r: _ms(r.inter_token.p50),
    'gap p95': lambda r: _ms(r.inter_token.p95),
    'ops': lambda r: _times(r.arithmetic_factor),
    'MB/token': lambda r: _mega(r.bytes_per_token),
    'target MB': lambda r: _mega(r.memory.target),
    'draft': lambda r: _mega(r.memory.draft),
    'caches': lambda r: (
      f'{_mega(r.memory.target_cache)} + {_mega(r.memory.draft_cache)}'
    ),
    'compile s': lambda r: f'{r.compile_seconds:.1f}',
  }
  console.print(table('Latency, work and memory', doc.rows, work))
  _categories(doc, console)
  console.print(
    f'Repeated 8-grams in the text: {_percent(doc.repeated_8grams)}',
    highlight=False,
  )


def _categories(doc, console) -> None:
  if not doc.categories:
    return
  lossy = _lossy(doc)
  columns = {
    'category': lambda c: rich.markup.escape(c.category),
    'method': lambda c: c.name,
    'n': lambda c: str(c.prompts),
    'improvement': lambda c: _gain(c.improvement),
    'explained': lambda c: _times(c.explained.improvement),
    'tokens/window': lambda c: _show(c.counts.block_efficiency),
    'proposes': lambda c: _percent(c.counts.proposal_rate),
    'accepted': lambda c: _percent(c.counts.draft_acceptance_rate),
    '8-grams': lambda c: _percent(c.repeated_8grams),
  } | ({'TV, all': lambda c: lossy[c.name]} if lossy else {})
  console.print(table('By category', doc.categories, columns))


def crossover(doc, console) -> None:
  """Prints a row for each batch size; doc: benchmark.Document."""
  lossy = _lossy(doc)
  gain = lambda i: lambda x: _times(x.rows[i].improvement.median)
  columns = {
    'batch': lambda x: str(x.batch_size),
    'plain tok/s': lambda x: _show(x.rows[0].tok_s.median, '.1f'),
  }
  for i, row in enumerate(doc.crossover[0].rows[1:], 1):
    tv = f'\nTV {lossy[row.name]}' if lossy else ''
    columns[row.name + tv] = gain(i)
  columns['best gamma'] = lambda x: ', '.join(
    f'{drafter} {gamma}' for drafter, gamma in x.best_gamma.items()
  )
  columns['differing'] = lambda x: identity(
    [row.audit for row in x.rows], failed=len(x.failed)
  )
  console.print(table('By batch size', doc.crossover, columns))


def failures(found, console) -> None:
  """Prints identity.Failure of each request that failed."""
  columns = {
    'prompt': lambda x: rich.markup.escape(x.id),
    'method': lambda x: x.method,
    'after new tokens': lambda x: str(x.tokens),
  }
  title = 'Failed requests: logits are not finite'
  console.print(table(title, found, columns))


def identity(audits, distance: str = '', failed: int = 0) -> str:
  """A cell of audits: '3 of 28: 3 tie', 'distribution' or 'LOSSY, TV 0.02'."""
  audits = [x for x in audits if x]
  tokens = [x for x in audits if x.promised == 'tokens']
  promised = {x.promised for x in audits}
  parts = [] if tokens else sorted(promised - {'nothing'})
  if 'nothing' in promised:
    parts.append(f'LOSSY, TV {distance}' if distance else 'LOSSY')
  if tokens:
    differing = sum(len(x.findings) for x in tokens)
    of = f'{differing} of {sum(x.requests for x in tokens)}'
    parts = [of + ':' * bool(differing)]
  if ties := sum(x.ties for x in tokens):
    parts.append(f'{ties} tie')
  if bugs := sum(x.bugs for x in tokens):
    parts.append(f'[red]{bugs} BUG[/red]')
  if failed:
    parts.append(f'[red]{failed} FAILED[/red]')
  return ' '.join(parts)


def distance(alpha) -> str:
  """Total variation between p and the emitted distribution; '' if not known."""
  return f'{alpha.total_variation:.2g}' if alpha else ''


def _lossy(doc) -> dict[str, str]:
  """The distance of each method if the rule is lossy, else {}."""
  if doc.setting.lossless:
    return {}
  return {row.name: distance(row.alpha) or '-' for row in doc.rows}


# --- the audit ---------------------------------------------------------------


def audit(report, console, box: rich.box.Box = rich.box.SIMPLE_HEAD) -> None:
  """Prints the comparison of each method's texts; report: identity.Report."""
  failed = lambda r: sum(x.method == r.name for x in report.failed)
  of = lambda show: lambda r: str(show(r)) if r.audit else '-'
  columns = {
    'method': lambda r: r.name,
    'texts': lambda r: str((r.audit or report.rows[1].audit).requests),
    'tokens': lambda r: str(
      r.audit.tokens if r.audit else r.counts.emitted_tokens
    ),
    'drafts accepted': of(
      lambda r: f'{r.counts.accepted_tokens} of {r.counts.drafted_tokens}'
    ),
    'identical': of(lambda r: r.audit.requests - len(r.audit.findings)),
    'tie': of(lambda r: r.audit.ties),
    'BUG': of(lambda r: r.audit.bugs),
    'failed': lambda r: str(failed(r)),
  }
  title = 'Texts against plain decoding'
  console.print(table(title, report.rows, columns, box=box))
  found = [
    (r.name, x) for r in report.rows if r.audit for x in r.audit.findings
  ]
  if not found:
    return
  columns = {
    'prompt': lambda x: rich.markup.escape(_cut(x[1].id, 20)),
    'method': lambda x: x[0],
    'at': lambda x: str(x[1].position),
    'plain': lambda x: _token(x[1].plain, x[1].plain_text),
    'other': lambda x: _token(x[1].other, x[1].other_text),
    'gap': lambda x: _show(x[1].gap, '.2g'),
    'noise': lambda x: _show(x[1].noise, '.2g'),
    'gap/noise': lambda x: _show(_over(x[1].gap, x[1].noise), '.2g'),
    'verdict': lambda x: (
      '[red]BUG[/red]' if x[1].verdict == 'BUG' else x[1].verdict
    ),
    'reason': lambda x: x[1].reason,
  }
  console.print(table('First divergences', found, columns, box=box))
  console.print(
    f'A tie: the gap is at most {audit_lib.FACTOR} times the noise. Gap: what '
    'logits must move by for either token to win. Noise: what they move by '
    'between passes of one token and of a window, or one rounding.',
    highlight=False,
  )


# --- cells -------------------------------------------------------------------


def _token(token: int | None, text: str | None) -> str:
  if token is None or text is None:
    return '-'
  return rich.markup.escape(f'{token} {_cut(repr(text), 12)}')


def _cut(text: str, size: int) -> str:
  return text if len(text) <= size else f'{text[: size - 2]}..'


def _over(a: float | None, b: float | None) -> float | None:
  return None if a is None or not b else a / b


def _range(x: metrics.Spread, digits: int) -> str:
  if x.median is None:
    return 'too short'
  return f'{x.median:.{digits}f} ({x.min:.{digits}f}-{x.max:.{digits}f})'


def _gain(x: metrics.Spread) -> str:
  colour = {'win': 'green', 'loss': 'red'}.get(x.outcome, 'default')
  return f'[{colour}]{_range(x, 2)}[/]'


def _show(x: float | None, form: str = '.2f', unit: str = '') -> str:
  return '-' if x is None else format(x, form) + unit


def _times(x: float | None) -> str:
  return _show(x, unit='x')


def _percent(x: float | None) -> str:
  return _show(x, '.0%')


def _ms(x: float | None) -> str:
  return _show(None if x is None else x * 1e3, '.1f')


def _mega(x: float | None) -> str:
  return _show(None if x is None else x / 1e6, '.1f')
