"""The cells of the methods experiment as a table."""

import re
from typing import Any

from experiments import page
from specdec_jax.bench import metrics, tables


def markdown(doc: dict[str, Any]) -> str:
  """A row for each method and rule: improvement and tokens a window."""
  warm = sorted({x['temperature'] for x in doc['cells']})
  at = {(x['name'], x['temperature']): x for x in doc['cells']}
  names = list(dict.fromkeys(x['name'] for x in doc['cells']))
  first = next((x['rule'] for x in doc['cells'] if x['lossless']), '')
  head = ['drafter', 'rule', *(f'T = {t:g}' for t in warm), 'alpha', 'differs']
  rows = []
  for name in names:
    found = [at.get((name, t)) for t in warm]
    some = [x for x in found if x]
    alphas = [f'{x["alpha"]["alpha"]:.2f}' for x in some]
    rows.append(
      [
        some[0]['drafter'],
        some[0]['rule'] + ('' if some[0]['lossless'] else ' (LOSSY)'),
        *(_cell(x, first) for x in found),
        ' '.join(alphas),
        _differs(some),
      ]
    )
  return '\n'.join([_caption(doc), '', *page.table(head, rows)])


def _cell(x: dict[str, Any] | None, first: str) -> str:
  if x is None:
    return f'= {first}'
  gain = x['improvement']
  outcome = metrics.outcome(gain)
  if outcome == 'too short':
    times = outcome
  else:
    around = {'win': '**{}**', 'draw': '~{}'}.get(outcome, '{}')
    times = around.format(f'{gain["median"]:.2f}x')
  off = '' if x['lossless'] else f', TV {tables.distance(x)}'
  return f'{times} ({x["block_efficiency"]:.2f}{off})'


def _differs(cells) -> str:
  """What was compared with plain decoding, over the temperatures."""
  told = (page.plain(tables.identity([x])) for x in cells)
  # How far is in each cell.
  return '; '.join(dict.fromkeys(re.sub(', TV [^ ]+', '', x) for x in told))


def _caption(doc: dict[str, Any]) -> str:
  s = doc['setting']
  return (
    f'{page.made_on(doc["machine"])} {s["target"]}, {s["dtype"]}; '
    f'gamma {s["gamma"]}, {s["judged_prompts"]} built-in '
    f'prompts, {s["max_new_tokens"]} new tokens at most, '
    f'{s["repeats"]} repeats. Improvement over plain decoding (tokens a '
    'window); bold: a win in every repeat, ~: too close to call. early_exit '
    f'drafts with {s["exit"]} layers. TV: how far a token is from the '
    "target's law."
  )
