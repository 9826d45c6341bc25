"""Table 2 with the columns of table 4."""

from collections.abc import Mapping
from typing import Any

from experiments import claims as claims_lib
from experiments import empirical, papers
from experiments.leviathan_table2 import measure
from experiments.page import Part
from experiments.rows import Cells, Rows
from specdec_jax.bench import intervals
from specdec_jax.costs import cost


def _over(x: Mapping[str, Any]) -> str | None:
  """Measured over corrected, and its parts: a window's tokens, and the rest."""
  if (speed := x['measured']['value']) is None:
    return None
  expected = cost.expected_tokens(min(x['alpha'], 1.0), x['gamma'])
  over, accepted = speed / x['corrected'], x['block_efficiency'] / expected
  return f'{over:.2f} = {accepted:.2f} x {over / accepted:.2f}'


def _differ(x: Mapping[str, Any]) -> str:
  if x['promised'] != 'tokens':
    return 'same distribution'
  bugs = f', {x["bugs"]} BUG' if x['bugs'] else ''
  return f'{x["differ"]} of {x["texts"]}{bugs}'


SPEED = (
  'target, draft, T=temperature:g, gamma, alpha:.2f, c:.2f, v:.2f, '
  'theorem 3.8=theorem:.2fx, corrected:.2fx, measured:.2fx, '
  'with encoding=whole.value:.2fx, over corrected=over'
)
QUALITY = (
  'target, draft, T=temperature:g, plain=quality.0:.1f, '
  'speculated=quality.1:.1f, change:+.1f, differ=texts'
)
THEIRS = (
  'task, draft, T=temperature, gamma, alpha:.2f, c:.2f, EXP=exp:.1fx, '
  'SPEED=emp:.1fx'
)


def parts(cells: Cells, every: Rows) -> list[Part]:
  ours = [
    x | {'over': _over(x), 'texts': _differ(x)}
    for x in empirical.lines(cells, every)
  ]
  return [
    Part(
      'Speed of ours. gamma is the best by the corrected prediction on other '
      'prompts; corrected is equation 1 over gamma c + v; measured is decoding '
      'at batch 1 over plain decoding, with its 95 % interval, with encoding '
      'whole requests; over corrected is split into tokens a window and time.',
      SPEED,
      ours,
    ),
    Part(
      'Texts of ours: quality of those that are timed, at T = 1 of all that '
      'have references, with the 95 % interval of the change; differ: those '
      "that are not plain decoding's.",
      QUALITY,
      ours,
    ),
    Part(
      'Theirs, T5-XXL: SPEED of table 2, c and EXP of table 4.',
      THEIRS,
      papers.TABLE4,
    ),
  ]


def claims(cells: Cells, every: Rows) -> list[claims_lib.Claim]:
  """SPEED of the rows that are of the paper's task."""
  return [
    _claim(theirs, f'{every[name].name}, {draft.name}', x)
    for theirs in papers.TABLE4
    for name, draft in empirical.beside(every, cells, theirs.task, theirs.draft)
    for x in cells[name]
    if (x['draft'], x['temperature']) == (draft.name, theirs.temperature)
  ]


def _claim(theirs: papers.Row, place: str, x: Mapping[str, Any]):
  ours = intervals.Interval(**x['measured'])
  return claims_lib.Claim(
    f'{theirs.task}, {theirs.draft}, T = {theirs.temperature}',
    f'{theirs.emp:.1f}x',
    place,
    *papers.printed(theirs.emp, 1),
    ours=ours,
    form='{:.2f}x',
    against='1x',
    sign=1,
    apart=claims_lib.minus(ours, 1.0),
    why=_inputs(theirs, x),
  )


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


TABLE = empirical.Table(
  'leviathan_table2',
  measure.measure,
  parts,
  claims,
  why='small drafts are accepted less, and on a CPU a pass over several '
  'tokens costs more than one over a single token',
)
