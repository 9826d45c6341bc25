"""The figure of the experiment: improvement against batch, by context."""

from experiments import plots
from experiments.tpu_roofline import table

PAIR, CHIP, SPLIT = 'llama3_8b + llama3_1b', 'v5e', 8
BATCHES = [2**i for i in range(12)]


def stops(axes: plots.Axes) -> None:
  for i, context in enumerate(table.CONTEXTS):
    where = PAIR, CHIP, SPLIT, context
    gain = lambda batch, where=where: table.gain(*where, batch)[1]
    name = f'{context // 1024}k' if context >= 1024 else str(context)
    plots.curve(axes, BATCHES, list(map(gain, BATCHES)), name, i)
    most = table.cell(*where).fits
    if most <= BATCHES[-1]:
      axes.plot([most], [gain(most)], 'x', color='0.0', markersize=8)
  axes.set_xscale('log', base=2)
  plots.level(axes, 1)
  plots.label(
    axes,
    'batch; a cross is the largest that fits',
    f'improvement at alpha {table.ALPHA}, by context',
    f'{PAIR} on {SPLIT} {CHIP}: high batches lose at short contexts only',
  )


# Name of the table: (draws on axes, size in inches).
FIGURES = {'stops': (stops, (6.4, 4.0))}
