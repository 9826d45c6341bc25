"""The GPU's measurements on tiny models, on a CPU: every line runs."""

import json

import numpy as np
import pytest

from experiments.gpu import parts, programs, render
from specdec_jax import decode
from tests import programs as scripts

# Of --all; the others, which read the bandwidth too, compile many programs.
OFTEN = ['bandwidth', 'plain', 'widths', 'drafts', 'improvement']
OTHERS = [x for x in parts.PARTS if x not in OFTEN[1:]]


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize('names', [OFTEN, OTHERS], ids=['often', 'others'])
def test_every_part_runs_and_has_its_table(names, tmp_path):
  folder = tmp_path / 'results'
  done = scripts.run(
    'experiments/gpu/measure.py',
    '--tiny',
    f'--results={folder}',
    f'--parts={",".join(names)}',
  ).check()
  doc = json.loads((folder / 'gpu.json').read_text())['parts']
  assert list(doc) == names
  shown = (folder / 'gpu.md').read_text()
  for name in names:
    assert doc[name]['rows'] and doc[name]['machine']['commit']
    assert render.TABLES[name][0] in shown and f'\n{name}: ' in done.out
  rows = lambda name: doc.get(name, {'rows': []})['rows']
  for row in rows('improvement') + rows('t5'):
    assert abs(row['accepted'] - row['alpha']) < 0.25
  for row in rows('widths'):
    assert row['v']['low'] <= row['v']['value'] <= row['v']['high']


def test_a_script_is_right_as_often_as_it_says():
  script_BL = programs.script(0.8, 1, 5000, seed=1)
  assert set(np.unique(script_BL)) == {programs.RIGHT, programs.RIGHT + 1}
  assert abs((script_BL == programs.RIGHT).mean() - 0.8) < 0.02


@pytest.mark.more
@pytest.mark.parametrize('gamma', [0, 3])
def test_a_steered_target_emits_one_token_whatever_is_drafted(gamma):
  s = programs.TINY._replace(target='small', draft='mini')
  m = programs.model(s.target, 'float32')
  draft = parts.lm.Settings(programs.model(s.draft, 'float32'))
  x = programs.generation(m, programs.steered(m.model), draft, gamma, s)
  script_BL = programs.script(0.5, 1, s.slots, 0) if gamma else None
  _, out = x.run(2 * s.new, script_BL)
  assert isinstance(out, decode.Output)
  text = np.asarray(out.tokens_BL)[0, s.start : s.start + 2 * s.new]
  assert (text == programs.RIGHT).all()
  drafted = int(out.info.accepted_BK.sum())
  assert (0 < drafted < 2 * s.new) if gamma else not drafted


@pytest.mark.more
def test_an_unknown_part_and_a_missing_one_are_refused(tmp_path):
  run = lambda parts: scripts.run(
    'experiments/gpu/measure.py',
    '--tiny',
    f'--results={tmp_path}',
    f'--parts={parts}',
  )
  run('speed').check_refused('parts=speed: allowed are bandwidth, plain')
  run('improvement').check_refused('parts=improvement: needs drafts, widths')
