"""Renders target weights x draft weights as tables and a figure."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments import page, plots
from specdec_jax import machine
from specdec_jax.bench import tables

Run = dict[str, Any]
ALONE = (
  'target=weights, MB=mb:.0f, tok/s=tok_s:.1f, step:.1f, of ceiling=share:.2f, '
  'v(2)=v.0:.2f, v(3)=v.1:.2f, v(5)=v.2:.2f, TV=distance.total_variation:.2g, '
  'KL nats=kl, same top=distance.agreement:.1%, '
  'perplexity=distance.perplexity:.3f, of=distance.reference_perplexity:.3f, '
  'prompts, commit'
)
DRAFTED = (
  'target, drafter, c:.2f, alpha=alpha.alpha:.2f, '
  'tokens/window=counts.block_efficiency:.2f, '
  'predicted=predicted.improvement:.2fx, improvement=gain, tok/s=tok_s:.1f, '
  'differs'
)


def markdown(doc: Mapping[str, Any]) -> str:
  """Writes a choice, a table of the targets alone, and the drafts on each."""
  runs = doc['runs']
  m = runs[0]['machine']
  about = f'{m["cores"]} cores, {m["cpu"]}, jax {m["jax"]}. Greedy, batch 1.'
  alone = page.Part(
    'Plain decoding; step: a token a step, timed alone. v(n): a verify pass of '
    'n tokens, in plain steps. Distances are means a token of the prompts; '
    'prompts: judged, times new tokens at most.',
    ALONE,
    [_alone(x) for x in runs],
  )
  drafted = page.Part(
    'Speculative decoding at the best gamma, with its 95 % interval over '
    'prompts. c: a drafted token, in plain steps of that target. Left out: '
    'could not win by its prediction, and was not run. [parts: 0.86x]: what '
    'the parts of that very run give, of a result that is more than 1.2 times '
    'that or less than 0.85: plain decoding or the parts were disturbed.',
    DRAFTED,
    [row for x in runs for row in _drafted(x)],
  )
  return '\n\n'.join([_choice(runs), about, page.text(alone, drafted)])


def _alone(run: Run) -> Run:
  s, verify = run['setting'], run['calibration']['verify']
  tok_s = run['rows'][0]['tok_s'] if run['rows'] else None
  kl = run['distance'] and run['distance']['kl']
  return run | {
    'mb': s['weights']['target'] / 1e6,
    'tok_s': tok_s,
    'step': 1 / run['calibration']['step'],
    'share': tok_s and tok_s / run['ceiling']['tok_s'],
    'v': [verify.get(n) for n in '235'],
    # Older results have it as sums of float32.
    'kl': kl and (f'{kl:.2g}' if kl > 1e-6 else 'under 1e-6'),
    'prompts': f'{s["judged_prompts"]} x {s["max_new_tokens"]}',
    'commit': machine.made_by(
      run['machine']['commit'], run['machine']['dirty']
    ),
  }


def _drafted(run: Run) -> Iterator[Run]:
  """Writes a row for each drafter: its fastest gamma, or why it was not run."""
  predicted = {k: x['improvement'] for k, x in run['predicted'].items()}
  for name in dict.fromkeys(x.rpartition(' g=')[0] for x in predicted):
    costs = run['calibration']['propose'].get(name, {})
    most = max(costs, key=int, default='0')
    c = costs[most] / int(most) if int(most) else None
    about = {'target': run['weights'], 'drafter': name, 'c': c}
    own = [x for x in run['rows'][1:] if x['drafter'] == name]
    if own:
      row = max(own, key=lambda x: x['tok_s'] or 0)
      gain = tables.show(row['improvement']) + page.refuted(row)
      differs = page.differing(row['audit'], len(run['failed']))
      about |= {'drafter': row['name'], 'gain': gain, 'differs': differs}
      yield row | about
    else:
      named = [x for k, x in predicted.items() if k.startswith(f'{name} g')]
      about |= dict.fromkeys(('alpha', 'counts', 'tok_s', 'differs'))
      told = {'improvement': max(named)}
      yield about | {'gain': 'left out', 'predicted': told}


def _choice(runs: list[Run]) -> str:
  """Picks the fastest target and method, beside the fastest plain one."""
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
  """Writes llama.cpp's tokens a second, plain and with each longest draft."""
  speeds = {
    row['gamma']: sum(x['tokens'] for x in row['timed'])
    / sum(x['seconds'] for x in row['timed'])
    for row in doc['rows']
  }
  rows = [
    {'way': f'with the draft, up to {n}' if n else 'plain', 'tok_s': x}
    for n, x in speeds.items()
  ]
  about = (
    f'{page.made_on(doc["machine"])} llama.cpp of node-llama-cpp '
    f'{doc["version"]}, {doc["asked"]["threads"]} threads, greedy, '
    f'{doc["asked"]["prompts"]} prompts, {doc["asked"]["new"]} new tokens at '
    'most.'
  )
  return page.text(page.Part(about, 'llama.cpp=way, tok/s=tok_s:.1f', rows))


def figure(doc: Mapping[str, Any]) -> bytes:
  """Draws targets' tokens a second as a PNG, plain and with each drafter."""
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
