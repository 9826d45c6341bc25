"""Table 2 with the columns of table 4, ours below theirs."""

from collections.abc import Mapping
from typing import Any

from experiments import empirical, page, papers
from experiments import rows as rows_lib
from specdec_jax.bench import metrics

HEAD = [
  *('task', 'draft', 'T', 'gamma', 'alpha', 'c', 'v', 'theorem 3.8'),
  *('corrected', 'measured', '95 %', 'with encoding', 'over corrected'),
  *('quality, plain', 'speculated', 'differ'),
]  # fmt: skip


def markdown(
  cells: Mapping[str, Any], every: Mapping[str, rows_lib.Row], caption: str
) -> str:
  lines = []
  for x in papers.TABLE4:
    emp = f'**{x.emp:.1f}x**'
    lines.append(
      [f'{x.task}, T5-XXL', x.draft, x.temperature, x.gamma, f'{x.alpha:.2f}']
      + [f'{x.c:.2f}', '-', f'{x.exp:.1f}x', '-', emp, *['-'] * 6]
    )
  for name, found in cells.items():
    lines += [_ours(every[name], x) for x in found]
  return '\n'.join(
    [
      f"{caption} First the paper's rows (SPEED of table 2; c and EXP of "
      'table 4), then ours: gamma is the best by the corrected prediction on '
      'other prompts; corrected is equation 1 over gamma c + v; measured is '
      'decoding at batch 1 over plain decoding, with encoding whole requests. '
      'differ: texts that are not those of plain decoding.',
      '',
      *page.table(HEAD, lines),
      '',
      *empirical.not_run(every, cells, 'leviathan_table2'),
    ]
  )  # fmt: skip


def _ours(row: rows_lib.Row, x: Mapping[str, Any]) -> list[str]:
  speed, whole = (
    metrics.Interval(*x[k].values()) for k in ('measured', 'whole')
  )
  times = lambda y: 'too short' if y is None else f'{y:.2f}x'
  ends = '-' if speed.low is None else f'{speed.low:.2f} to {speed.high:.2f}'
  over = '-' if speed.value is None else f'{speed.value / x["corrected"]:.2f}'
  quality = ['-' if y is None else f'{y:.1f}' for y in x['quality']]
  differ = 'same distribution'
  if x['promised'] == 'tokens':
    bugs = f', {x["bugs"]} BUG' if x['bugs'] else ''
    differ = f'{x["differ"]} of {x["texts"]}{bugs}'
  return [
    *(row.name, x['draft'], f'{x["temperature"]:g}', str(x['gamma'])),
    *(f'{x["alpha"]:.2f}', f'{x["c"]:.2f}', f'{x["v"]:.2f}'),
    *(times(x['theorem']), times(x['corrected']), f'**{times(speed.value)}**'),
    *(ends, times(whole.value), over, *quality, differ),
  ]  # fmt: skip
