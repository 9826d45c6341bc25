"""Curves of training runs: what is read, what is drawn, what is refused."""

import json

import matplotlib.image
import numpy as np
import pytest

from scripts import plot
from tests import programs


def workdir(folder, *rows, end='\n'):
  folder.mkdir(exist_ok=True)
  text = '\n'.join(x if isinstance(x, str) else json.dumps(x) for x in rows)
  (folder / 'metrics.jsonl').write_text(text + end)
  return folder


def distilled(folder, shift=0.0):
  """Losses at every step, and an evaluation at every second."""
  rows = []
  for step in range(1, 9):
    rows.append(dict(step=step, loss=5 - step / 2 + shift, learning_rate=1.0))
    if step % 2 == 0:
      alpha = step / 10
      rows.append(
        dict(step=step, alpha=alpha, alpha_at=[alpha, None])
        | dict(block_efficiency=1 + alpha + shift)
      )
  return workdir(folder, *rows)


def test_the_last_line_of_a_step_counts_for_each_figure(tmp_path):
  folder = workdir(
    tmp_path / 'a',
    dict(step=1, loss=4.0),
    dict(step=2, loss=3.0),
    dict(step=2, alpha=0.5, alpha_at=[0.5]),
    dict(step=3, loss=9.0),
    dict(step=2, loss=2.5),  # resumed from step 1
    dict(step=3, loss=2.0, alpha_at=[0.75, 0.25]),
    '{"step": 4, "lo',
    end='',
  )
  found = plot.read(folder)
  expected = {
    'loss': ([1, 2, 3], [[4.0], [2.5], [2.0]]),
    'alpha': ([2], [[0.5]]),
    # A position that was not tried is a gap.
    'alpha_at': ([2, 3], [[0.5, np.nan], [0.75, 0.25]]),
  }
  assert found.keys() == expected.keys()
  for name, (steps, values) in expected.items():
    assert found[name][0] == steps
    np.testing.assert_array_equal(found[name][1], values)


def lines(axes):
  return [
    (list(x.get_xdata()), np.ravel(x.get_ydata()).tolist())
    for x in axes.get_lines()
  ]


def test_runs_are_drawn_as_they_were_written_and_told_apart(tmp_path):
  runs = {x: plot.read(distilled(tmp_path / x, i)) for i, x in enumerate('ab')}
  page = plot.draw(runs)
  loss, alpha, kept, efficiency = page.axes
  steps = list(range(1, 9))
  assert lines(loss) == [
    (steps, [5 - s / 2 + shift for s in steps]) for shift in (0, 1)
  ]
  assert lines(alpha) == [([2, 4, 6, 8], [0.2, 0.4, 0.6, 0.8])] * 2
  assert [x.get_text() for x in kept.texts] == ['1', '1']  # none at position 2
  # Each run has one colour everywhere, which the legend names.
  (legend,) = page.legends
  names = [x.get_text() for x in legend.get_texts()]
  keys = [x.get_color() for x in legend.get_lines()]
  assert names == ['a', 'b'] and len({*keys}) == 2
  for axes in (loss, alpha, efficiency):
    assert [x.get_color() for x in axes.get_lines()] == keys
  one = plot.draw({'a': runs['a']}).legends[0]  # a single run too
  assert [x.get_text() for x in one.get_texts()] == ['a']


@pytest.mark.more
def test_a_figure_has_ink_in_every_panel(tmp_path):
  a = distilled(tmp_path / 'a')
  assert programs.run('scripts/plot.py', a).check().out == f'{a}/curves.png\n'
  pixels = matplotlib.image.imread(a / 'curves.png')[..., :3].mean(-1)
  for panel in np.array_split(pixels, 4):
    assert (panel < 0.5).sum() > 500


@pytest.mark.more
@pytest.mark.parametrize(
  'row, message',
  [
    (dict(step=1, gradient_norm=1.0), 'has no loss, alpha or block effic'),
    (dict(loss=1.0), 'metrics.jsonl:1: has no step'),
  ],
)
def test_refusals(tmp_path, row, message):
  folder = workdir(tmp_path / 'a', row)
  with pytest.raises(ValueError, match=message):
    plot.read(folder)
  with pytest.raises(ValueError, match='metrics.jsonl: cannot be read .No su'):
    plot.read(tmp_path / 'none')
  done = programs.run('scripts/plot.py', *[folder] * 7)
  done.check_refused('plot.py: 7 workdirs: name 1 to 6')
