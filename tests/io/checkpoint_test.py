"""What is restored is what was saved, or an error that names the file."""

import errno
import logging
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.io import checkpoint
from tests.io import files_test, saved

SMALL = {'x': np.arange(3, dtype=np.int32)}


@pytest.fixture(name='folder')
def _folder(tmp_path):
  return saved.two_steps(tmp_path / 'steps')


def placed(tree, mesh):
  put = lambda x, want: jax.device_put(x, want.sharding)
  return jax.tree.map(put, tree, saved.like(tree, mesh))


def mesh(*sizes):
  devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
  return jax.sharding.Mesh(devices, ('a', 'b'))


@pytest.mark.parametrize('before', [(1, 1), (2, 4), (4, 1)])
def test_a_step_is_restored_onto_any_mesh(tmp_path, before):
  want = saved.state(3)
  folder, before_save = tmp_path / 'new' / 'folder', placed(want, mesh(*before))
  # As the training loop: what is saved and restored crosses it on purpose.
  with checkpoint.Checkpoints(folder) as c, jax.transfer_guard('disallow'):
    assert c.restore(saved.like(want)) is None
    c.save(3, before_save, {'it': {'at': 7}, 'lr': 1e-3})
    for after in ((2, 4), (1, 1), (1, 2)):
      wanted = saved.like(want, mesh(*after))
      got = c.restore(wanted)
      assert (got.step, got.facts) == (3, {'it': {'at': 7}, 'lr': 1e-3})
      assert saved.content(got.arrays) == saved.content(want)
      # The old devices are forgotten.
      for x, y in zip(
        jax.tree.leaves(got.arrays), jax.tree.leaves(wanted), strict=True
      ):
        assert x.sharding == y.sharding
    for x in jax.tree.leaves(c.restore(saved.like(want)).arrays):
      assert x.devices() == {jax.devices()[0]}


def test_arrays_may_be_overwritten_once_save_returns(tmp_path):
  negated = jax.jit(lambda x: -x, donate_argnums=0)
  x, host, seen = jnp.arange(1e6), np.ones(3, np.float32), [1]
  wanted = {
    'x': jax.ShapeDtypeStruct(x.shape, x.dtype),
    'host': jax.ShapeDtypeStruct((3,), jnp.float32),
  }
  with checkpoint.Checkpoints(tmp_path) as c:
    c.save(1, {'x': x, 'host': host}, {'seen': seen})
    host[:] = 0
    seen.append(2)
    negated(negated(negated(x))).block_until_ready()
    got = c.restore(wanted)
  np.testing.assert_array_equal(got.arrays['x'], np.arange(1e6))
  np.testing.assert_array_equal(got.arrays['host'], 1)
  assert got.facts == {'seen': [1]}


@pytest.mark.parametrize('part', ['manifest', '_METADATA', 'state/d/'])
def test_the_newest_valid_step_is_used_and_said(folder, caplog, part):
  path = [p for p in saved.all_files(folder / '2') if part in p.as_posix()][0]
  path.write_bytes(path.read_bytes()[:-1])
  c = checkpoint.Checkpoints(folder)
  with caplog.at_level(logging.WARNING, logger='absl'):
    got = c.restore(saved.like(saved.state(0)))
  assert got.step == 1
  assert saved.content(got.arrays) == saved.content(saved.state(1))
  assert f'step 2 is NOT restored: {path}' in caplog.text
  assert 'falling back to step 1' in caplog.text


def test_the_newest_and_the_best_are_kept(tmp_path):
  seen = []
  with checkpoint.Checkpoints(tmp_path, keep=2) as c:
    for step in range(0, 70, 10):
      c.save(step, SMALL, {}, best=step in (10, 40))
      c.wait()
      seen.append((c.steps(), c.best()))
  assert seen == [
    ([0], None),
    ([0, 10], 10),
    ([10, 20], 10),
    ([10, 20, 30], 10),
    ([30, 40], 40),
    ([40, 50], 40),
    ([40, 50, 60], 40),
  ]
  assert sorted(os.listdir(tmp_path)) == ['40', '50', '60']


@pytest.mark.parametrize('keep, damaged', [(1, 1), (1, 2), (2, 2)])
def test_steps_that_were_refused_take_no_valid_ones_place(
  tmp_path, keep, damaged
):
  """Ahead of the run that goes on; they stay until their turn comes again."""
  last = keep + damaged
  with checkpoint.Checkpoints(tmp_path, keep=9) as c:
    for step in range(1, last + 1):
      c.save(step, SMALL, {}, best=step == last)
  refused = list(range(keep + 1, last + 1))
  for step in refused:
    manifest = tmp_path / f'{step}/manifest.json'
    # The newest has an intact one, which says that it is the best.
    path = [x for x in saved.all_files(tmp_path / str(step)) if x != manifest][
      0
    ]
    path.write_bytes(path.read_bytes()[:-1])
  with checkpoint.Checkpoints(tmp_path, keep=keep) as c:
    assert c.restore(SMALL).step == keep
    assert c.best() is None
    c.save(keep + 1, SMALL, {'new': True})
    c.wait()
    assert c.steps() == [*range(2, keep + 2), *refused[1:]]
    got = c.restore(SMALL, keep + 1)
    assert got.facts == {'new': True}
    c.save(last + 1, SMALL, {})
    c.wait()
    valid = [*range(2, keep + 2), last + 1][-keep:]
    assert [s for s in c.steps() if s not in refused[1:]] == valid
    assert c.restore(SMALL).step == last + 1


class Killed(BaseException):
  """As SIGKILL would: nothing of ours catches it, so nothing cleans up."""


@pytest.mark.parametrize('after', [False, True])
def test_death_at_any_change_of_the_folder_loses_one_step_at_most(
  tmp_path, monkeypatch, after
):
  """Before and after (halfway, for a removal) each change that a save makes."""
  with checkpoint.Checkpoints(tmp_path / 'first', keep=1) as c:
    c.save(1, SMALL, {}, best=True)
    c.save(2, SMALL, {})
  for own in ('notes.part', 'plots'):
    (tmp_path / 'first' / own).mkdir()
  moment = 0
  while True:
    folder = tmp_path / str(moment)
    shutil.copytree(tmp_path / 'first', folder)
    (folder / '7.part' / 'arrays.orbax-checkpoint-tmp').mkdir(parents=True)
    changes = []

    def dying(real, folder=folder, changes=changes, moment=moment):
      def call(path, *args, **kwargs):
        path = pathlib.Path(path)
        if folder not in [path, *path.parents]:
          return real(path, *args, **kwargs)
        changes.append((real.__name__, path.name))
        if len(changes) <= moment:
          return real(path, *args, **kwargs)
        if after and real is shutil.rmtree:
          inside = saved.all_files(path)
          inside[0].unlink() if inside else path.rmdir()
        elif after:
          real(path, *args, **kwargs)
        raise Killed

      return call

    with monkeypatch.context() as patch:
      patch.setattr(checkpoint.os, 'rename', dying(os.rename))
      patch.setattr(checkpoint.shutil, 'rmtree', dying(shutil.rmtree))
      patch.setattr(checkpoint.files, 'write', dying(checkpoint.files.write))
      try:
        with checkpoint.Checkpoints(folder, keep=1) as c:
          c.save(3, SMALL, {}, best=True)
        break
      except Killed:
        pass
    c = checkpoint.Checkpoints(folder, keep=1)
    assert c.steps()[-1] in (2, 3) and c.best() in (1, 3)
    for step in c.steps():
      assert c.restore(SMALL, step).step == step
    if c.steps()[-1] == 2:
      c.save(3, SMALL, {}, best=True)
    c.save(4, SMALL, {})
    c.close()
    assert sorted(os.listdir(folder)) == ['3', '4', 'notes.part', 'plots']
    moment += 1
  assert changes == [
    ('rmtree', '7.part'),
    ('rename', 'arrays.orbax-checkpoint-tmp'),
    ('write', 'manifest.json'),
    ('rename', '3.part'),
    ('rename', '1'),
    ('rmtree', '1.part'),
    ('rename', '2'),
    ('rmtree', '2.part'),
  ]


def test_a_write_that_fails_is_one_sentence_and_loses_nothing(folder, caplog):
  big = {'x': jnp.asarray(np.random.default_rng(0).normal(size=100_000))}
  before = {p: p.read_bytes() for p in saved.all_files(folder)}
  c = checkpoint.Checkpoints(folder)
  with files_test.small_files(100_000):
    c.save(3, big, {})
    with pytest.raises(checkpoint.Unsaved) as error:
      c.wait()
  text = str(error.value)
  assert text.startswith(f'{folder}: step 3 could not be saved: ')
  assert 'File too large' in text and '\n' not in text
  assert caplog.text == ''  # Orbax's stacks, one a thread
  assert {p: p.read_bytes() for p in saved.all_files(folder)} == before
  assert sorted(os.listdir(folder)) == ['1', '2']
  c.wait()  # said once
  c.save(3, big, {})
  c.close()
  assert c.steps() == [2, 3]


@pytest.mark.parametrize(
  'module, name',
  [
    (checkpoint.ocp, 'save_async'),
    (checkpoint.files, 'write'),
    (checkpoint.pathlib.Path, 'mkdir'),
  ],
)
def test_a_full_disk_loses_nothing(folder, monkeypatch, module, name):
  def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  c = checkpoint.Checkpoints(folder)
  with monkeypatch.context() as patch:
    patch.setattr(module, name, full)
    with pytest.raises(checkpoint.Unsaved, match='saved: .* No space left .*;'):
      c.save(3, saved.state(3), {})
      c.close()
  assert sorted(os.listdir(folder)) == ['1', '2']
  got = c.restore(saved.like(saved.state(0))).arrays
  assert saved.content(got) == saved.content(saved.state(2))
