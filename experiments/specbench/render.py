"""The benchmark's document in the layout of Spec-Bench's tables."""

from collections.abc import Mapping
from typing import Any

from experiments import page
from specdec_jax.bench import intervals


def markdown(doc: Mapping[str, Any]) -> str:
  """Tables of improvement (in Spec-Bench's layout) and tokens a window.

  doc: the benchmark's, as its JSON is read, with 'questions' described.
  """
  columns = list(dict.fromkeys(c['category'] for c in doc['categories']))
  cells = {(c['name'], c['category']): c for c in doc['categories']}
  plain = ['1.00x'] * len(columns)
  speed = [['plain decoding', *plain, '1.00', '1.00x', '', '']]
  tokens = []
  for row in doc['rows']:
    if not row['gamma']:
      continue
    off = page.distance(row['alpha'])
    lossy = '' if doc['setting']['lossless'] else f' (LOSSY, TV {off})'
    found = [cells[row['name'], column] for column in columns]
    gain, mat = intervals.Interval(**row['improvement']), _number(row)
    ends = '' if gain.low is None else f'{gain.low:.2f}-{gain.high:.2f}'
    name, times = row['name'] + lossy, [_times(c) for c in found]
    differ = page.differing(row['audit'])
    speed.append([name, *times, mat, _times(row), ends, differ])
    tokens.append([name, *map(_number, found), mat])
  head = ['method', *columns]
  return '\n'.join(
    [
      _caption(doc),
      '',
      'Improvement (~: its 95 % interval holds 1, or it has none: of fewer '
      'than 6 prompts); '
      'differing: texts that are not those of plain decoding:',
      '',
      *page.table([*head, '#MAT', 'overall', '95 %', 'differing'], speed),
      '',
      'block_efficiency:',
      '',
      *page.table([*head, 'overall'], tokens),
    ]
  )


def _caption(doc: Mapping[str, Any]) -> str:
  s, q, plain = doc['setting'], doc['questions'], doc['rows'][0]['tok_s']
  warm = s['sampling']['temperature']
  kind = f'temperature {warm}' if warm else 'greedy'
  draft = f', draft {s["draft"]}' if s['draft'] else ''
  speed = '' if plain is None else f'; plain decoding {plain:.1f} tok/s'
  return (
    f'{page.made_on(doc["machine"])} {s["target"]}, {s["dtype"]}{draft}; '
    f'{kind}, rule {s["rule"]}, batch {s["batch_size"]}, '
    f'{s["max_new_tokens"]} new tokens at most, {s["repeats"]} repeats{speed}. '
    f'{q["questions"]} questions of {q["file"]} (sha256 {q["sha256"][:12]}), '
    f'first turns ({q["turns_left_out"]} later turns left out).'
  )


def _times(x: Mapping[str, Any]) -> str:
  gain = intervals.Interval(**x['improvement'])
  return f'{"~" * (gain.outcome not in ("win", "loss"))}{gain.value:.2f}x'


def _number(x: Mapping[str, Any]) -> str:
  found = x['counts']['block_efficiency']
  return '-' if found is None else f'{found:.2f}'
