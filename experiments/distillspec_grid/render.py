"""The grid as tables and as a figure."""

from typing import Any

from experiments import page, plots, resampled
from experiments.distilled import best, efficiency, gain, half
from specdec_jax.bench import intervals


def of(doc, warm: float, seed: int) -> dict[str, list[dict[str, Any]]]:
  """Rows of a temperature and seed: 'start', 'baseline' and 'cells'."""
  found: dict[str, list[dict[str, Any]]] = {}
  for x in doc['rows']:
    if (x['temperature'], x['seed']) == (warm, seed):
      found.setdefault('cells' if x['divergence'] else x['source'], []).append(
        x
      )
  return found


def gains(doc, warm: float) -> list[tuple[int, intervals.Interval]]:
  """(seed, gain) of the best cell on the prompts that did not choose it."""
  s = doc['settings']['grid']
  first = best(of(doc, warm, s['seed'])['cells'])
  out = []
  for seed in (s['seed'], *s['more_seeds']):
    found = of(doc, warm, seed)
    same = lambda x: all(x[k] == first[k] for k in ('source', 'divergence'))
    mine = next(x for x in found['cells'] if same(x))
    (base,) = found['baseline']
    other = (half(x, first=False) for x in (mine, base))
    out.append((seed, gain(*other)))
  return out


def fixed_is_worst(doc) -> tuple[int, int]:
  """Counts (divergences where fixed text is the worst source, divergences)."""
  s = doc['settings']['grid']
  worst, every = 0, 0
  if 'text' not in s['sources'] or len(s['sources']) < 2:
    return 0, 0
  for warm in s['temperatures']:
    cells = of(doc, warm, s['seed'])['cells']
    for divergence in s['divergences']:
      row = [x for x in cells if x['divergence'] == divergence]
      low = min(row, key=lambda x: efficiency(x).value)
      worst, every = worst + (low['source'] == 'text'), every + 1
  return worst, every


def markdown(doc: dict[str, Any]) -> str:
  lines = [_caption(doc), '']
  for warm in doc['settings']['grid']['temperatures']:
    lines += [*_grid(doc, warm), '', *_sentences(doc, warm), '']
  worst, every = fixed_is_worst(doc)
  if every:
    lines.append(
      f'Fixed text is the worst source for {worst} of {every} pairs of '
      'divergence and temperature; in the paper for every loss.'
    )
  return '\n'.join(lines).rstrip()


def _caption(doc) -> str:
  s = doc['settings']
  pair, grid, judge = s['pair'], s['grid'], s['judge']
  target, draft = (f'{x / 1e6:.2f}M' for x in doc['sizes'])
  return (
    f'{page.made_on(doc["machine"])} Target {target} parameters, '
    f'{pair["target_steps"]} steps on {pair["text"]}; draft {draft}, '
    f'{pair["draft_steps"]} steps, then {grid["steps"]} of distillation, or '
    f'of more cross-entropy, {pair["rows"]} rows of {pair["length"]} tokens '
    f'each. Seed {grid["seed"]}. Gamma {judge["gamma"]}, {judge["prompts"]} '
    f'held-out prompts, {judge["new_tokens"]} new tokens. Tokens a target call '
    '(alpha), and the gain over cross-entropy with its 95 % interval over '
    'prompts, wide enough to look at all cells of a temperature at once; bold: '
    'the cell that every other prompt chose.'
  )


def _grid(doc, warm: float) -> list[str]:
  s = doc['settings']['grid']
  found = of(doc, warm, s['seed'])
  (base,), (start,) = found['baseline'], found['start']
  top = best(found['cells'])
  lines = []
  for divergence in s['divergences']:
    row = [x for x in found['cells'] if x['divergence'] == divergence]
    many = len(found['cells'])
    lines.append([divergence, *(_cell(x, base, many, x is top) for x in row)])
  none = [''] * (len(s['sources']) - 1)
  lines.append(['cross-entropy alone', _plain(base), *none])
  lines.append(['where they begin', _plain(start), *none])
  return page.table([f'T = {warm:g}', *s['sources']], lines)


def _plain(x) -> str:
  found = efficiency(x)
  around = '' if found.low is None else f', {found.low:.2f} to {found.high:.2f}'
  return f'{found.value:.2f} ({x["alpha"]:.2f}){around}'


def _cell(x, base, many: int, top: bool) -> str:
  value = f'{efficiency(x).value:.2f}'
  value = f'**{value}**' if top else value
  shown = _percent(resampled.one_of(gain(x, base), many))
  return f'{value} ({x["alpha"]:.2f}), {shown}'


def _percent(x: intervals.Interval) -> str:
  of = lambda v: f'{100 * v:+.0f}'
  ends = '' if x.low is None else f' ({of(x.low)} to {of(x.high)})'
  return f'{of(x.value)} %{ends}'


def _sentences(doc, warm: float) -> list[str]:
  s = doc['settings']
  found = of(doc, warm, s['grid']['seed'])
  top = best(found['cells'])
  each = '; '.join(f'seed {n}: {_percent(x)}' for n, x in gains(doc, warm))
  out = [
    f'Best, chosen by every other prompt: {top["divergence"]} on '
    f'{top["source"]}. Its gain on prompts that did not choose it: {each}.'
  ]
  if not warm:
    rows = [x for x in doc['rows'] if x['temperature'] == 0]
    differ = sum(x['differ'] for x in rows)
    texts = len(rows) * s['judge']['prompts']
    out.append(f"Texts that are not plain decoding's: {differ} of {texts}.")
  return out


def figure(doc: dict[str, Any]) -> bytes:
  """A dot for every cell, cross-entropy as a band, one axes a temperature."""
  s = doc['settings']['grid']
  warms = s['temperatures']
  names = [f'{d}, {x}' for x in s['sources'] for d in s['divergences']]

  def bound(warm: float):
    def paint(axes):
      found = of(doc, warm, s['seed'])
      at = {f'{x["divergence"]}, {x["source"]}': x for x in found['cells']}
      plots.rows(axes, names)
      each = [efficiency(at[name]) for name in names]
      ys = range(len(names))
      bar = axes.hlines(
        ys,
        [x.value if x.low is None else x.low for x in each],
        [x.value if x.high is None else x.high for x in each],
        color=plots.PALE,
        linewidth=5,
        zorder=1,
      )
      values = [x.value for x in each]
      dot = plots.points(axes, values, ys, theirs=False, mark='o')
      base = efficiency(found['baseline'][0])
      if base.low is not None and base.high is not None:
        axes.axvspan(base.low, base.high, color='0.93', zorder=0)
      look = dict(color='0.5', linewidth=0.8, linestyle='--')
      line = axes.axvline(base.value, **look)
      if warm == warms[0]:
        axes.legend(
          [dot, bar, line],
          ['distilled', '95 % interval', 'cross-entropy alone'],
          loc='lower right',
          bbox_to_anchor=(1, 1),
          ncols=3,
          fontsize=7,
          frameon=False,
        )
      plots.label(
        axes,
        'tokens a target pass' if warm == warms[-1] else '',
        'loss, text it is trained on',
        f'temperature {warm:g}',
      )

    return paint

  size = 6.4, (0.9 + 0.2 * len(names)) * len(warms)
  caption = page.made_on(doc['machine']) + f' Seed {s["seed"]}.'
  title = 'Tokens a target pass of drafts distilled by each loss on each text'
  paints = [bound(w) for w in warms]
  return plots.stacked(paints, size=size, title=title, caption=caption)
