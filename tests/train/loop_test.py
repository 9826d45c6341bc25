"""Killed, stopped, broken or refused: what a run leaves, and goes on to."""

import errno
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from specdec_jax import machine
from specdec_jax.io import checkpoint, files
from specdec_jax.train import loop
from specdec_jax.train import step as step_lib
from tests.train import runs


@pytest.fixture(scope='module', autouse=True)
def short():
  """Compiles once, and measures no machine."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(machine, 'matmul_flops', lambda dtype: 1e9)
    patch.setattr(step_lib, 'make', runs.make)
    yield


@pytest.fixture(scope='module')
def whole(short, tmp_path_factory):
  """The workdir of a run that nothing happened to, and how it ended."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  return workdir, runs.run(workdir, runs.task(), keep=100)


@pytest.fixture
def nans():
  """Lets them pass, as programs do."""
  jax.config.update('jax_debug_nans', False)
  yield
  jax.config.update('jax_debug_nans', True)


class Killed(BaseException):
  """As SIGKILL would: nothing of ours catches it."""


def at(count: int, act, call=lambda *args: None):
  """call, but its `count`th time acts before."""
  calls = []

  def acting(*args, **named):
    calls.append(args)
    if len(calls) == count:
      act()
    return call(*args, **named)

  return acting


def die():
  raise Killed


def stop(number=signal.SIGTERM):
  os.kill(os.getpid(), number)


def same_end(workdir, ended, whole):
  reference, best = whole
  assert runs.left(workdir) == runs.left(reference)
  assert (ended.step, ended.figures) == (14, best.figures)
  for name, x in best.params.items():
    np.testing.assert_array_equal(ended.params[name], x)


def test_what_a_run_leaves(whole):
  workdir, ended = whole
  # Every fourth; what was the best of 5, 10, 14; the last.
  steps = runs.saved(workdir)
  assert list(steps) == [4, 5, 8, 10, 12, 14]
  assert [facts['data']['taken'] for _, facts in steps.values()] == list(steps)
  assert ended.step == 14
  said = runs.lines(workdir)
  steps = [5, 10, 14, *range(1, 15)]
  assert sorted(line['step'] for line in said) == sorted(steps)
  # Nothing in it that JSON does not have, and no clock.
  assert said[5]['alpha_at'] == [1.0, None]
  assert 'NaN' not in (metrics := runs.metrics(workdir))
  assert 'tokens_per_second' not in metrics
  # Of one device, of eight that there are.
  assert jax.device_count() > 1
  task, lines = runs.task(), (workdir / 'clocks.jsonl').read_text().splitlines()
  assert len(lines) == 14
  for step, clocks in enumerate(map(json.loads, lines), 1):
    flops = clocks['tokens_per_second'] * task.flops / task.tokens
    np.testing.assert_allclose(clocks['utilisation'], flops / 1e9)
    assert clocks['step'] == step


PLACES = dict(step=2, place=1, evaluate=3, save=2, write_manifest=3)


@pytest.mark.more
@pytest.mark.parametrize('where, time', PLACES.items())
def test_a_killed_run_goes_on_to_the_same_bytes(
  tmp_path, monkeypatch, whole, where, time
):
  """Each time, in another place between step 4 * time and the next save."""
  task = runs.task()
  if where == 'step':
    task = task._replace(refresh=at(4 * time + 1, die))
  if where == 'place':
    task = task._replace(place=at(4 * time + 1, die, task.place))
  if where == 'evaluate':
    task = task._replace(evaluate=at(time, die, runs.evaluate))
  owners = {'save': checkpoint.Checkpoints, 'write_manifest': checkpoint}
  with monkeypatch.context() as patch:
    if owner := owners.get(where):
      patch.setattr(owner, where, at(2 * time, die, getattr(owner, where)))
    with pytest.raises(Killed):
      runs.run(tmp_path, task)
  assert max(runs.saved(tmp_path)) == 4 * time
  same_end(tmp_path, runs.run(tmp_path, runs.task()), whole)


@pytest.mark.more
@pytest.mark.parametrize(
  'step, number',
  [
    (5, signal.SIGTERM),  # amid the first evaluation
    (7, signal.SIGINT),
    (14, signal.SIGTERM),  # which is the last
  ],
)
def test_a_signal_saves_the_step_and_ends(tmp_path, whole, step, number):
  task, before = runs.task(), signal.getsignal(number)
  send = lambda: stop(number)
  if step == 5:
    task = task._replace(evaluate=at(1, send, runs.evaluate))
  else:
    task = task._replace(refresh=at(step, send))
  ended = runs.run(tmp_path, task)
  assert signal.getsignal(number) == before
  if step < 14:
    assert ended == loop.Ended(step)
    assert max(runs.saved(tmp_path)) == step
    ended = runs.run(tmp_path, runs.task())
  same_end(tmp_path, ended, whole)


def test_a_run_that_ended_is_not_made_again(tmp_path, whole):
  shutil.copytree(whole[0], tmp_path / 'run')
  never = lambda *args: pytest.fail('it trains')
  task = runs.task()._replace(refresh=never, evaluate=never)
  ended = runs.run(tmp_path / 'run', task, keep=100)
  same_end(tmp_path / 'run', ended, whole)


@pytest.mark.parametrize('broken', [(14,), (14, 12, 10)])
def test_a_damaged_step_is_made_again(tmp_path, whole, broken):
  shutil.copytree(whole[0], tmp_path / 'run')
  for step in broken:
    path = tmp_path / f'run/checkpoints/{step}/arrays/_CHECKPOINT_METADATA'
    path.write_bytes(path.read_bytes()[:-1])
  ended = runs.run(tmp_path / 'run', runs.task(), keep=100)
  same_end(tmp_path / 'run', ended, whole)


def test_a_resumed_run_remembers_its_best_score_while_that_step_is_there(
  tmp_path,
):
  # The first evaluation, of step 5, is the best; those of 10 and 14 are not.
  task = runs.task()._replace(score=lambda figures: figures['alpha'])
  stopped, gone = tmp_path / 'stopped', tmp_path / 'gone'
  runs.run(stopped, task._replace(refresh=at(13, stop)), keep=100)
  shutil.copytree(stopped, gone)
  resumed = lambda folder: runs.run(
    folder, runs.task()._replace(score=task.score), keep=100
  )
  best = resumed(stopped)
  assert best.step == 5
  for step in (5, 12, 13):
    (gone / f'checkpoints/{step}/manifest.json').unlink()
  # What is left, 4 and 8, knows the score of step 5.
  assert resumed(gone).step == 10
  # Of a run that has ended, the newest takes the place of a damaged best.
  path = stopped / 'checkpoints/5/manifest.json'
  path.write_bytes(path.read_bytes()[:-1])
  ended = resumed(stopped)
  assert ended.step == 14
  want = runs.evaluate(ended.params)['alpha']
  assert ended.figures['alpha'] == want != best.figures['alpha']


@pytest.mark.parametrize(
  'scores, best', [((0.5, 0.3, 0.4), 5), ((0.3, 0.5, 0.5), 10)]
)
def test_the_best_is_better_than_all_before_it(tmp_path, scores, best):
  """Than the last alone is not enough; of equal ones it is the first."""
  given, refreshed = iter(scores), []
  task = runs.task()._replace(
    score=lambda figures: next(given),
    refresh=lambda *args: refreshed.append(args),
  )
  ended = runs.run(tmp_path, task, keep=1)
  # Before each batch, with the steps that are done and what they gave.
  assert [step for step, _ in refreshed] == list(range(14))
  assert np.array_equal(refreshed[0][1]['w'], task.params['w'])
  assert ended.step == best
  # Of those that were saved, the last one and the best stay.
  steps = runs.saved(tmp_path)
  assert sorted(steps) == [best, 14]
  assert [facts['score'] for _, facts in steps.values()] == [max(scores)] * 2


@pytest.mark.usefixtures('nans')
@pytest.mark.parametrize('what', ['loss', 'gradient_norm', 'score'])
def test_what_is_not_finite_is_never_saved(tmp_path, what):
  """gradient_norm: of a loss that is finite, so that only the next is not."""

  def place(batch):
    tenth = task.batches.state()['taken'] == 10
    if what == 'loss' and tenth:
      batch['y'] = np.full_like(batch['y'], np.nan)
    return batch | {'bad': np.array(what == 'gradient_norm' and tenth)}

  scores = iter([1.0, float('nan') if what == 'score' else 0.0])
  task = runs.task()._replace(
    loss=runs.bad_loss, score=lambda figures: next(scores), place=place
  )
  said = f'step 10: {what} is not finite on batch 9'
  with pytest.raises(ValueError, match=said):
    runs.run(tmp_path, task)
  assert list(runs.saved(tmp_path)) == [5, 8]
  last = runs.lines(tmp_path)[-1]
  assert last['step'] == (10 if what == 'score' else 9) and 'loss' in last


def test_a_run_goes_on_with_other_settings_if_told_to(tmp_path):
  config = lambda: files.read_json(tmp_path / 'config.json')['run']
  runs.run(tmp_path, runs.task()._replace(refresh=at(6, stop)))
  assert config()['steps'] == 14
  ended = runs.run(tmp_path, runs.task(), steps=15, keep=5, changed=True)
  assert (ended.step, config()['steps'], config()['keep']) == (15, 15, 5)
  with pytest.raises(ValueError, match='steps=9: .* has step 15'):
    runs.run(tmp_path, runs.task(), steps=9, changed=True)


@pytest.mark.parametrize('what', ['checkpoint', 'logs', 'config'])
def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch, whole, what):
  full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  def fail():
    raise full

  # Of the checkpoints the third; of the logs, in the middle of a step.
  owner, name, time = {
    'checkpoint': (checkpoint, 'write_manifest', 3),
    'logs': (loop.logs_lib, 'print', 13),
    'config': (files, 'write', 1),
  }[what]
  with monkeypatch.context() as patch:
    call = at(time, fail, getattr(owner, name, print))
    patch.setattr(owner, name, call, raising=False)
    with pytest.raises(ValueError, match='disk is full|No space left') as error:
      runs.run(tmp_path, runs.task())
  assert '\n' not in str(error.value) and str(tmp_path) in str(error.value)
  steps = runs.saved(tmp_path)
  assert max([0, *steps]) == {'checkpoint': 5, 'logs': 5, 'config': 0}[what]
  same_end(tmp_path, runs.run(tmp_path, runs.task()), whole)
