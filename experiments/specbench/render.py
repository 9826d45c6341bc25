"""The benchmark's document in the layout of Spec-Bench's tables."""

from collections.abc import Mapping
from typing import Any

from experiments import page
from specdec_jax import metrics
from specdec_jax.bench import benchmark, intervals, tables


def markdown(doc: benchmark.Document, questions: Mapping[str, Any]) -> str:
  """Tables of improvement (in Spec-Bench's layout) and tokens a window.

  questions: from questions.describe.
  """
  columns = list(dict.fromkeys(c.category for c in doc.categories))
  cells = {(c.name, c.category): c for c in doc.categories}
  plain = ['1.00x'] * len(columns)
  speed = [['plain decoding', *plain, '1.00', '1.00x', '', '']]
  tokens = []
  for row in doc.rows:
    if not row.gamma:
      continue
    off = tables.distance(row.alpha)
    name = row.name + ('' if doc.setting.lossless else f' (LOSSY, TV {off})')
    found = [cells[row.name, column] for column in columns]
    x, mat = row.improvement, _number(row.counts)
    ends = tables.ends(x)
    differing = page.plain(tables.identity([row.audit], off))
    times = [_times(c.improvement) for c in found]
    speed.append([name, *times, mat, _times(x), ends, differing])
    tokens.append([name, *(_number(c.counts) for c in found), mat])
  head = ['method', *columns]
  return '\n'.join(
    [
      _caption(doc, questions),
      '',
      'Improvement (~: its 95 % interval holds 1, or it has none: of fewer '
      'than 6 prompts); '
      'differing: texts that are not those of plain decoding:',
      '',
      *page.table([*head, '#MAT', 'overall', '95 %', 'differing'], speed),
      '',
      'block_efficiency:',
      '',
      *page.table([*head, 'overall'], tokens),
    ]
  )


def _caption(doc: benchmark.Document, q: Mapping[str, Any]) -> str:
  s, plain = doc.setting, doc.rows[0].tok_s
  warm = s.sampling['temperature']
  kind = f'temperature {warm}' if warm else 'greedy'
  draft = f', draft {s.draft}' if s.draft else ''
  speed = '' if plain is None else f'; plain decoding {plain:.1f} tok/s'
  return (
    f'{page.made_on(doc.machine)} {s.target}, {s.dtype}{draft}; {kind}, rule '
    f'{s.rule}, batch {s.batch_size}, {s.max_new_tokens} new tokens at most, '
    f'{s.repeats} repeats{speed}. {q["questions"]} questions of {q["file"]} '
    f'(sha256 {q["sha256"][:12]}), first turns ({q["turns_left_out"]} later '
    'turns left out).'
  )


def _times(x: intervals.Interval) -> str:
  if x.value is None:
    return x.outcome
  return f'{"~" * (x.outcome not in ("win", "loss"))}{x.value:.2f}x'


def _number(counts: metrics.Summary) -> str:
  x = counts.block_efficiency
  return '-' if x is None else f'{x:.2f}'
