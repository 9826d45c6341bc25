"""Table 2 with the columns of table 4, ours below theirs."""

from collections.abc import Mapping
from typing import Any

from experiments import claims as claims_lib
from experiments import empirical, page, papers
from experiments import rows as rows_lib
from specdec_jax.bench import intervals
from specdec_jax.costs import cost

HEAD = [
  *('task', 'draft', 'T', 'gamma', 'alpha', 'c', 'v', 'theorem 3.8'),
  *('corrected', 'measured', '95 %', 'with encoding', 'over corrected'),
  *('quality, plain', 'speculated', 'change, 95 %', 'differ'),
]  # fmt: skip


def markdown(cells: rows_lib.Cells, every: rows_lib.Rows, caption: str) -> str:
  lines = []
  for x in papers.TABLE4:
    emp = f'**{x.emp:.1f}x**'
    lines.append(
      [f'{x.task}, T5-XXL', x.draft, x.temperature, x.gamma, f'{x.alpha:.2f}']
      + [f'{x.c:.2f}', '-', f'{x.exp:.1f}x', '-', emp, *['-'] * 7]
    )
  for name, found in cells.items():
    lines += [_ours(every[name], x) for x in found]
  return '\n'.join(
    [
      f"{caption} First the paper's rows (SPEED of table 2; c and EXP of "
      'table 4), then ours: gamma is the best by the corrected prediction on '
      'other prompts; corrected is equation 1 over gamma c + v; measured is '
      'decoding at batch 1 over plain decoding, with encoding whole requests; '
      'over corrected is split into tokens a window and time. quality: of the '
      'texts that are timed, at T = 1 of all that have references, with the '
      'interval of the change. '
      'differ: texts that are not those of plain decoding.',
      '',
      *page.table(HEAD, lines),
      '',
      *empirical.not_run(every, cells, 'leviathan_table2'),
    ]
  )  # fmt: skip


def claims(
  cells: rows_lib.Cells, every: rows_lib.Rows
) -> list[claims_lib.Claim]:
  """SPEED of the rows that are of the paper's task."""
  out = []
  for theirs in papers.TABLE4:
    found = empirical.beside(every, cells, theirs.task, theirs.draft)
    for name, draft in found:
      for x in cells[name]:
        if (x['draft'], x['temperature']) != (draft.name, theirs.temperature):
          continue
        ours = intervals.Interval(*x['measured'].values())
        out.append(
          claims_lib.Claim(
            f'{theirs.task}, {theirs.draft}, T = {theirs.temperature}',
            f'{theirs.emp:.1f}x',
            f'{every[name].name}, {draft.name}',
            *papers.printed(theirs.emp, 1),
            ours=ours,
            form='{:.2f}x',
            against='1x',
            sign=1,
            apart=claims_lib.minus(ours, 1.0),
            why=_inputs(theirs, x),
          )
        )
  return out


def _inputs(theirs: papers.Row, x: Mapping[str, Any]) -> str:
  """By what factor each input of ours, alone, changes the paper's prediction.

  At the paper's gamma; v(gamma + 1) is 1 in the paper.
  """
  base = {'alpha': theirs.alpha, 'c': theirs.c, 'v': 1.0}
  mine = {'alpha': min(x['alpha'], 1.0), 'c': x['c'], 'v': x['v']}
  expect = lambda given: cost.improvement(gamma=theirs.gamma, **given)
  factors = {
    name: expect(base | {name: mine[name]}) / expect(base) for name in base
  }
  told = [
    f'{name} {x[name]:.2f} for {base[name]:g}: x{factors[name]:.2f}'
    for name in sorted(factors, key=factors.__getitem__)
  ]
  return 'alone at their gamma, ' + ', '.join(told)


def _over(x: Mapping[str, Any], speed: float) -> str:
  """Measured over corrected, and its parts: a window's tokens, and the rest."""
  expected = cost.expected_tokens(min(x['alpha'], 1.0), x['gamma'])
  over, accepted = speed / x['corrected'], x['block_efficiency'] / expected
  return f'{over:.2f} = {accepted:.2f} x {over / accepted:.2f}'


def _ours(row: rows_lib.Row, x: Mapping[str, Any]) -> list[str]:
  speed, whole = (
    intervals.Interval(*x[k].values()) for k in ('measured', 'whole')
  )
  times = lambda y: 'too short' if y is None else f'{y:.2f}x'
  ends = '-' if speed.low is None else f'{speed.low:.2f} to {speed.high:.2f}'
  over = '-' if speed.value is None else _over(x, speed.value)
  quality = ['-' if y is None else f'{y:.1f}' for y in x['quality']]
  change = '-'
  if x['change']:
    change = '{low:+.1f} to {high:+.1f}'.format(**x['change'])
  differ = 'same distribution'
  if x['promised'] == 'tokens':
    bugs = f', {x["bugs"]} BUG' if x['bugs'] else ''
    differ = f'{x["differ"]} of {x["texts"]}{bugs}'
  return [
    *(row.name, x['draft'], f'{x["temperature"]:g}', str(x['gamma'])),
    *(f'{x["alpha"]:.2f}', f'{x["c"]:.2f}', f'{x["v"]:.2f}'),
    *(times(x['theorem']), times(x['corrected']), f'**{times(speed.value)}**'),
    *(ends, times(whole.value), over, *quality, change, differ),
  ]  # fmt: skip
