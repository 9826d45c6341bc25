"""Table 1 with ours beside it, and figure 1."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import claims as claims_lib
from experiments import page, papers, plots
from experiments import rows as rows_lib
from specdec_jax.bench import intervals

HEAD = [
  *('text', 'draft', 'sampling', 'K', 'ROUGE-2, plain', 'speculated'),
  *('ms a token, plain', 'speculated', 'speed', '95 %', 'tokens a window'),
]


def markdown(cells: rows_lib.Cells, every: rows_lib.Rows, caption: str) -> str:
  lines = []
  for x in papers.CHEN:
    lines.append(
      [x.text, '4B for 70B', x.sampling, papers.CHEN_K, x.plain, x.speculated]
      + [f'{x.plain_ms:.1f}', f'{x.ms:.2f}', f'**{x.speed:.2f}x**', '-', '-']
    )
  for name, found in cells.items():
    lines += [_ours(every[name].name, x) for x in found]
  home = 'bash experiments/chen_table1/run.sh'
  lost = [x for x in ('xsum', 'humaneval') if x not in cells]
  return '\n'.join(
    [
      f"{caption} First the paper's rows (HumanEval: share of functions that "
      'pass, which is not measured here), then ours; decoding at batch 1.',
      '',
      *page.table(HEAD, lines),
      '',
      *(f'* {x}: not run; `{home} --rows={x} --{x}=FILE`' for x in lost),
      "* The paper's target, Chinchilla of 70B: not run, its weights are "
      f'not published; your own: `{home} --target=SOURCE --draft=SOURCE`.',
    ]
  )


def _ours(name: str, x: Mapping[str, Any]) -> list[object]:
  speed = intervals.Interval(*x['speed'].values())
  ends = '-' if speed.low is None else f'{speed.low:.2f} to {speed.high:.2f}'
  show = lambda y, form: '-' if y is None else form.format(y)
  return [
    *(name, x['draft'], x['sampling'], x['k']),
    *(f'{np.mean(y):.3f}' if y else '-' for y in x['rouge']),
    *(show(y, '{:.2f}') for y in x['ms']),
    *(f'**{show(speed.value, "{:.2f}x")}**', ends),
    show(x['efficiency'], '{:.2f}'),
  ]


def claims(
  cells: rows_lib.Cells, every: rows_lib.Rows
) -> list[claims_lib.Claim]:
  """Speed at the paper's K, and what speculation changes in ROUGE-2."""
  out = []
  for theirs in papers.CHEN:
    for name, found in cells.items():
      if every[name].theirs != theirs.text:
        continue
      for x in found:
        if (x['sampling'], x['k']) == (theirs.sampling, papers.CHEN_K):
          out += _claims(theirs, every[name].name, x)
  return out


def _claims(theirs: papers.Chen, name: str, x: Mapping[str, Any]):
  speed = intervals.Interval(*x['speed'].values())
  cell, place = f'{theirs.text}, {theirs.sampling}', f'{name}, {x["draft"]}'
  yield claims_lib.Claim(
    f'{cell}: speed',
    f'{theirs.speed:.2f}x',
    place,
    *papers.printed(theirs.speed, 2),
    ours=speed,
    form='{:.2f}x',
    against='1x',
    sign=1,
    apart=claims_lib.minus(speed, 1.0),
    why=f'{x["efficiency"]:.2f} tokens a window',
  )
  plain, mine = (np.asarray(y) for y in x['rouge'])
  if len(plain):
    change = theirs.speculated - theirs.plain
    ours_R = intervals.draws(len(plain)) @ (mine - plain) / len(plain)
    yield claims_lib.Claim(
      f'{cell}: change of ROUGE-2',
      f'{change:+.3f}',
      place,
      change - 1e-3,  # of two numbers that round
      change + 1e-3,
      intervals.interval(ours_R, len(plain)),
      form='{:+.3f}',
    )


def figure(cells: rows_lib.Cells) -> bytes:
  """Figure 1 against K, of the first row: curves replayed, points measured."""
  name, found = next(iter(cells.items()))
  lines: dict[str, list[Any]] = {}
  for x in found:
    lines.setdefault(f'{x["draft"]}, {x["sampling"]}', []).append(x)

  def panel(measured, replayed, title):
    def paint(axes: plots.Axes) -> None:
      for i, (label, row) in enumerate(lines.items()):
        ks = [x['k'] for x in row]
        axes.plot(ks, [measured(x) for x in row], plots.MARKS[i % 5], color='0')
        if replayed and (curve := replayed(row)):
          plots.curve(axes, *curve, label, i, marker='')
        else:
          plots.curve(axes, ks, [measured(x) for x in row], label, i)
      plots.label(axes, '', '', title)

    return paint

  panels = (
    panel(_ms, _ms_curve, 'ms for 128 tokens'),
    panel(lambda x: x['efficiency'] / (x['k'] + 1), _share, 'tokens / (K + 1)'),
    panel(_loop, None, 'ms a window'),
  )
  caption = f'K, on {name}: points measured, lines without marks replayed'
  return plots.stacked(panels, size=(6.4, 8.0), caption=caption)


def _ms(x: Mapping[str, Any]) -> float:
  return float('nan') if x['ms'][1] is None else 128 * x['ms'][1]


def _loop(x: Mapping[str, Any]) -> float:
  return _ms(x) / 128 * x['efficiency']


def _share(row) -> tuple[list[int], list[float]] | None:
  """(K, replayed tokens a window over K + 1); None without a curve."""
  curve = row[0]['curve']
  ks = list(range(1, len(curve) + 1))
  shares = [y / (k + 1) for k, y in zip(ks, curve, strict=True)]
  return (ks, shares) if ks else None


def _ms_curve(row) -> tuple[list[int], list[float]] | None:
  """(K, ms for 128 tokens): replayed windows, between measured window times."""
  measured = [x['k'] for x in row]
  curve = row[0]['curve'][: measured[-1]]
  ks = list(range(1, len(curve) + 1))
  loop = np.interp(ks, measured, [_loop(x) for x in row])
  times = [128 / y * t for y, t in zip(curve, loop.tolist(), strict=True)]
  return (ks, times) if ks else None
