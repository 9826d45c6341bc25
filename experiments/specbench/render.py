"""The benchmark's document in the layout of Spec-Bench's tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import page
from specdec_jax.bench import metrics, tables


def table(doc: dict[str, Any], ids: Mapping[str, list[str]]) -> dict[str, Any]:
  """By method: improvement, block_efficiency and identical, by category.

  ids: of each category's questions; its order is the columns'.

  improvement is tokens over seconds of all questions of a column, over plain
  decoding's. identical: [texts that are plain decoding's, texts], or what the
  rule keeps if it does not promise that.
  """
  methods, lossless = [], doc['setting']['lossless']
  for row in doc['rows']:
    if not row['gamma']:
      continue
    cells = {
      c['category']: {
        'questions': c['prompts'],
        'improvement': c['improvement']['median'],
        'outcome': metrics.outcome(c['improvement']),
        'block_efficiency': c['block_efficiency'],
        'identical': _identical(row, ids[c['category']]),
      }
      for c in doc['categories']
      if c['name'] == row['name']
    }
    overall = {
      'questions': sum(x['questions'] for x in cells.values()),
      'improvement': row['improvement']['median'],
      'outcome': metrics.outcome(row['improvement']),
      'least': row['improvement']['min'],
      'most': row['improvement']['max'],
      'block_efficiency': row['block_efficiency'],
      'identical': _identical(row, sum(ids.values(), [])),
    }
    off = '' if lossless else f' (LOSSY, TV {tables.distance(row)})'
    methods.append({'name': row['name'] + off, 'by': cells, 'overall': overall})
  return {'columns': list(ids), 'methods': methods}


def _identical(row: dict[str, Any], ids: Sequence[str]) -> Any:
  audit = row['audit']
  if audit['promised'] != 'tokens':
    return page.plain(tables.identity([row]))
  differing = {x['id'] for x in audit['findings']} & set(ids)
  return [len(ids) - len(differing), len(ids)]


def markdown(doc: dict[str, Any]) -> str:
  """The improvement as Spec-Bench has it; block_efficiency and identity."""
  t = doc['table']
  speed = [['method', *t['columns'], '#MAT', 'overall', 'least to most']]
  speed.append(
    ['plain decoding', *['1.00x'] * len(t['columns']), '1.00', '1.00x', '']
  )
  for m in t['methods']:
    o = m['overall']
    cells = [_times(m['by'][c]) for c in t['columns']]
    ends = '' if o['least'] is None else f'{o["least"]:.2f} to {o["most"]:.2f}'
    mat = _number(o['block_efficiency'])
    speed.append([m['name'], *cells, mat, _times(o), ends])
  return '\n'.join(
    [
      _caption(doc),
      '',
      'Improvement (~: repeats on both sides of 1, or within 2 % of it):',
      '',
      *page.table(speed[0], speed[1:]),
      '',
      'block_efficiency:',
      '',
      *_by(t, lambda x: _number(x['block_efficiency'])),
      '',
      'Texts identical to plain decoding:',
      '',
      *_by(t, lambda x: _same(x['identical'])),
    ]
  )


def _by(t: dict[str, Any], cell: Callable[[dict[str, Any]], str]) -> list[str]:
  rows = []
  for m in t['methods']:
    found = [*(m['by'][c] for c in t['columns']), m['overall']]
    rows.append([m['name'], *map(cell, found)])
  return page.table(['method', *t['columns'], 'overall'], rows)


def _caption(doc: dict[str, Any]) -> str:
  s, q = doc['setting'], doc['questions']
  x, plain = s['sampling'], doc['rows'][0]['tok_s']['median']
  law = 'greedy' if x['temperature'] == 0 else f'temperature {x["temperature"]}'
  draft = f', draft {s["draft"]}' if s['draft'] else ''
  speed = '' if plain is None else f'; plain decoding {plain:.1f} tok/s'
  return (
    f'{page.made_on(doc["machine"])} {s["target"]}, {s["dtype"]}{draft}; '
    f'{law}, rule {s["rule"]}, batch {s["batch_size"]}, '
    f'{s["max_new_tokens"]} new tokens at most, {s["repeats"]} '
    f'repeats{speed}. {q["questions"]} questions of {q["file"]} (sha256 '
    f'{q["sha256"][:12]}), first turns ({q["turns_left_out"]} later turns left '
    'out).'
  )


def _times(cell: dict[str, Any]) -> str:
  if cell['outcome'] == 'too short':
    return cell['outcome']
  return f'{"~" * (cell["outcome"] == "draw")}{cell["improvement"]:.2f}x'


def _number(x: float | None) -> str:
  return '-' if x is None else f'{x:.2f}'


def _same(x) -> str:
  return x if isinstance(x, str) else f'{x[0]} of {x[1]}'
