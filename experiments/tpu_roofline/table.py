"""Finds where speculation stops paying on TPUs, by chips.roofline."""

import dataclasses
import itertools

from experiments import papers, plots
from experiments.leviathan_analytic import table as leviathan
from specdec_jax.bench import tables
from specdec_jax.chips import roofline
from specdec_jax.costs import cost
from specdec_jax.models import config

SPLITS = 1, 4, 8
BATCHES = 1, 4, 16, 64
SHORT, LONG = (128, 512), (1024, 8192, 32768)
CONTEXTS = SHORT + LONG
ALPHA = 0.8
PAIR, CHIP, SPLIT = 'llama3_8b + llama3_1b', 'v5e', 8  # of the figure
POWERS = [2**i for i in range(12)]  # batches of the figure
# The largest batch that is asked for where speculation stops paying.
LAST = 2**14


def _sized(name: str, **changes) -> config.LMConfig:
  c = config.sized(name, dtype='bfloat16').running(scan_layers=True)
  return dataclasses.replace(c, **changes)


# Name: (target, draft).
PAIRS = {
  'llama3_8b + llama3_1b': (_sized('llama3_8b'), _sized('llama3_1b')),
  'llama3_8b + one layer of it': (
    _sized('llama3_8b'),
    _sized('llama3_8b', depth=1),
  ),
  'qwen2_5_7b + qwen2_5_0_5b': (_sized('qwen2_5_7b'), _sized('qwen2_5_0_5b')),
}


def gain(
  pair: str, chip: str, split: int, context: int, batch: int
) -> tuple[int, float]:
  """Returns (best gamma, improvement) at ALPHA; gamma 0 where none pays."""
  device, shares = _shares(pair, chip, split)
  sizes = dict(rows=batch, slots=context)
  return roofline.predict(device, *shares, (ALPHA,), **sizes).best[ALPHA]


def _shares(pair: str, chip: str, split: int):
  # A chip of two devices is taken as one.
  device = roofline.TPUS[chip]
  return device, tuple(roofline.share(c, split) for c in PAIRS[pair])


def limits(*where) -> tuple[int, int | None]:
  """Returns (the largest batch that fits, where speculation stops paying).

  It stops at the smallest power of two, as batch, at which no gamma pays; None
  if there is none up to LAST. where: pair, chip, split, context.
  """
  device, shares = _shares(*where[:3])
  room = roofline.room(device, shares, rows=1, slots=where[3])
  batch = 1
  while batch <= LAST and gain(*where, batch)[0]:
    batch *= 2
  return room.rows, batch if batch <= LAST else None


def undivided(*place) -> bool:
  """Tells if every chip has all the draft's heads, but not the target's."""
  _, (target, draft) = _shares(*place)
  return 'heads' in draft.whole and 'heads' not in target.whole


def places() -> list[tuple[str, str, int]]:
  return list(itertools.product(PAIRS, roofline.TPUS, SPLITS))


def stops() -> leviathan.Table:
  """Finds where speculation stops paying, and what fits."""
  every = {x: [limits(*x, context) for context in CONTEXTS] for x in places()}
  shown = lambda c: f'{c[1] or "never"} / {c[0] or "none"}'
  lines = [[*x, *map(shown, found)] for x, found in every.items()]
  short = sum(found[0][1] is not None for found in every.values())
  long = [x for x, found in every.items() if found[-1][1] is not None]
  explained = [x for x in long if undivided(*x)]
  summary = (
    'Speculation stops paying at some batch up to '
    f'{LAST} in {short} of {len(every)} rows at context {CONTEXTS[0]}, in '
    f'{len(long)} at context {CONTEXTS[-1]}; in {len(explained)} of these the '
    "chips divide the target's heads and not the draft's."
  )
  head = ['pair', 'chip', 'chips', *(f'context {x}' for x in CONTEXTS)]
  good = short == len(every) and explained == long
  return leviathan.Table([*tables.grid(head, lines), '', summary], good)


def draw_stops(axes: plots.Axes) -> None:
  """Draws improvement against batch, by context."""
  for i, context in enumerate(CONTEXTS):
    where = PAIR, CHIP, SPLIT, context
    gains = [gain(*where, batch)[1] for batch in POWERS]
    plots.curve(axes, POWERS, gains, f'{context:,} tokens', i)
    most, _ = limits(*where)
    if most <= POWERS[-1]:
      height = gain(*where, most)[1]
      (cross,) = axes.plot([most], [height], 'kx', markersize=8)
      cross.set_label('largest batch that fits')
  axes.set_xscale('log', base=2)
  axes.set_xticks(POWERS[::2], [f'{x:,}' for x in POWERS[::2]])
  crosses, _ = axes.get_legend_handles_labels()
  axes.legend(handles=crosses[:1], frameon=False, loc='lower left')
  plots.level(axes, 1)
  plots.label(
    axes,
    'batch (rows)',
    f'times plain decoding at alpha {ALPHA}, by roofline',
    f'{PAIR} on {SPLIT} {CHIP}: large batches lose at short contexts',
  )


def gains() -> leviathan.Table:
  """Computes every cell's improvement; what does not fit is in brackets."""
  lines = []
  for place, context in itertools.product(places(), LONG):
    most, _ = limits(*place, context)
    line = [*place, context]
    for batch in BATCHES:
      gamma, x = gain(*place, context, batch)
      text = f'{x:.2f} ({gamma})'
      line.append(text if batch <= most else f'[{text}]')
    lines.append(line)
  head = ['pair', 'chip', 'chips', 'context', *(f'batch {b}' for b in BATCHES)]
  return leviathan.Table(tables.grid(head, lines), True)


# --- T5 ----------------------------------------------------------------------

# The paper gives no lengths: a sentence of WMT, and an article of CNN/DM.
LENGTHS = {'EnDe': (64, 64), 'CNNDM': (128, 512)}  # buffer, source
T5_CHIP = 'v6e'


def t5() -> leviathan.Table:
  """Puts T5-XXL's and its drafts' c and improvement beside Leviathan's."""
  device = roofline.TPUS[T5_CHIP]
  target = roofline.share(_sized('t5_xxl'))
  lines, below = [], True
  for row in papers.TABLE4:
    draft = roofline.share(_sized(row.draft.lower().replace('-', '_')))
    slots, source = LENGTHS[row.task]
    sizes = dict(rows=1, slots=slots, source=source)
    assert roofline.room(device, (target, draft), **sizes).fits
    found = roofline.predict(device, target, draft, **sizes)
    v = found.v[row.gamma + 1]
    gain = cost.improvement(row.alpha, row.gamma, found.c, v)
    below &= found.c < row.c  # a bound: a real step cannot be faster
    line = [row.task, row.draft, row.temperature, row.gamma, row.alpha, row.c]
    lines.append([*line, f'{found.c:.4f}', f'{v:.3f}', row.emp, f'{gain:.2f}'])
  head = ['task', 'draft', 'T', 'gamma', 'alpha', 'c, theirs', 'c, roofline']
  head += ['v(gamma + 1)', 'speed, theirs (measured)', 'speed, roofline']
  return leviathan.Table(tables.grid(head, lines), below)


TABLES = {'stops': stops, 'gains': gains, 't5': t5}
FIGURES = {'stops': draw_stops}
