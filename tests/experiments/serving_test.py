"""The load test of the server: what it asks, and how it judges."""

import collections
import json

import matplotlib.figure
import pytest

from experiments.serving import clients, render
from tests import programs
from tests.experiments import reports


def test_a_tenth_is_malformed_and_a_quarter_cancelled():
  asks = clients.asks([[1], [2, 3]], 1000, 16, 0.5)
  kinds = collections.Counter(x.kind for x in asks)
  assert kinds['malformed'] == 100 and kinds['cancelled'] == 250
  assert kinds['whole'] + kinds['stream'] == 650
  assert len({x.body['seed'] for x in asks}) == 1000
  assert {x.body['max_tokens'] for x in asks} <= {*range(2, 17)}


def test_speculation_keeps_up_where_no_cell_is_much_slower():
  cells = lambda *values: [{'ratio': {'value': x}} for x in values]
  assert clients.keeps_up(cells(1.0, 0.95))
  assert not clients.keeps_up(cells(1.0, 0.949))


def test_the_page_counts_every_answer_that_is_wrong():
  wrong = {'whole': 36, 'stream': 1}
  text = render.markdown(reports.stored('serving') | {'wrong': wrong})
  assert 'of 64 clients: 37 not as they should be; 0 times' in text


def test_the_figure_has_a_title_and_begins_at_nothing(monkeypatch):
  drawn = []

  def png(paint, **_):
    drawn.append(matplotlib.figure.Figure().subplots())
    paint(drawn[0])
    return b''

  monkeypatch.setattr(render.plots, 'png', png)
  render.figure(reports.stored('serving'))
  (axes,) = drawn
  assert axes.get_title('left') or axes.get_title()
  assert axes.get_ylim()[0] == 0 and len(axes.lines) == 2


@pytest.mark.slow
def test_a_small_load_test(tmp_path):
  done = programs.run(
    'experiments/serving/load.py',
    '--config=configs/pair.py:tiny',
    "--config.decode.methods=('lookup',)",
    '--requests=60',
    '--clients=8',
    '--timed=4',
    '--rounds=2',
    f'--results={tmp_path}',
  ).check()
  assert done.document['wrong'] == {} and done.document['status'] == 0
  stored = json.loads((tmp_path / 'serving.json').read_text())
  assert stored == done.document
  assert (tmp_path / 'serving.png').exists()
  off, on, *_ = done.document['cells']
  assert off['ratio']['value'] == 1 and on['ratio']['low'] is not None
  assert min(x['init_share'] for x in done.document['cells']) > 0


@pytest.mark.slow
def test_a_pool_beside_batches(tmp_path):
  done = programs.run(
    'experiments/serving/pools.py',
    '--config=configs/pair.py:tiny',
    "--config.decode.methods=('lookup',)",
    '--requests=12',
    '--rows=4',
    '--longest=24',
    f'--results={tmp_path}',
  ).check()
  assert done.document['same']
  plain, fast = done.document['cells']
  assert plain['decoding'] == 'autoregressive' and fast['gain']['low']
  stored = json.loads((tmp_path / 'pools.json').read_text())
  assert stored == done.document
