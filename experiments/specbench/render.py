"""Renders the benchmark's document in the layout of Spec-Bench's tables."""

from collections.abc import Mapping
from typing import Any

from experiments import page, papers, plots
from specdec_jax.bench import intervals, tables

Row = dict[str, Any]
TOKENS = 'counts.block_efficiency'


def markdown(doc: Mapping[str, Any]) -> str:
  """Writes what wins, a picture and tables; doc: with 'questions' described."""
  names = list(dict.fromkeys(x['category'] for x in doc['categories']))
  of = {(x['name'], x['category']): x for x in doc['categories']}
  lossy = '' if doc['setting']['lossless'] else ' (LOSSY, TV {})'
  rows = [
    row
    | {
      'method': row['name'] + lossy.format(page.away(row['alpha'])),
      'by': [of[row['name'], name] for name in names],
      'differing': page.differing(row['audit']),
    }
    for row in _drafted(doc)
  ]
  speed: list[tables.Column] = [
    *tables.columns('method'),
    *((name, f'by.{i}.improvement', _times) for i, name in enumerate(names)),
    *tables.columns(f'#MAT={TOKENS}:.2f, overall=improvement:.2fx, differing'),
  ]
  tokens: list[tables.Column] = [
    *tables.columns('method'),
    *((name, f'by.{i}.{TOKENS}', '{:.2f}') for i, name in enumerate(names)),
    *tables.columns(f'overall={TOKENS}:.2f'),
  ]
  best = max(rows, key=lambda x: x['improvement']['value'])
  return '\n\n'.join(
    [
      f'**{best["method"]} is the fastest: '
      f'{tables.show(best["improvement"], "{:.2f}x")} plain decoding; texts '
      f'that differ from it: {best["differing"]}.**',
      '![Ours beside theirs](results/specbench.png)',
      'Improvement (~: its 95 % interval holds 1, or it has none: of fewer '
      'than 6 prompts); '
      'differing: texts that are not those of plain decoding:',
      '\n'.join(tables.markdown(rows, speed)),
      'block_efficiency:',
      '\n'.join(tables.markdown(rows, tokens)),
      _caption(doc),
    ]
  )


def figure(doc: Mapping[str, Any]) -> bytes:
  """Draws every method of ours over all questions as a PNG, and theirs."""
  ours, theirs = _drafted(doc), papers.SPEC_BENCH
  found = [intervals.Interval(**x['improvement']) for x in ours]

  def paint(axes: plots.Axes) -> None:
    own = [x['name'] for x in ours]
    plots.rows(axes, [*own, *(f'theirs: {x}' for x in theirs)])
    plots.whiskers(axes, found, 'ours, 95 %', 0)
    at = range(len(own), len(own) + len(theirs))
    axes.plot([*theirs.values()], at, plots.MARKS[1], color=plots.COLOURS[1])
    axes.axvline(1, color=plots.PALE, linewidth=0.8, zorder=0)
    plots.label(axes, 'times plain decoding, all questions', '')

  return plots.png(paint, size=(6.4, 1.0 + 0.25 * (len(ours) + len(theirs))))


def _drafted(doc: Mapping[str, Any]) -> list[Row]:
  return [x for x in doc['rows'] if x['gamma']]


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
    f'{page.asked(q)}, first turns ({q["turns_left_out"]} later turns left '
    'out).'
  )


def _times(x: Mapping[str, Any]) -> str:
  gain = intervals.Interval(**x)
  return f'{page.near(gain)}{gain.value:.2f}x'
