"""Curves of training runs: what is read, what is drawn, what is refused."""

import io
import itertools
import json
import math
import pathlib
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from matplotlib import figure

from specdec_jax.analysis import curves, plots

ROOT = pathlib.Path(__file__).parents[2]


def workdir(folder, *lines, seed=None, end='\n'):
  folder.mkdir(parents=True, exist_ok=True)
  text = '\n'.join(x if isinstance(x, str) else json.dumps(x) for x in lines)
  (folder / 'metrics.jsonl').write_text(text + end)
  if seed is not None:
    (folder / 'config.json').write_text(json.dumps({'run': {'seed': seed}}))
  return folder


def distilled(folder, shift=0.0, seed=0):
  """Losses at every step and what a judge said at every second."""
  rows = []
  for step in range(1, 9):
    rows.append(dict(step=step, loss=5 - step / 2 + shift, learning_rate=1.0))
    if step % 2 == 0:
      alpha = step / 10
      judged = dict(
        step=step,
        alpha=alpha,
        alpha_at=[alpha, None],
        block_efficiency=1 + alpha + shift,
      )
      rows.append(judged)
  return workdir(folder, *rows, seed=seed)


def drawn(monkeypatch, runs):
  """The axes of figure(runs), and its caption."""
  seen = {}

  def stacked(paints, *, size, caption):
    page = figure.Figure(figsize=size)
    every = page.subplots(len(paints), squeeze=False)[:, 0]
    for paint, axes in zip(paints, every, strict=True):
      paint(axes)
    seen.update(axes=list(every), caption=caption)
    return b''

  monkeypatch.setattr(plots, 'stacked', stacked)
  curves.figure(runs)
  return seen['axes'], seen['caption']


def lines(axes):
  """[(xs, ys)] of the curves, without the marks beside the names."""
  out = []
  for line in axes.get_lines():
    if len(line.get_xdata()) > 1 and line.get_transform() == axes.transData:
      out.append((list(line.get_xdata()), list(line.get_ydata())))
  return out


def words(axes):
  return [x.get_text() for x in axes.texts if x.get_text()]


# --- reading -----------------------------------------------------------------


def test_the_last_line_of_a_step_counts_for_each_figure(tmp_path):
  folder = workdir(
    tmp_path / 'a',
    dict(step=1, loss=4.0),
    dict(step=2, loss=3.0),
    dict(step=2, alpha=0.5),
    dict(step=3, loss=9.0),
    dict(step=2, loss=2.5),  # gone on with from step 1
    dict(step=3, loss=2.0),
    seed=7,
  )
  run = curves.read(folder, 'a')
  assert run.seed == 7
  assert run.curves == {
    'loss': ([1, 2, 3], [4.0, 2.5, 2.0]),
    'alpha': ([2], [0.5]),
  }


def test_positions_that_were_never_tried_are_gaps(tmp_path):
  folder = workdir(
    tmp_path / 'a',
    dict(step=1, alpha_at=[0.5, None, None]),
    dict(step=2, alpha_at=[0.75, 0.25, None]),
  )
  found = curves.read(folder, 'a').curves
  assert found.keys() == {'alpha_at/0', 'alpha_at/1'}
  steps, values = found['alpha_at/1']
  assert steps == [1, 2] and math.isnan(values[0]) and values[1] == 0.25


def test_half_a_last_line_is_left_out(tmp_path):
  folder = workdir(tmp_path, dict(step=1, loss=4.0), '{"step": 2, "lo', end='')
  assert curves.read(folder, 'a').curves['loss'] == ([1], [4.0])


@pytest.mark.parametrize(
  'content, message',
  [
    (['{"step": 1'], 'metrics.jsonl:2: no JSON'),
    (['[1]'], 'metrics.jsonl:2: needs an object'),
    ([{'loss': 1.0}], "whole number 'step'"),
    ([{'step': True, 'loss': 1.0}], "whole number 'step'"),
    ([{'step': 2, 'loss': 'low'}], 'loss="low" is no figure'),
    ([{'step': 2, 'loss': [1.0]}], r'loss=\[1.0\] is no figure'),
    ([{'step': 2, 'alpha_at': 0.5}], 'alpha_at=0.5 is no figure'),
  ],
)
def test_a_damaged_line_is_named(tmp_path, content, message):
  folder = workdir(tmp_path / 'a', dict(step=1, loss=1.0), *content)
  with pytest.raises(ValueError, match=message):
    curves.draw([str(folder)])
  assert not (folder / 'curves.png').exists()


def test_what_cannot_be_drawn_is_refused(tmp_path):
  draw = lambda *names, **more: curves.draw(
    [str(tmp_path / name) for name in names], **more
  )
  with pytest.raises(ValueError, match='0 workdirs: name 1 to 5'):
    draw()
  with pytest.raises(ValueError, match='no: no such folder'):
    draw('no')
  (tmp_path / 'empty').mkdir()
  with pytest.raises(ValueError, match='metrics.jsonl cannot be read.*No such'):
    draw('empty')
  workdir(tmp_path / 'bare', dict(step=1, gradient_norm=1.0))
  workdir(tmp_path / 'lost', dict(step=1, loss=float('nan')))
  for name in ('bare', 'lost'):
    with pytest.raises(ValueError, match=f'{name}.*nothing to draw'):
      draw(name)
  distilled(tmp_path / 'a')
  with pytest.raises(ValueError, match='out .*: there is no folder'):
    draw('a', out=str(tmp_path / 'no' / 'x.png'))
  many = [distilled(tmp_path / f'r{i}').name for i in range(6)]
  with pytest.raises(ValueError, match='6 workdirs'):
    draw(*many)


# --- drawing -----------------------------------------------------------------


def test_one_run_is_drawn_as_it_was_written(tmp_path, monkeypatch):
  run = curves.read(distilled(tmp_path / 'a', seed=3), 'a')
  (loss, alpha, efficiency), caption = drawn(monkeypatch, [run])
  steps = list(range(1, 9))
  assert lines(loss) == [(steps, [5 - s / 2 for s in steps])]
  judged = ([2, 4, 6, 8], [0.2, 0.4, 0.6, 0.8])
  assert lines(alpha) == [judged, judged]  # alpha, and alpha_at/0
  assert (judged[0], [1 + a for a in judged[1]]) in lines(efficiency)
  assert words(loss) == ['training']
  assert sorted(words(alpha)) == ['alpha', 'draft 1']
  assert efficiency.get_xlabel() == 'step'
  assert caption.startswith('Seed 3. Drawn by commit ')


def test_runs_are_named_and_told_apart(tmp_path, monkeypatch):
  runs = [
    curves.read(distilled(tmp_path / name, i / 10, seed=i), name)
    for i, name in enumerate('abc')
  ]
  held = workdir(
    tmp_path / 'd', dict(step=2, loss=3.0), dict(step=4, held_out_loss=3.5)
  )
  runs.append(curves.read(held, 'd'))
  (loss, alpha, efficiency), caption = drawn(monkeypatch, runs)
  assert set(words(loss)) == set('abcd')
  assert sorted(words(alpha)) == sorted(words(efficiency)) == list('abc')
  looks = [
    (x.get_linestyle(), x.get_color(), x.get_marker())
    for x in efficiency.get_lines()
    if list(x.get_xdata()) == [2, 4, 6, 8]
  ]
  assert len(set(looks)) == 3
  assert 'of a, b, c: training only' in loss.get_title()
  assert caption.startswith('Seeds: a 0, b 1, c 2. ')
  assert drawn(monkeypatch, runs[:3])[1] == caption


def test_folders_of_one_name_are_told_apart(tmp_path):
  folders = [tmp_path / 'kl' / 'run', tmp_path / 'tv' / 'run']
  assert curves._names(folders) == ['kl/run', 'tv/run']
  assert curves._names([folders[0], tmp_path / 'x']) == ['run', 'x']


def ink(png):
  """Share of dark pixels."""
  pixels = matplotlib.image.imread(io.BytesIO(png))
  assert pixels.shape[:2] == (1088, 1024)
  return (pixels[..., :3].mean(-1) < 0.5).mean()


def test_the_figure_is_a_page_with_ink(tmp_path):
  a, b = distilled(tmp_path / 'a'), distilled(tmp_path / 'b', 0.5)
  assert curves.draw([str(a), str(b)]) == a / 'curves.png'
  out = tmp_path / 'x.png'
  assert curves.draw([str(a)], str(out)) == out
  bare = ink(plots.stacked([lambda axes: None] * 3, size=(6.4, 6.8)))
  for path in (a / 'curves.png', out):
    dark = ink(path.read_bytes())
    assert dark > 1.2 * bare


@pytest.mark.parametrize(
  'ys',
  [
    [0.25, 1.5, 2.75, 4.0],
    [2.0, 2.0, 2.0, 2.0],
    [1.0, 2.25, 2.25, 2.25],  # the last one pushes all three, and the first
    [0.0, 0.0, 0.5, 4.5],
    [3.5, 4.5, 4.75, 5.0],
  ],
)
def test_names_are_spread_as_little_as_possible(ys):
  """Against every arrangement on a grid."""
  found = plots.spread(ys, 1.0, 0.0, 5.0)
  assert min(np.diff(found)) > 1 - 1e-9
  assert 0 <= found[0] and found[-1] <= 5 + 1e-9
  cost = lambda at: sum((a - y) ** 2 for a, y in zip(at, ys, strict=True))
  grid = np.arange(0, 5.01, 0.125)
  best = min(
    cost(at)
    for at in itertools.combinations(grid, 4)
    if min(np.diff(at)) >= 1 - 1e-9
  )
  assert cost(found) <= best + 1e-9


def test_the_script_says_what_is_wrong_in_one_sentence(tmp_path):
  script = [sys.executable, str(ROOT / 'scripts/plot.py')]
  run = lambda *words: subprocess.run(
    [*script, *words], capture_output=True, text=True
  )
  bad = run(str(tmp_path / 'no'))
  assert bad.returncode == 2 and not bad.stdout
  assert bad.stderr == f'plot.py: workdir {tmp_path}/no: no such folder\n'
  good = run(str(distilled(tmp_path / 'a')), f'--out={tmp_path}/b.png')
  assert good.returncode == 0, good.stderr
  assert good.stdout == f'{tmp_path}/b.png\n'
  assert (tmp_path / 'b.png').read_bytes().startswith(b'\x89PNG')
