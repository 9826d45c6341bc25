"""Renders the rules' document as two tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import page, resampled
from specdec_jax.bench import tables


def markdown(doc: Mapping[str, Any]) -> str:
  """Writes shares of the optimum, then a real pair's tokens a window."""
  return '\n\n'.join(
    write(doc[name]) if name in doc else f'{name.capitalize()}: not run yet.'
    for name, write in (('exact', _exact), ('measured', _measured))
  )


def _exact(found: Mapping[str, Any]) -> str:
  """Writes what each rule reaches, a row for each tree and kind of siblings."""
  groups, rows = {}, []
  for row in found['rows']:
    own = groups.setdefault((row['levels'], row['kind']), {})
    own[row['rule']] = row['families']
  rules = list(dict.fromkeys(row['rule'] for row in found['rows']))
  for (levels, kind), own in groups.items():
    best = np.mean([x[0] for x in next(iter(own.values())).values()])
    shares = (_shares(own[x]) if x in own else '-' for x in rules)
    rows.append([levels, kind, f'{best:.3f}', *shares])
  about = (
    f'{page.made_on(found["machine"])} Exact, float64: {found["each"]} '
    'problems of each of 12 families of p and q. optimum: tokens that the best '
    'rule accepts of such a tree, the mean of the families. Of each rule its '
    'share of that, the mean of the families (the worst problem, its family).'
  )
  head = ['tree', 'siblings', 'optimum', *rules]
  return '\n'.join([about, '', *tables.grid(head, rows)])


def _shares(families: Mapping[str, Sequence[float | None]]) -> str:
  """Writes the mean share of the optimum, and the least with its family."""
  some = {name: x for name, x in families.items() if x[1] is not None}
  mean = np.mean([x[1] for x in some.values()])
  least, name = min((x[2], name) for name, x in some.items())
  worst = f' ({least:.3f}, {name})' if least < 0.9995 else ''
  return f'{mean:.3f}{worst}'


def _measured(found: Mapping[str, Any]) -> str:
  """Writes a row for each tree and rule: tokens a window by temperature."""
  cells = {
    (x['tree'], x['rule'], x['temperature']): x['requests']
    for x in found['cells']
  }
  warmths = sorted({x for _, _, x in cells})
  first = next((rule for _, rule, _ in cells), '')
  rows = []
  for tree, rule in dict.fromkeys(x[:2] for x in cells):
    at = {x: _tokens(cells.get((tree, rule, x))) for x in warmths}
    if rule != first and 0 in at:
      at[0] = f'= {first}'
    name = tree if ',' in tree else f'chain of {tree}'
    rows.append([name, rule, *at.values()])
  q = found['questions']
  about = (
    f'{page.made_on(found["machine"])} Measured: {found["target"]} with its '
    f'EAGLE draft, {page.asked(q)}, first turns, {found["new"]} new tokens at '
    'most. Tokens a window (block efficiency), with 95 % intervals over '
    'questions.'
  )
  head = ['tree', 'rule', *(f'T = {x:g}' for x in warmths)]
  return '\n'.join([about, '', *tables.grid(head, rows)])


def _tokens(requests: Sequence[Sequence[int]] | None) -> str:
  if requests is None:
    return 'not run'
  tokens, passes = np.array(requests).T
  drawn = resampled.draws(len(requests))
  value_R = (drawn @ tokens) / (drawn @ passes)
  return tables.interval(resampled.interval(value_R, len(requests)))
