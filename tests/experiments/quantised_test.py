"""Target weights x draft weights: its page from a document, and a tiny run."""

import functools
import json

import gguf
import matplotlib.figure
import pytest

from experiments.quantised import render
from tests import programs
from tests.experiments import reports
from tests.io import tiny

GAIN = dict(value=1.4, low=1.2, high=1.6)


STORED = reports.stored('quantised')['runs'][0]


def row(name, tok_s, **changes):
  out = dict(
    name=name,
    drafter=name.partition(' g=')[0],
    tok_s=tok_s,
    improvement=GAIN,
    alpha=dict(alpha=0.7),
    counts=dict(block_efficiency=2.5),
    predicted=dict(improvement=1.5),
    explained=None,
  )
  return STORED['rows'][1] | out | changes


def run(weights, *rows, **changes):
  out = dict(
    weights=weights,
    calibration=dict(
      step=0.04,
      verify={'1': 1.0, '2': 1.1, '3': 1.25, '5': 1.75},
      propose={'lm int4': {'0': 0, '4': 0.8}, 'lm stored': {'0': 0, '4': 3.6}},
    ),
    predicted={
      'lm int4 g=4': dict(improvement=1.5),
      'lm stored g=2': dict(improvement=0.6),
      'lm stored g=4': dict(improvement=0.5),
    },
    rows=[row('autoregressive', 20.0), *rows],
  )
  return STORED | out | changes


DOC = dict(
  runs=[
    run('bfloat16', row('lm int4 g=2', 26.0), row('lm int4 g=4', 28.0)),
    run('stored', row('lm int4 g=4', None)),
  ],
)


def test_the_faster_gamma_stands_and_what_was_left_out():
  text = render.markdown(DOC)
  assert '| bfloat16 | lm int4 g=4 | 0.20 | 0.70 | 2.50 | 1.50x ' in text
  # With the best that was foreseen.
  assert '| stored | lm stored | 0.90 | - | - | 0.60x | left out |' in text
  fastest = 'Fastest: target bfloat16 with lm int4 g=4, 28.0 tokens a second'
  assert text.startswith(fastest) and 'with stored, 20.0.\n' in text


def test_a_result_that_its_own_parts_refute_says_what_they_give():
  parts = lambda x: row('lm int4 g=4', 28.0, explained=dict(improvement=x))
  for x in (1.17, 1.64):  # 1.4 measured: 1.20 and 0.85 of them
    text = render.markdown({'runs': [run('stored', parts(x))]})
    assert '| 1.40 (1.20 to 1.60) | 28.0 |' in text
  for x in (1.16, 1.66):
    text = render.markdown({'runs': [run('stored', parts(x))]})
    assert f'| 1.40 (1.20 to 1.60) [parts: {x}x] | 28.0 |' in text


def test_a_divergence_that_float32_does_not_reach_is_a_bound():
  away = dict(STORED['distance'], kl=9e-7)
  text = render.markdown({'runs': [run('stored', distance=away)]})
  assert '| under 1e-6 |' in text


def test_no_two_rows_of_the_figure_look_alike(monkeypatch):
  """Plain decoding, and as many drafters as there are marks; the best gamma."""
  seen = {}

  def paint(axes, **_):
    figure = matplotlib.figure.Figure()
    axes(figure.subplots())
    for line in figure.axes[0].lines:
      look = line.get_marker(), line.get_color()
      seen[line.get_label()] = look, [*line.get_xdata()]
    return b''

  monkeypatch.setattr(render.plots, 'png', paint)
  names = [f'drafter {i}' for i in range(5)]
  rows = [row(f'{x} g={g}', 20.0 + g) for x in names for g in (2, 4)]
  render.figure({'runs': [run('stored', *rows)]})
  assert {*seen} == {'plain', *names}
  assert len({mark for (mark, _), _ in seen.values()}) == 6  # in grey too
  assert seen['drafter 0'][1] == [24.0] and seen['plain'][1] == [20.0]


def test_the_figure_leaves_out_what_was_too_short():
  assert render.figure(DOC).startswith(b'\x89PNG')


def measure(*arguments, folder):
  return programs.run(
    'experiments/quantised/table.py',
    '--config=configs/pair.py:tiny',
    f'--results={folder}',
    *arguments,
  )


@pytest.mark.more
def test_bad_input_is_one_sentence(tmp_path):
  done = measure('--drafts=float32,nine', folder=tmp_path)
  done.check_refused('drafts=nine: allowed are float32')
  assert not list(tmp_path.iterdir())


def test_llama_cpps_speed_is_of_all_prompts_together():
  timed = [dict(tokens=10, seconds=1.0), dict(tokens=30, seconds=1.0)]
  rows = [dict(gamma=0, timed=timed), dict(gamma=4, timed=timed[:1])]
  asked = dict(threads=2, prompts=2, new=31)
  doc = dict(machine=STORED['machine'], version='3', asked=asked, rows=rows)
  text = render.llama(doc)
  assert '| plain | 20.0 |' in text
  assert '| with the draft, up to 4 | 10.0 |' in text


@pytest.mark.slow
def test_a_tiny_run(tmp_path):
  once = functools.partial(
    measure,
    '--drafts=float32',
    '--minutes=0',
    "--config.decode.methods=('lookup', 'lm')",
    '--config.bench.prompts_per_category=1',
    '--config.bench.prompt_tokens=16',
    '--config.bench.repeats=1',
    '--config.decode.max_new_tokens=8',
    folder=tmp_path,
  )
  once('--targets=bfloat16').check()
  once('--targets=float32').check()  # keeps the other
  doc = json.loads((tmp_path / 'quantised.json').read_text())
  first, second = doc['runs']
  assert first['distance'] is None
  assert second['distance']['total_variation'] > 0
  named = {x['drafter'] for x in first['rows']} | {
    x.rpartition(' g')[0] for x in first['left_out']
  }
  assert named == {'autoregressive', 'lookup', 'lm float32'}
  assert '| bfloat16 | ' in (tmp_path / 'quantised.md').read_text()
  assert (tmp_path / 'quantised.png').stat().st_size > 10_000


@pytest.mark.slow
def test_what_passes_of_a_tiny_file_cost(tmp_path):
  c = tiny.config('llama', width=64, head_dim=16, mlp=96, vocab=320)
  kind = gguf.GGMLQuantizationType.Q4_1
  path = tiny.write_gguf(tmp_path / 'a.gguf', c, quantise=kind)
  run = functools.partial(
    programs.run,
    'experiments/quantised/passes.py',
    '--config.decode.max_new_tokens=8',
    '--config.bench.prompt_tokens=16',
    '--config.bench.small',
    f'--results={tmp_path}',
    '--repeats=2',
  )
  run().check_refused('sources: give the models')
  out = run(f'--sources={path}').check().out
  rows = json.loads((tmp_path / 'passes.json').read_text())['rows']
  ways = 'stored', 'stored, int8 rows', 'again int8', 'again int8, int8 rows'
  assert [x['target'] for x in rows] == [f'a (Q4_1, {way})' for way in ways]
  for x in rows:
    assert f'| {x["target"]} | {x["mb"]:.0f} | {x["tok_s"]:.1f} | ' in out
    assert x['v8'] > 0 and x['share'] > 0
    assert (x['tv'] is not None) == ('int8 rows' in x['target'])
