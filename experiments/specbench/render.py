"""The benchmark's document in the layout of Spec-Bench's tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import page
from specdec_jax.bench import benchmark, metrics, tables


class Cell(NamedTuple):
  """A method on the questions of one column, or on all.

  improvement: tokens over seconds of all its questions, over plain decoding's.
  identical: '3 of 4' texts are plain decoding's, or what the rule promises.
  """

  questions: int
  improvement: metrics.Spread
  block_efficiency: float | None
  identical: str


class Method(NamedTuple):
  name: str
  by: dict[str, Cell]
  overall: Cell


def methods(
  doc: benchmark.Document, ids: Mapping[str, Sequence[str]]
) -> list[Method]:
  """The cells of each method. ids: of the questions of each category."""
  out = []
  for row in doc.rows:
    if not row.gamma:
      continue
    by = {
      c.category: Cell(
        c.prompts,
        c.improvement,
        c.counts.block_efficiency,
        _identical(row, ids[c.category]),
      )
      for c in doc.categories
      if c.name == row.name
    }
    overall = Cell(
      sum(x.questions for x in by.values()),
      row.improvement,
      row.counts.block_efficiency,
      _identical(row, [id for some in ids.values() for id in some]),
    )
    off = f' (LOSSY, TV {tables.distance(row.alpha)})'
    out.append(Method(row.name + off * (not doc.setting.lossless), by, overall))
  return out


def _identical(row: benchmark.Row, ids: Sequence[str]) -> str:
  assert row.audit is not None
  if row.audit.promised != 'tokens':
    return tables.identity([row.audit], tables.distance(row.alpha))
  differing = {x.id for x in row.audit.findings} & set(ids)
  return f'{len(ids) - len(differing)} of {len(ids)}'


def markdown(
  doc: benchmark.Document,
  found: Sequence[Method],
  columns: Sequence[str],
  questions: Mapping[str, Any],
) -> str:
  """Tables of improvement (in Spec-Bench's layout), efficiency and identity.

  questions: from questions.describe.
  """
  head = ['method', *columns, '#MAT', 'overall', 'least to most']
  plain = ['plain decoding', *['1.00x'] * len(columns), '1.00', '1.00x', '']
  speed = [plain]
  for m in found:
    x = m.overall.improvement
    ends = '' if x.min is None else f'{x.min:.2f} to {x.max:.2f}'
    cells = [_times(m.by[c]) for c in columns]
    mat = _number(m.overall)
    speed.append([m.name, *cells, mat, _times(m.overall), ends])
  return '\n'.join(
    [
      _caption(doc, questions),
      '',
      'Improvement (~: repeats on both sides of 1, or within 2 % of it):',
      '',
      *page.table(head, speed),
      '',
      'block_efficiency:',
      '',
      *_by(found, columns, _number),
      '',
      'Texts identical to plain decoding:',
      '',
      *_by(found, columns, lambda x: x.identical),
    ]
  )


def _by(found, columns, cell: Callable[[Cell], str]) -> list[str]:
  rows = [
    [m.name, *(cell(m.by[c]) for c in columns), cell(m.overall)] for m in found
  ]
  return page.table(['method', *columns, 'overall'], rows)


def _caption(doc: benchmark.Document, q: Mapping[str, Any]) -> str:
  s, plain = doc.setting, doc.rows[0].tok_s.median
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


def _times(cell: Cell) -> str:
  x = cell.improvement
  if x.median is None:
    return x.outcome
  return f'{"~" * (x.outcome == "draw")}{x.median:.2f}x'


def _number(cell: Cell) -> str:
  x = cell.block_efficiency
  return '-' if x is None else f'{x:.2f}'
