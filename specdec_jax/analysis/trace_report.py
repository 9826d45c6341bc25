"""The figures of traces as tables, on stdout and in files."""

import importlib.util
import io
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import rich.box
import rich.console

from specdec_jax import runtime
from specdec_jax.bench import tables
from specdec_jax.io import files


def finish(docs: Sequence[dict[str, Any]], folder: pathlib.Path | None) -> bool:
  """Prints what trace_figures.analyse found, the JSON last; true.

  Into the folder: trace.md, trace.json and a figure for each trace, trace.png,
  trace_2.png, ...
  """
  out = {'traces': list(docs), 'verdict': [sentence(doc) for doc in docs]}
  _close(out, _analysis, docs, folder, 'trace')
  if folder:
    for i, doc in enumerate(docs):
      name = f'trace_{i + 1}.png' if i else 'trace.png'
      files.write(folder / name, _figure(doc))
  return True


def check_figures() -> None:
  """Raises ValueError where figures cannot be drawn."""
  if importlib.util.find_spec('matplotlib') is None:
    raise ValueError(
      'the figures of --workdir need matplotlib: install the extra `plots`, or '
      'leave --workdir out'
    )


def _figure(doc: dict[str, Any]) -> bytes:
  """Block efficiency by gamma under both rules, with its intervals: a PNG."""
  from specdec_jax.analysis import plots

  gammas = [row['gamma'] for row in doc['rows']]

  def paint(axes):
    for i, name in enumerate(doc['windows']):
      found = [row[name] for row in doc['rows']]
      if found[0]['low'] is not None:
        low, high = ([x[end] for x in found] for end in ('low', 'high'))
        axes.fill_between(gammas, low, high, color=plots.PALE, alpha=0.5, lw=0)
      plots.curve(axes, gammas, [x['value'] for x in found], name, i)
    title = f'{doc["requests"]} requests; pale: 95 % over them'
    plots.label(axes, 'gamma', 'block efficiency', title)

  return plots.png(paint)


def sentence(doc) -> str:
  """Where block verification gains most."""
  best = max(doc['rows'], key=lambda row: row['gain']['value'])
  target, draft = doc['trace']['labels']
  pair = f'{draft} for {target}'
  if best['gain']['value'] < 1e-9:
    return f'{pair}: block verification accepts what reject does.'
  return (
    f'{pair}: block verification gains most at gamma {best["gamma"]}: '
    f'{best["block"]["value"]:.3f} tokens a window instead of '
    f'{best["reject"]["value"]:.3f}, {_shown(best["gain"], "+.3f")}.'
  )


def finish_check(doc: dict[str, Any], folder: pathlib.Path | None) -> bool:
  """Prints what trace_figures.check found; true if every cell agrees.

  Into the folder: trace_check.md and trace_check.json.
  """
  wrong = [row for row in doc['cells'] if not row['covers']]
  width = max(
    row['difference']['high'] - row['difference']['low'] for row in doc['cells']
  )
  verdict = [
    f'{_cell(row)}: the trace says {row["counterfactual"]:.3f}, real decoding '
    f'{row["real"]:.3f}: they DISAGREE.'
    for row in wrong
  ]
  verdict.append(
    f'{len(doc["cells"]) - len(wrong)} of {len(doc["cells"])} cells agree, '
    f'within {width / 2:.3f} tokens a window or less.'
  )
  _close(doc | {'verdict': verdict}, _cells, [doc], folder, 'trace_check')
  return not wrong


def _close(out, show: Callable, docs, folder, name: str) -> None:
  """On the terminal, as JSON, and as files."""
  console = runtime.console()
  for doc in docs:
    show(doc, console, rich.box.SIMPLE_HEAD)
  tables.close(out['verdict'], out, console)
  if folder:
    files.write(folder / f'{name}.json', runtime.compact(out))
    files.write(folder / f'{name}.md', _markdown(docs, out['verdict'], show))


def _markdown(docs, verdict: Sequence[str], show: Callable) -> str:
  file = io.StringIO()
  console = rich.console.Console(file=file, width=400, color_system=None)
  for doc in docs:
    show(doc, console, rich.box.MARKDOWN)
  console.print('\n' + '\n\n'.join(verdict), highlight=False)
  return '\n'.join(line.rstrip() for line in file.getvalue().splitlines())


def _analysis(doc: dict[str, Any], console, box: rich.box.Box) -> None:
  _setting(doc, console)
  console.print(
    f'[bold]alpha[/bold]    {_shown(doc["alpha"])} over {doc["tokens"]} tokens '
    f'of {doc["texts"]} texts, {doc["requests"]} requests\n',
    highlight=False,
  )
  console.print(_efficiencies(doc, box))
  console.print(_windows(doc, box))
  console.print(_leniences(doc, box))
  if doc['rounded']:
    console.print(
      f'{doc["rounded"]} emitted tokens had no p when scored (rounding between '
      'programs); p is taken as 1 there.',
      highlight=False,
    )


def _setting(doc, console) -> None:
  h = doc['trace']
  s, m = h['sampling'], h['machine']
  law = 'greedy' if s['temperature'] == 0 else f'temperature {s["temperature"]}'
  target, draft = h['labels']
  console.print(
    f'[bold]Trace[/bold]    target {target}; draft {draft}; {law}, top_k '
    f'{s["top_k"]}, top_p {s["top_p"]}, seed {s["seed"]}, {h["samples"]} texts '
    f'a prompt, {h["max_new_tokens"]} new tokens; commit {m["commit"][:12]}'
    f'{" + changes" if m["dirty"] else ""}, jax {m["jax"]}',
    highlight=False,
  )


def _efficiencies(doc, box):
  out = tables.new_table(
    'Block efficiency from one plain run (95 % over requests)',
    'gamma',
    'reject',
    'block',
    'block - reject',
    'eq. 1 at alpha',
    box=box,
  )
  for row in doc['rows']:
    out.add_row(
      str(row['gamma']),
      *(_shown(row[name]) for name in ('reject', 'block', 'gain')),
      f'{row["independent"]:.3f}',
    )
  return out


def _windows(doc, box):
  gamma = doc['rows'][-1]['gamma']
  out = tables.new_table(
    'Windows by accepted drafts',
    f'accepted of {gamma}',
    *doc['windows'],
    box=box,
  )
  shares = [[n / sum(x) for n in x] for x in doc['windows'].values()]
  for n, found in enumerate(zip(*shares, strict=True)):
    out.add_row(str(n), *(f'{share:.1%}' for share in found))
  return out


def _leniences(doc, box):
  out = tables.new_table(
    "Lenience l, on the target's text: LOSSY below 1",
    'l',
    'drafts kept',
    'total variation from the target',
    box=box,
  )
  for row in doc['lenience']:
    lossy = ' LOSSY' if row['lenience'] < 1 else ''
    out.add_row(
      f'{row["lenience"]:g}{lossy}',
      _shown(row['kept']),
      _shown(row['total_variation']),
    )
  return out


def _cells(doc, console, box: rich.box.Box) -> None:
  _setting(doc, console)
  console.print()
  out = tables.new_table(
    f'Counterfactual and real decoding (interval: {doc["level"]:.2%})',
    'gamma',
    'rule',
    'counterfactual',
    'real',
    'windows',
    'difference',
    'agrees',
    box=box,
  )
  for row in doc['cells']:
    out.add_row(
      str(row['gamma']),
      row['rule'],
      f'{row["counterfactual"]:.3f}',
      f'{row["real"]:.3f}',
      str(row['windows']),
      _shown(row['difference'], '+.3f'),
      'yes' if row['covers'] else '[red]NO[/red]',
    )
  console.print(out)


def _cell(row) -> str:
  return f'{row["rule"]} g={row["gamma"]}'


def _shown(x: dict[str, Any], form: str = '.3f') -> str:
  """An interval in words; without ends where there was one request."""
  if x['low'] is None:
    return f'{x["value"]:{form}}'
  low, high = (format(x[end], form) for end in ('low', 'high'))
  return f'{x["value"]:{form}} ({low} to {high})'
