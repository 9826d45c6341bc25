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
    'Plain decoding; step: a token a step, timed alone. v(n): a verify pass of '
    'n tokens, in plain steps. Distances are means a token of the prompts; '
    'prompts: judged, times new tokens at most.',
    '',
    *page.table(
      [
        *('target', 'MB', 'tok/s', 'step', 'of ceiling'),
        *('v(2)', 'v(3)', 'v(5)'),
        *('TV', 'KL, nats', 'same top', 'perplexity', 'prompts', 'commit'),
      ],
      [_alone(x) for x in runs],
    ),
  ]
  drafted = [
    'Speculative decoding at the best gamma, with its 95 % interval over '
    'prompts. c: a drafted token, in plain steps of that target. Left out: '
    'could not win by its prediction, and was not run. [parts: 0.86x]: what '
    'the parts of that very run give, of a result that is more than 1.2 times '
    'that or less than 0.85: plain decoding or the parts were disturbed.',
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
  v, s, found = run['calibration']['verify'], run['setting'], ['-'] * 4
  tok_s = run['rows'][0]['tok_s'] if run['rows'] else None
  if away := run['distance']:
    found = [
      f'{away["total_variation"]:.2g}',
      # Older results have it as sums of float32.
      f'{away["kl"]:.2g}' if away['kl'] > 1e-6 else 'under 1e-6',
      f'{away["agreement"]:.1%}',
      f'{away["perplexity"]:.3f} (of {away["reference_perplexity"]:.3f})',
    ]
  return [
    run['weights'],
    f'{s["weights"]["target"] / 1e6:.0f}',
    _number(tok_s, '{:.1f}'),
    f'{1 / run["calibration"]["step"]:.1f}',
    _number(tok_s and tok_s / run['ceiling']['tok_s']),
    *(_number(v.get(n)) for n in '235'),
    *found,
    f'{s["judged_prompts"]} x {s["max_new_tokens"]}',
    machine.made_by(run['machine']['commit'], run['machine']['dirty']),
  ]


def _drafted(run: Run) -> Iterator[list[str]]:
  """A row for each drafter: its fastest gamma, or why it was not run."""
  predicted = {k: x['improvement'] for k, x in run['predicted'].items()}
  for name in dict.fromkeys(x.rpartition(' g=')[0] for x in predicted):
    costs = run['calibration']['propose'].get(name, {})
    most = max(costs, key=int, default='0')
    c = _number(costs[most] / int(most) if int(most) else None)
    own = [x for x in run['rows'][1:] if x['drafter'] == name]
    if not own:
      foreseen = max(
        x for k, x in predicted.items() if k.startswith(name + ' g')
      )
      left_out = f'{foreseen:.2f}x', 'left out', '-', '-'
      yield [run['weights'], name, c, '-', '-', *left_out]
      continue
    row = max(own, key=lambda x: x['tok_s'] or 0)
    yield [
      run['weights'],
      row['name'],
      c,
      _number(row['alpha'] and row['alpha']['alpha']),
      _number(row['counts']['block_efficiency']),
      _number(row['predicted'] and row['predicted']['improvement'], '{:.2f}x'),
      page.interval(intervals.Interval(**row['improvement']))
      + page.refuted(row),
      _number(row['tok_s'], '{:.1f}'),
      page.differing(row['audit'], len(run['failed'])),
    ]


def _choice(runs: list[Run]) -> str:
  """The fastest target and method, beside the fastest plain one."""
  every = [
    (row['tok_s'], run['weights'], row['name'])
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
    names = [x['weights'] for x in runs]
    plots.rows(axes, names)
    for i, drafter in enumerate(drafters):
      found = [
        (row['tok_s'], y)
        for y, x in enumerate(runs)
        for row in x['rows']
        if row['drafter'] == drafter and row['tok_s']
      ]
      best = {y: tok_s for tok_s, y in sorted(found)}
      plain = drafter == 'autoregressive'
      axes.plot(
        [*best.values()],
        [*best],
        'x' if plain else plots.MARKS[(i - 1) % len(plots.MARKS)],
        markersize=6,
        color='0.3' if plain else plots.COLOURS[(i - 1) % len(plots.COLOURS)],
        label='plain' if plain else drafter,
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


def _number(x: float | None, form: str = '{:.2f}') -> str:
  return '-' if x is None else form.format(x)
