"""The benchmark's document as tables, stage by stage."""

from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.table

from specdec_jax.bench import metrics


def new_table(
  title: str, *columns: str, box: rich.box.Box = rich.box.SIMPLE_HEAD
) -> rich.table.Table:
  """Without rows; numbers go right, the first column left."""
  out = rich.table.Table(
    title=title,
    title_justify='left',
    box=box,
    padding=(0, 1, 0, 0),
  )
  for i, name in enumerate(columns):
    justify = 'left' if i == 0 else 'right'
    out.add_column(name, justify=justify, no_wrap=True)
  return out


def machine(doc, console) -> None:
  m = doc['machine']
  console.print(
    f'[bold]Machine[/bold]  {m["cpu"]}, {m["cores"]} cores; {m["platform"]} '
    f'({m["device"]}) x{m["devices"]}; Python {m["python"]}, jax {m["jax"]}, '
    f'flax {m["flax"]}',
    highlight=False,
  )
  console.print(
    f'         commit {m["commit"][:12]}{" + changes" if m["dirty"] else ""}; '
    f'XLA_FLAGS={m["XLA_FLAGS"] or "-"}',
    highlight=False,
  )


def ceiling(doc, console) -> None:
  for dtype, found in doc['ceiling']['gb_s'].items():
    parts = ', '.join(f'{k} {v:.1f}' for k, v in found.items() if k != 'best')
    console.print(
      f'[bold]Ceiling[/bold]  {dtype} reads {found["best"]:.1f} GB/s: {parts}',
      highlight=False,
    )


def setting(doc, console) -> None:
  s = doc['setting']
  x = s['sampling']
  law = 'greedy' if x['temperature'] == 0 else f'temperature {x["temperature"]}'
  console.print(
    f'[bold]Target[/bold]   {s["target"]}, {s["dtype"]}'
    + (f'; draft {s["draft"]}, same tokenizer' if s['draft'] else ''),
    highlight=False,
  )
  console.print(
    f'[bold]Run[/bold]      {law}, top_k {x["top_k"]}, top_p {x["top_p"]}, '
    f'rule {s["rule"]}{"" if s["lossless"] else " (LOSSY)"}; batch '
    f'{s["batch_size"]}, {s["max_new_tokens"]} new tokens, buffer '
    f'{s["buffer"]}; first turns',
    highlight=False,
  )


def judged(doc, console) -> None:
  s = doc['setting']
  console.print(
    f'         {s["judged_prompts"]} prompts judged, {s["other_prompts"]} '
    'others to predict from',
    highlight=False,
  )


def calibration(doc, console) -> None:
  c, top = doc['calibration'], doc['ceiling']['tok_s']
  widths = ', '.join(f'v({n}) = {v:.2f}' for n, v in c['verify'].items())
  console.print(
    f'[bold]Parts[/bold]    plain step {c["step"] * 1e3:.3g} ms; {widths}; '
    f'proposing nothing {", ".join(f"{v:.2f}" for v in c["idle"].values())}',
    highlight=False,
  )
  if c['c']:
    costs = ', '.join(f'{k}: {v:.4f}' for k, v in c['c'].items())
    console.print(f'         c (a drafted token) {costs}', highlight=False)
  console.print(
    f'         ceiling of plain decoding {top:.1f} tok/s; the step alone gives '
    f'{doc["setting"]["batch_size"] / c["step"]:.1f}',
    highlight=False,
  )


def predicted(doc, console) -> None:
  if not doc['predicted']:
    console.print('No prediction: it needs two prompts or more.')
    return
  table = new_table(
    'Predicted before the judged prompts are run',
    'method',
    'tokens/window',
    'window cost',
    'improvement',
    'from alpha',
    'best gamma',
  )
  for name, p in doc['predicted'].items():
    table.add_row(
      name,
      _number(p['tokens']),
      _number(p['window_cost']),
      _times(p['improvement']),
      _times(p['improvement_from_alpha']),
      str(p['best_gamma']) if p['best_gamma'] else '0 (none)',
    )
  console.print(table)


def rows(doc, console) -> None:
  _speed(doc, console)
  _drafting(doc, console)
  _work(doc, console)
  _category_table(doc, console)
  console.print(
    f'Repeated 8-grams in the text: {_percent(doc["repeated_8grams"])}',
    highlight=False,
  )


def _speed(doc, console) -> None:
  rows = doc['rows']
  speed = new_table(
    'Speed (median, and least to most of the repeats)',
    'method',
    'tok/s',
    'improvement',
    'predicted',
    'measured/p.',
    'explained',
    'differing',
  )
  for r in rows:
    p, x = r['predicted'] or {}, r['improvement']
    speed.add_row(
      r['name'],
      _range(r['tok_s'], 1),
      _gain(x) if r['gamma'] else '1',
      _times(p.get('improvement')),
      _number(_over(x['median'], p.get('improvement'))),
      _times((r['explained'] or {}).get('improvement')),
      identity([r]),
    )
  console.print(speed)
  share = _over(rows[0]['tok_s']['median'], doc['ceiling']['tok_s'])
  console.print(
    f'Plain decoding reaches {_number(share)} of its ceiling. Explained: the '
    "prediction with the judged prompts' own acceptance.",
    highlight=False,
  )
  left_out = sum(r['tok_s']['too_short'] for r in rows)
  if left_out:
    console.print(
      f'{left_out} timings are too short to measure (decoding took no longer '
      'than the prefill varies) and left out.',
      highlight=False,
    )


def failed(doc, console) -> None:
  table = new_table(
    'Failed requests: logits are not finite',
    'prompt',
    'method',
    'after new tokens',
  )
  for row in doc['rows']:
    for x in row['broken']:
      table.add_row(rich.markup.escape(x['id']), row['name'], str(x['tokens']))
  console.print(table)


def _drafting(doc, console) -> None:
  draft = new_table(
    'Drafting',
    'method',
    'alpha',
    'if proposed',
    'tokens/window',
    'proposes',
    'accepted',
    'at position 1, 2, ...',
    'c',
    'v',
  )
  for r in doc['rows']:
    if not r['gamma']:
      continue
    alpha = r['alpha'] or {'alpha': None, 'alpha_where_proposed': None}
    draft.add_row(
      r['name'],
      _number(alpha['alpha']),
      _number(alpha['alpha_where_proposed']),
      _number(r['block_efficiency']),
      _percent(r['proposal_rate']),
      _percent(r['draft_acceptance_rate']),
      ' '.join(_number(x) for x in r['acceptance_per_position']),
      _number(r['cost_coefficient'], 3),
      _number(r['verify']),
    )
  console.print(draft)


def _work(doc, console) -> None:
  cost = new_table(
    'Latency, work and memory',
    'method',
    'first, ms',
    'gap p50',
    'gap p95',
    'ops',
    'MB/token',
    'target MB',
    'draft',
    'caches',
    'compile s',
  )
  for r in doc['rows']:
    m = r['memory']
    caches = f'{_mega(m["target_cache"])} + {_mega(m["draft_cache"])}'
    cost.add_row(
      r['name'],
      _ms(r['time_to_first_token']['median']),
      _ms(r['inter_token']['p50']),
      _ms(r['inter_token']['p95']),
      _times(r['arithmetic_factor']),
      _mega(r['bytes_per_token']),
      _mega(m['target']),
      _mega(m['draft']),
      caches,
      f'{r["compile_seconds"]:.1f}',
    )
  console.print(cost)


def _category_table(doc, console) -> None:
  if not doc['categories']:
    return
  lossy = _lossy(doc)
  table = new_table(
    'By category',
    'category',
    'method',
    'n',
    'improvement',
    'explained',
    'tokens/window',
    'proposes',
    'accepted',
    '8-grams',
    *['TV, all'] * bool(lossy),
  )
  for c in doc['categories']:
    table.add_row(
      c['category'],
      c['name'],
      str(c['prompts']),
      _gain(c['improvement']),
      _times(c['explained']),
      _number(c['block_efficiency']),
      _percent(c['proposal_rate']),
      _percent(c['draft_acceptance_rate']),
      _percent(c['repeated_8grams']),
      *[lossy.get(c['name'])] * bool(lossy),
    )
  console.print(table)


def crossover(doc, console) -> None:
  names, lossy = list(doc['crossover'][0]['rows'])[1:], _lossy(doc)
  heads = [f'{x}\nTV {lossy[x]}' if lossy else x for x in names]
  table = new_table(
    'By batch size', 'batch', 'plain tok/s', *heads, 'best gamma', 'differing'
  )
  for x in doc['crossover']:
    rows = x['rows']
    table.add_row(
      str(x['batch_size']),
      _number(next(iter(rows.values()))['tok_s']['median'], 1),
      *[_times(rows[name]['improvement']['median']) for name in names],
      ', '.join(f'{d} {g}' for d, g in x['best_gamma'].items()),
      identity(list(rows.values())),
    )
  console.print(table)


def identity(rows) -> str:
  """Over one row or several: '3 of 28: 3 tie', 'in law', 'LOSSY, TV 0.02'."""
  audits = [row['audit'] for row in rows if row['audit']]
  tokens = [x for x in audits if x['promised'] == 'tokens']
  add = lambda name: sum(x[name] for x in tokens)
  kept = {x['promised'] for x in audits} - {'tokens'}
  parts = [] if tokens else sorted(kept - {'nothing'})
  known = [distance(row) for row in rows if row.get('alpha')]
  if 'nothing' in kept:
    parts += [', TV '.join(['LOSSY', *known[:1]])]
  if tokens:
    colon = ':' if add('differing') else ''
    parts = [f'{add("differing")} of {add("requests")}{colon}']
  parts += [f'{add("ties")} tie'] if add('ties') else []
  parts += [f'[red]{add("bugs")} BUG[/red]'] if add('bugs') else []
  failed = sum(len(row['broken']) for row in rows)
  parts += [f'[red]{failed} FAILED[/red]'] if failed else []
  return ' '.join(parts)


def _lossy(doc) -> dict[str, str]:
  """The distance of each method, if the rule is lossy; else nothing."""
  if doc['setting']['lossless']:
    return {}
  return {row['name']: distance(row) for row in doc['rows']}


def distance(row) -> str:
  """Total variation of what a token's law is from what it ought to be."""
  return f'{row["alpha"]["total_variation"]:.2g}' if row['alpha'] else '-'


def _over(a: float | None, b: float | None) -> float | None:
  return None if a is None or b is None else a / b


def _range(x: dict[str, Any], digits: int) -> str:
  if x['median'] is None:
    return 'too short'
  low, high = (f'{x[k]:.{digits}f}' for k in ('min', 'max'))
  return f'{x["median"]:.{digits}f} ({low}-{high})'


def _gain(x: dict[str, Any]) -> str:
  colour = {'win': 'green', 'loss': 'red'}
  return f'[{colour.get(metrics.outcome(x), "default")}]{_range(x, 2)}[/]'


def _number(x, digits: int = 2) -> str:
  return '-' if x is None else f'{x:.{digits}f}'


def _times(x) -> str:
  return '-' if x is None else f'{x:.2f}x'


def _percent(x) -> str:
  return '-' if x is None else f'{x:.0%}'


def _ms(x) -> str:
  return '-' if x is None else f'{x * 1e3:.1f}'


def _mega(x) -> str:
  return '-' if x is None else f'{x / 1e6:.1f}'
