"""The cells of the methods experiment as a table."""

from typing import Any, NamedTuple

from experiments import page
from specdec_jax import metrics
from specdec_jax.bench import identity, intervals, predict, tables
from specdec_jax.bench import plan as plan_lib


class Cell(NamedTuple):
  """A drafter under a rule at one temperature; tok_s is plain decoding's."""

  name: str
  drafter: str
  rule: str
  lossless: bool
  temperature: float
  improvement: intervals.Interval
  tok_s: float | None
  counts: metrics.Summary
  alpha: predict.Alpha | None
  audit: identity.Audit
  failed: list[identity.Failure]


class Document(NamedTuple):
  """exit: layers that early_exit drafts with."""

  machine: dict[str, Any]
  setting: plan_lib.Setting
  gamma: int
  exit: int
  cells: list[Cell]


def markdown(doc: Document) -> str:
  """A row for each method and rule: improvement and tokens a window."""
  warm = sorted({x.temperature for x in doc.cells})
  at = {(x.name, x.temperature): x for x in doc.cells}
  first = next((x.rule for x in doc.cells if x.lossless), '')
  head = ['drafter', 'rule', *(f'T = {t:g}' for t in warm), 'alpha', 'differs']
  rows = []
  for name in dict.fromkeys(x.name for x in doc.cells):
    found = [at.get((name, t)) for t in warm]
    some = [x for x in found if x]
    rows.append(
      [
        some[0].drafter,
        some[0].rule + ('' if some[0].lossless else ' (LOSSY)'),
        *(_cell(x, first) for x in found),
        ' '.join(f'{x.alpha.alpha:.2f}' if x.alpha else '-' for x in some),
        _differs(some),
      ]
    )
  return '\n'.join([_caption(doc), '', *page.table(head, rows)])


def _cell(x: Cell | None, first: str) -> str:
  if x is None:
    return f'= {first}'
  times = x.improvement.outcome
  if times != 'too short':
    around = {'win': '**{}**', 'loss': '{}'}.get(times, '~{}')
    times = around.format(f'{x.improvement.value:.2f}x')
  off = f', TV {tables.distance(x.alpha)}' if x.alpha and not x.lossless else ''
  return f'{times} ({x.counts.block_efficiency:.2f}{off})'


def _differs(cells: list[Cell]) -> str:
  """The comparison with plain decoding, over the temperatures."""
  told = (tables.identity([x.audit], failed=len(x.failed)) for x in cells)
  return '; '.join(dict.fromkeys(map(page.plain, told)))


def _caption(doc: Document) -> str:
  s = doc.setting
  return (
    f'{page.made_on(doc.machine)} {s.target}, {s.dtype}; gamma {doc.gamma}, '
    f'{s.judged_prompts} built-in prompts, {s.max_new_tokens} new tokens at '
    f'most, {s.repeats} repeats. Improvement over plain decoding (tokens a '
    'window); bold: a win, ~: too close to call, at 95 % over prompts for all '
    'cells at once. '
    f'early_exit drafts with {doc.exit} layers. TV: total variation between '
    'what is '
    "emitted and the target's distribution."
  )
