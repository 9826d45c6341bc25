"""The grid: its cells, the choice of the best one, its tables, a tiny run."""

import pathlib

import numpy as np
import pytest

from experiments import distilled
from experiments.distillspec_grid import config as grid_config
from experiments.distillspec_grid import grid, render, settings
from specdec_jax import printing
from tests.experiments import reports

FOLDER = pathlib.Path('somewhere')


def made(size='full', **sections):
  c = grid_config.get_config(size).unlock()
  for name, changes in sections.items():
    c[name].update(changes)
  return c


def test_every_cell_is_trained_once():
  s = made()
  found = settings.cells(s.grid)
  # Fixed text teaches the same for both temperatures: 5 x (1 + 3 x 2).
  assert len(found) == len(set(found)) == 35
  assert len({x.name for x in found}) == 35
  for source in s.grid.sources:
    warm = {x.temperature for x in found if x.source == source}
    assert warm == ({None} if source == 'text' else {0.0, 1.0})
  # At any other temperature the distributions to learn are others.
  assert settings.cell('text', 'forward_kl', 0.5, 0).temperature == 0.5


@pytest.mark.parametrize(
  'warm, answers, loss', [(None, 1.0, 1.0), (0.0, 0.0, 1.0), (0.7, 0.7, 0.7)]
)
def test_what_a_cell_is_trained_with(warm, answers, loss):
  s = made()
  cell = settings.Cell('student', 'jensen_shannon:0.5', warm, 3)
  paths = dict.fromkeys(('text', 'target', 'draft', 'answers'), FOLDER)
  d = settings.distilled(s, cell, **paths)
  assert (d.data.completions, d.loss.divergence) == (
    'student',
    'jensen_shannon:0.5',
  )
  assert (d.loss.temperature, d.data.temperatures) == (loss, (answers,))
  assert d.run.seed == d.data.seed == 3
  # Cross-entropy reads as many tokens in as many steps.
  base = settings.language(s, FOLDER, 'mini', steps=7, seed=3)
  assert (base.text.rows, base.text.length) == (d.batch.rows, d.data.length)
  assert d.student.source and not d.student.share and d.student.kind == 'lm'


# --- tables of measurements ---------------------------------------------------


def row(source, divergence, warm, emitted, calls, *, seed=0, differ=0):
  return dict(
    source=source,
    divergence=divergence,
    temperature=warm,
    seed=seed,
    emitted=list(emitted) * 4,
    calls=list(calls) * 4,
    alpha=0.5,
    differ=differ,
  )


def document(rows, warm=(0.0,)):
  s = made(
    grid=dict(
      divergences=('forward_kl', 'reverse_kl'),
      sources=('text', 'student'),
      temperatures=warm,
      more_seeds=(1,),
    ),
    judge=dict(prompts=4),
  )
  return dict(
    machine=reports.MACHINE,
    settings=s.to_dict(),
    sizes=[2_950_000, 320_000],
    corpus='',
    rows=rows,
  )


def four(divergent):
  """Cells by source and divergence; each with 8 tokens a prompt."""
  eight = [8] * 4
  rows = [
    row('start', '', 0.0, eight, [8] * 4),
    row('baseline', '', 0.0, eight, [4] * 4),
    *(row(a, b, 0.0, eight, calls) for (a, b), calls in divergent.items()),
  ]
  # The best of seed 0 again, of another seed.
  rows.append(row('baseline', '', 0.0, eight, [4] * 4, seed=1))
  rows.append(row('student', 'forward_kl', 0.0, eight, [2, 5, 4, 5], seed=1))
  return rows


CALLS = {
  ('text', 'forward_kl'): [4, 8, 4, 8],
  ('text', 'reverse_kl'): [8, 1, 8, 1],
  ('student', 'forward_kl'): [2, 4, 2, 4],
  ('student', 'reverse_kl'): [4, 4, 4, 4],
}


def test_the_best_is_judged_by_prompts_that_did_not_choose_it():
  doc = document(four(CALLS))
  cells = render.of(doc, 0.0, 0)['cells']
  assert len(cells) == 4
  top = distilled.best(cells)
  # By all prompts reverse KL on text would not be last, by the others first.
  assert (top['source'], top['divergence']) == ('student', 'forward_kl')
  (own, first), (other, second) = render.gains(doc, 0.0)
  assert (own, other) == (0, 1)
  # 4 tokens a call on prompts 0 and 2; 2 as the baseline on 1 and 3.
  assert first.value == pytest.approx(0)
  # The other seed's cells were not chosen by these either.
  assert second.value == pytest.approx(4 / 5 - 1)
  assert second.low <= second.value <= second.high


def test_the_tables():
  rows = four(CALLS)
  rows[3]['differ'] = 2
  assert render.figure(document(rows)).startswith(b'\x89PNG')
  text = render.markdown(document(rows))
  assert 'Target 2.95M parameters' in text and 'draft 0.32M' in text
  lines = text.splitlines()
  assert '| T = 0 | text | student |' in lines
  of = lambda name: next(x for x in lines if x.startswith(f'| {name}'))
  assert '| **2.67** (0.50), +33 % (' in of('forward_kl')
  assert of('forward_kl').startswith('| forward_kl | 1.33 (0.50), -33 % (')
  assert '2.00 (0.50), 2.00 to 2.00' in of('cross-entropy alone')
  assert '1.00 (0.50), 1.00 to 1.00' in of('where they begin')
  assert 'forward_kl on student' in text
  assert "not plain decoding's: 2 of 32" in text
  assert 'the worst source for 2 of 2 pairs' in text
  calls = CALLS | {('text', 'reverse_kl'): [1] * 4}
  assert render.fixed_is_worst(document(four(calls))) == (1, 2)


def test_intervals_are_paired_by_prompt():
  calls = np.array([1, 2, 4, 8])
  base = row('', '', 0.0, [8] * 4, (2 * calls).tolist())
  mine = row('', '', 0.0, [8] * 4, calls.tolist())
  found = distilled.gain(mine, base)
  # Twice as good for every prompt: no doubt about that.
  assert found == pytest.approx((1.0, 1.0, 1.0))
  alone = distilled.efficiency(mine)
  assert alone.low < alone.value < alone.high


# --- a run --------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_and_another_that_finds_it_done(
  tmp_path, monkeypatch, all_compile_in_less_time
):
  s = made(
    'quick',
    pair=dict(target='tiny', vocab=300, target_steps=4, draft_steps=4),
    grid=dict(
      steps=4,
      refresh=2,
      sources=('text', 'mixed'),
      divergences=('forward_kl',),
      more_seeds=(1,),
    ),
    judge=dict(prompts=4, new_tokens=8),
  )
  monkeypatch.setattr(printing, 'track', lambda items, *_: items)
  first = grid.run(s, tmp_path)
  assert len(first['rows']) == 2 * (2 + 2 + 2)
  assert not any(x['differ'] for x in first['rows'] if not x['temperature'])
  done = {x: x.stat().st_mtime_ns for x in tmp_path.rglob('*.safetensors')}
  again = grid.run(s, tmp_path)
  assert again == first
  assert done == {
    x: x.stat().st_mtime_ns for x in tmp_path.rglob('*.safetensors')
  }
  other = made('quick')
  with pytest.raises(ValueError, match='begun with other values of grid'):
    grid.run(other, tmp_path)
