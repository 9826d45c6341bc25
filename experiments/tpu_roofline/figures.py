"""The figure of the experiment: improvement against batch, by context."""

from experiments import plots
from experiments.tpu_roofline import table

PAIR, CHIP, SPLIT = 'llama3_8b + llama3_1b', 'v5e', 8
BATCHES = [2**i for i in range(12)]


def stops(axes: plots.Axes) -> None:
  for i, context in enumerate(table.CONTEXTS):
    where = PAIR, CHIP, SPLIT, context
    gain = lambda batch, where=where: table.gain(*where, batch)[1]
    plots.curve(
      axes, BATCHES, list(map(gain, BATCHES)), f'{context:,} tokens', i
    )
    most = table.cell(*where).fits
    if most <= BATCHES[-1]:
      (cross,) = axes.plot([most], [gain(most)], 'kx', markersize=8)
      cross.set_label('largest batch that fits')
  axes.set_xscale('log', base=2)
  axes.set_xticks(BATCHES[::2], [f'{x:,}' for x in BATCHES[::2]])
  crosses, _ = axes.get_legend_handles_labels()
  axes.legend(handles=crosses[:1], frameon=False, loc='lower left')
  plots.level(axes, 1)
  plots.label(
    axes,
    'batch (rows)',
    f'times plain decoding at alpha {table.ALPHA}, by roofline',
    f'{PAIR} on {SPLIT} {CHIP}: large batches lose at short contexts',
  )


# Name of the table: (draws on axes, size in inches).
FIGURES = {'stops': (stops, (6.4, 4.0))}
