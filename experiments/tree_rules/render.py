"""Renders the rules' document as two tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import page, resampled
from specdec_jax.bench import tables


def markdown(doc: Mapping[str, Any]) -> str:
  """Writes shares of the optimum, then a real pair's tokens a window."""
  return '\n'.join(
    [
      *(_exact(doc['exact']) if 'exact' in doc else ['Exact: not run yet.']),
      '',
      *(
        _measured(doc['measured'])
        if 'measured' in doc
        else ['Measured: not run yet.']
      ),
    ]
  )


def _exact(found: Mapping[str, Any]) -> list[str]:
  """Writes what each rule reaches, a row for each tree and kind of siblings."""
  rows, groups = [], {}
  for row in found['rows']:
    groups.setdefault((row['levels'], row['kind']), []).append(row)
  rules = list(dict.fromkeys(row['rule'] for row in found['rows']))
  for (levels, kind), own in groups.items():
    of = {row['rule']: _shares(row['families']) for row in own}
    best = np.mean([x[0] for x in own[0]['families'].values()])
    rows.append([levels, kind, f'{best:.3f}', *(of.get(x, '-') for x in rules)])
  about = (
    f'{page.made_on(found["machine"])} Exact, float64: {found["each"]} '
    'problems of each of 12 families of p and q. optimum: tokens that the best '
    'rule accepts of such a tree, the mean of the families. Of each rule its '
    'share of that, the mean of the families (the worst problem, its family).'
  )
  return [
    about,
    '',
    *tables.grid(['tree', 'siblings', 'optimum', *rules], rows),
  ]


def _shares(families: Mapping[str, Sequence[float | None]]) -> str:
  """Writes the mean share of the optimum, and the least with its family."""
  some = {name: x for name, x in families.items() if x[1] is not None}
  mean = np.mean([x[1] for x in some.values()])
  least, name = min((x[2], name) for name, x in some.items())
  worst = f' ({least:.3f}, {name})' if least < 0.9995 else ''
  return f'{mean:.3f}{worst}'


def _measured(found: Mapping[str, Any]) -> list[str]:
  """Writes a row for each tree and rule: tokens a window by temperature."""
  cells = {
    (x['tree'], x['rule'], x['temperature']): x['requests']
    for x in found['cells']
  }
  warmths = sorted({x for _, _, x in cells})
  first = next((rule for _, rule, _ in cells), '')
  rows = [
    [
      tree if ',' in tree else f'chain of {tree}',
      rule,
      *(
        f'= {first}'
        if not x and rule != first
        else _tokens(cells.get((tree, rule, x)))
        for x in warmths
      ),
    ]
    for tree, rule in dict.fromkeys(x[:2] for x in cells)
  ]
  q = found['questions']
  about = (
    f'{page.made_on(found["machine"])} Measured: {found["target"]} with its '
    f'EAGLE draft, {page.asked(q)}, first turns, {found["new"]} new tokens at '
    'most. Tokens a window (block efficiency), with 95 % intervals over '
    'questions.'
  )
  head = ['tree', 'rule', *(f'T = {x:g}' for x in warmths)]
  return [about, '', *tables.grid(head, rows)]


def _tokens(requests: Sequence[Sequence[int]] | None) -> str:
  if requests is None:
    return 'not run'
  tokens, passes = np.array(requests).T
  drawn = resampled.draws(len(requests))
  value_R = (drawn @ tokens) / (drawn @ passes)
  return tables.interval(resampled.interval(value_R, len(requests)))
