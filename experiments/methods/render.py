"""Renders the methods experiment's document as a table."""

from collections.abc import Mapping
from typing import Any

from experiments import page
from specdec_jax.bench import intervals, tables


def markdown(doc: Mapping[str, Any]) -> str:
  """Writes a row for each method and rule: improvement, tokens a window."""
  warm = sorted({x['temperature'] for x in doc['cells']})
  at = {(x['name'], x['temperature']): x for x in doc['cells']}
  first = next((x['rule'] for x in doc['cells'] if x['lossless']), '')
  head = ['drafter', 'rule', *(f'T = {t:g}' for t in warm), 'alpha', 'differs']
  rows = []
  for name in dict.fromkeys(x['name'] for x in doc['cells']):
    found = [at.get((name, t)) for t in warm]
    some = [x for x in found if x]
    alphas = (x['alpha'] and x['alpha']['alpha'] for x in some)
    differ = (page.differing(x['audit'], len(x['failed'])) for x in some)
    rows.append(
      [
        some[0]['drafter'],
        some[0]['rule'] + ('' if some[0]['lossless'] else ' (LOSSY)'),
        *(_cell(x, first) for x in found),
        ' '.join('-' if x is None else f'{x:.2f}' for x in alphas),
        '; '.join(dict.fromkeys(differ)),
      ]
    )
  return '\n'.join([_caption(doc), '', *tables.grid(head, rows)])


def _cell(x: Mapping[str, Any] | None, first: str) -> str:
  if x is None:
    return f'= {first}'
  gain = intervals.Interval(**x['improvement'])
  around = {'win': '**{}**', 'loss': '{}'}.get(gain.outcome, '~{}')
  times = around.format(f'{gain.value:.2f}x')
  off = ''
  if x['alpha'] and not x['lossless']:
    off = f', TV {page.away(x["alpha"])}'
  return f'{times} ({x["counts"]["block_efficiency"]:.2f}{off})'


def _caption(doc: Mapping[str, Any]) -> str:
  s = doc['setting']
  return (
    f'{page.made_on(doc["machine"])} {s["target"]}, {s["dtype"]}; gamma '
    f'{doc["gamma"]}, {s["judged_prompts"]} built-in prompts, '
    f'{s["max_new_tokens"]} new tokens at most, {s["repeats"]} repeats. '
    'Improvement over plain decoding (tokens a window); bold: a win, ~: too '
    'close to call, at 95 % over prompts for all cells at once. early_exit '
    f'drafts with {doc["exit"]} layers. TV: total variation between what is '
    "emitted and the target's distribution."
  )
