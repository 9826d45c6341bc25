"""The document of target weights x draft weights as tables and a figure."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments import page, plots
from specdec_jax import machine
from specdec_jax.bench import intervals

Run = Mapping[str, Any]


def markdown(doc: Mapping[str, Any]) -> str:
  """A table of the targets alone, one of the drafts on each, and a choice."""
  runs = doc['runs']
  m = runs[0]['machine']
  about = f'{m["cores"]} cores, {m["cpu"]}, jax {m["jax"]}. Greedy, batch 1.'
  alone = [
    'Plain decoding. v(n): a verify pass of n tokens, in plain steps. '
    'Distances are means a token of the prompts; prompts: judged, times new '
    'tokens at most.',
    '',
    *page.table(
      [
        *('target', 'MB', 'tok/s', 'of ceiling', 'v(2)', 'v(3)', 'v(5)'),
        *('TV', 'KL, nats', 'same top', 'perplexity', 'prompts', 'commit'),
      ],
      [_alone(x) for x in runs],
    ),
  ]
  drafted = [
    'Speculative decoding at the best gamma, with its 95 % interval over '
    'prompts. c: a drafted token, in plain steps of that target. Left out: '
    'could not win by its prediction, and was not run.',
    '',
    *page.table(
      [
        *('target', 'drafter', 'c', 'alpha', 'tokens/window', 'predicted'),
        *('improvement', 'tok/s', 'differs'),
      ],
      [row for x in runs for row in _drafted(x)],
    ),
  ]
  return '\n'.join([about, '', *alone, '', *drafted, '', _choice(runs)])


def _alone(run: Run) -> list[str]:
  v, tok_s = run['calibration']['verify'], _plain(run)
  away, ceiling = run['distance'], run['ceiling']['tok_s']
  found = ['-'] * 4
  if away:
    found = [
      f'{away["total_variation"]:.2g}',
      f'{away["kl"]:.2g}',
      f'{away["agreement"]:.1%}',
      f'{away["perplexity"]:.3f} (of {away["reference_perplexity"]:.3f})',
    ]
  return [
    _name(run),
    f'{run["setting"]["weights"]["target"] / 1e6:.0f}',
    _number(tok_s, '{:.1f}'),
    _number(tok_s and tok_s / ceiling),
    *(_number(v.get(n)) for n in '235'),
    *found,
    f'{run["setting"]["judged_prompts"]} x {run["setting"]["max_new_tokens"]}',
    machine.made_by(run['machine']['commit'], run['machine']['dirty']),
  ]


def _drafted(run: Run) -> Iterator[list[str]]:
  """A row for each drafter: its fastest gamma, or why it was not run."""
  best: dict[str, Mapping[str, Any]] = {}
  for row in run['rows'][1:]:
    old = best.get(row['drafter'])
    if old is None or (row['tok_s'] or 0) > (old['tok_s'] or 0):
      best[row['drafter']] = row
  names = dict.fromkeys(x.rpartition(' g=')[0] for x in run['predicted'])
  for name in names:
    costs = run['calibration']['propose'].get(name, {})
    most = max(costs, key=int, default='0')
    c = costs[most] / int(most) if int(most) else None
    row = best.get(name)
    if row is None:
      own = [x for x in run['predicted'] if x.startswith(f'{name} g')]
      foreseen = max(run['predicted'][x]['improvement'] for x in own)
      yield [
        *(_name(run), name, _number(c), '-', '-'),
        *(f'{foreseen:.2f}x', 'left out', '-', '-'),
      ]
      continue
    gain = intervals.Interval(**row['improvement'])
    yield [
      _name(run),
      row['name'],
      _number(c),
      _number(row['alpha'] and row['alpha']['alpha']),
      _number(row['counts']['block_efficiency']),
      _number(row['predicted'] and row['predicted']['improvement'], '{:.2f}x'),
      page.interval(gain),
      _number(row['tok_s'], '{:.1f}'),
      page.differing(row['audit'], len(run['failed'])),
    ]


def _choice(runs: list[Run]) -> str:
  """The fastest target and method, beside the fastest plain one."""
  every = [
    (row['tok_s'], _name(run), row['name'])
    for run in runs
    for row in run['rows']
    if row['tok_s']
  ]
  plain = max(x for x in every if x[2] == 'autoregressive')
  best = max(every)
  return (
    f'Fastest: target {best[1]} with {best[2]}, {best[0]:.1f} tokens a second; '
    f'plain decoding alone is fastest with {plain[1]}, {plain[0]:.1f}.'
  )


def llama(doc: Mapping[str, Any]) -> str:
  """llama.cpp: tokens a second, plain and with each longest draft."""
  speeds = {
    row['gamma']: sum(x['tokens'] for x in row['timed'])
    / sum(x['seconds'] for x in row['timed'])
    for row in doc['rows']
  }
  rows = [
    ['with the draft, up to ' + str(n) if n else 'plain', f'{x:.1f}']
    for n, x in speeds.items()
  ]
  return '\n'.join(
    [
      f'{page.made_on(doc["machine"])} llama.cpp of node-llama-cpp '
      f'{doc["version"]}, {doc["asked"]["threads"]} threads, greedy, '
      f'{doc["asked"]["prompts"]} prompts, {doc["asked"]["new"]} new tokens at '
      'most.',
      '',
      *page.table(['llama.cpp', 'tok/s'], rows),
    ]
  )


def figure(doc: Mapping[str, Any]) -> bytes:
  """A PNG: tokens a second of each target, plain and with each drafter."""
  runs = doc['runs']
  drafters = dict.fromkeys(r['drafter'] for x in runs for r in x['rows'])

  def paint(axes: plots.Axes) -> None:
    names = [_name(x) for x in runs]
    plots.rows(axes, names)
    for i, drafter in enumerate(drafters):
      found = [
        (max(tok_s), y)
        for y, x in enumerate(runs)
        if (tok_s := _speeds(x, drafter))
      ]
      look: dict[str, Any] = dict(linestyle='none', markersize=6)
      axes.plot(
        [x for x, _ in found],
        [y for _, y in found],
        marker=plots.MARKS[i % len(plots.MARKS)],
        color=plots.COLOURS[i % len(plots.COLOURS)],
        label='plain' if drafter == 'autoregressive' else drafter,
        **look,
      )
    axes.set_xlim(left=0)
    axes.legend(
      frameon=False, fontsize=8, loc='center left', bbox_to_anchor=(1, 0.5)
    )
    plots.label(
      axes,
      'tokens a second, at the best gamma',
      '',
      'Which weights are fastest, and does a draft help them?',
    )

  return plots.png(paint, size=(6.4, 1.0 + 0.6 * len(runs)))


def _speeds(run: Run, drafter: str) -> list[float]:
  """Tokens a second of a drafter, by gamma, where they could be measured."""
  every = [x['tok_s'] for x in run['rows'] if x['drafter'] == drafter]
  return [x for x in every if x]


def _plain(run: Run) -> float | None:
  return run['rows'][0]['tok_s'] if run['rows'] else None


def _name(run: Run) -> str:
  return run['weights']


def _number(x: float | None, form: str = '{:.2f}') -> str:
  return '-' if x is None else form.format(x)
