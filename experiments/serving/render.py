"""Renders the load test's document as a page and a figure."""

from collections.abc import Mapping
from typing import Any

from experiments import page, plots


def markdown(doc: Mapping[str, Any]) -> str:
  """Writes what was asked and how much of it was wrong, and the waits."""
  kinds = ', '.join(f'{n} {kind}' for kind, n in doc['kinds'].items())
  bad = sum(doc['wrong'].values())
  about = (
    f'{page.made_on(doc["machine"])} {doc["target"]}, {doc["drafter"]}.\n\n'
    f'{doc["requests"]} requests ({kinds}) of {doc["clients"]} clients: {bad} '
    f'not as they should be; {doc["told_to_wait"]} times told to wait; memory '
    f'at the end {doc["memory_grown"]:.3f} times that of the first half.'
  )
  columns = (
    'clients, speculation, tokens a second=tokens_per_second:.1f, '
    'over plain=ratio:.2fx, first token p50=ttft_p50_ms:.0f, '
    'p95=ttft_p95_ms:.0f, init of p95=init_share:.1%, '
    'between tokens p50=itl_p50_ms:.1f, p95=itl_p95_ms:.1f'
  )
  return page.text(page.Part(about, columns, doc['cells']))


def figure(doc: Mapping[str, Any]) -> bytes:
  """Draws tokens a second by clients as a PNG, with speculation and without."""

  def paint(axes: plots.Axes) -> None:
    for k, how in enumerate(('off', 'on')):
      some = [x for x in doc['cells'] if x['speculation'] == how]
      xy = ([x[y] for x in some] for y in ('clients', 'tokens_per_second'))
      axes.plot(*xy, color=plots.COLOURS[k], marker=plots.MARKS[k], label=how)
    axes.set_ylim(bottom=0)
    axes.set_xscale('log', base=2)
    counts = sorted({x['clients'] for x in doc['cells']})
    axes.set_xticks(counts, counts)
    axes.legend(title='speculation', frameon=False)
    plots.label(
      axes,
      'clients',
      'tokens a second, of all together',
      'What does speculation add, by how many clients a server has?',
    )

  return plots.png(paint)
