"""The T5 trainings of DistillSpec: goes on when killed, its page, its claim."""

import pathlib

import pytest
from absl import flags

from experiments import claims
from experiments.distillspec_t5 import render, train
from specdec_jax.distill import distillation
from specdec_jax.train import train_lm


def test_a_killed_run_goes_on_in_the_same_folders(tmp_path, monkeypatch):
  """Each training goes on by itself: same settings, same folder."""
  done, started = [], []

  def run(s, folder):
    started.append((s, folder))
    if len(done) == 4 and 'killed' not in done:
      done.append('killed')
      raise KeyboardInterrupt
    done.append(folder.name)
    return {'finished': True, 'step': 1, 'draft': str(folder / 'draft')}

  monkeypatch.setattr(flags.FLAGS['trainings'], 'value', str(tmp_path))
  flags.FLAGS.mark_as_parsed()
  monkeypatch.setattr(train_lm, 'run', run)
  monkeypatch.setattr(distillation, 'run', run)
  row = train.rows(pathlib.Path('/nowhere'), '', '')['w128']
  with pytest.raises(KeyboardInterrupt):
    train.trained(row)
  first = list(started)
  started.clear()
  found = train.trained(row)
  assert started[: len(first)] == first
  assert len(found) == 1 + 3 * 4 and len(set(found.values())) == len(found)
  starts = {s.student.source for s, _ in started[2:]}
  assert starts == {str(tmp_path / 'w128-trainings/start/model')}
  assert {s.run.steps for s, _ in started[2:]} == {train.FULL.steps}
  language = [s.run.steps for s, _ in started[:2]]
  assert language == [train.FULL.start, train.FULL.start + train.FULL.steps]
  with pytest.raises(ValueError, match='--target, --draft: not of'):
    train.rows(pathlib.Path('/nowhere'), 'a', 'b')


def cell(source, divergence, warm, calls):
  return {
    'source': source,
    'divergence': divergence,
    'temperature': warm,
    'emitted': [10, 12, 10, 12] * 4,
    'calls': calls * 4,
    'alpha': 0.5,
  }


def test_the_claim_is_of_the_best_cell_on_other_captions():
  cells = {
    'w128': [
      x
      for warm in render.WARM
      for x in (
        cell('', '', warm, [6, 6, 6, 6.0]),
        cell('teacher', 'forward_kl', warm, [4, 5, 4, 5.0]),
        cell('student', 'reverse_kl', warm, [5, 3, 5, 3.0]),
      )
    ]
  }
  every = train.rows(pathlib.Path('/nowhere'), '', '')
  found = render.claims(cells, every)
  # Chosen by captions 0 and 2; on 1 and 3, 5 windows against 6.
  assert found[0].place == 'w128, forward_kl on teacher'
  assert found[0].ours.value == pytest.approx(6 / 5 - 1)
  assert claims.outcome(found[0]) == 'reproduced'
  # Twice as good for every caption: no doubt about that.
  base, twice = (cell('', '', 0.0, [x, 2 * x] * 2) for x in (2, 1))
  assert render.gain(twice, base) == pytest.approx((1.0, 1.0, 1.0))
