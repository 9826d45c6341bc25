"""What is restored is what was saved, or an error that names the file."""

import errno
import logging
import os
import pathlib
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specdec_jax.io import checkpoint, manifest
from tests.io import saving_child

ROOT = pathlib.Path(__file__).parents[2]
SPEC = jax.sharding.PartitionSpec


class State(NamedTuple):
  params: dict
  opt_state: tuple
  key: jax.Array
  step: jax.Array


def state(seed: int) -> State:
  keys = jax.random.split(jax.random.key(seed), 2)
  params = {
    'a/b': jax.random.normal(keys[0], (8, 12)),
    'layers': [jax.random.normal(keys[1], (16,)).astype(jnp.bfloat16), None],
    'none': jnp.zeros((0, 3)),
  }
  return State(
    params,
    optax.adamw(1e-3).init(params),
    jax.random.key_data(keys[0]),
    jnp.int32(seed),
  )


def like(tree, mesh=None):
  """mesh: the arrays with 8 or more elements are split over all of it."""

  def one(x):
    spec = SPEC()
    if x.size >= 8:
      spec = SPEC('a', 'b') if x.ndim == 2 else SPEC(('a', 'b'))
    sharding = jax.NamedSharding(mesh, spec) if mesh else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(one, tree)


def placed(tree, mesh):
  put = lambda x, want: jax.device_put(x, want.sharding)
  return jax.tree.map(put, tree, like(tree, mesh))


def content(tree) -> list:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  kinds = [(k, x.dtype, x.shape, np.asarray(x).tobytes()) for k, x in leaves]
  return [jax.tree.structure(tree), kinds]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Steps 1 and 2; tests copy the folder before they break it."""
  folder = tmp_path_factory.mktemp('saved')
  with checkpoint.Checkpoints(folder) as c:
    for step in (1, 2):
      c.save(step, state(step), {'next': step, 'loss': 0.1, 'ids': [1, 2]})
  return folder


@pytest.fixture
def folder(saved, tmp_path):
  return pathlib.Path(shutil.copytree(saved, tmp_path / 'steps'))


def all_files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(p for p in folder.rglob('*') if p.is_file())


def mesh(*sizes):
  devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
  return jax.sharding.Mesh(devices, ('a', 'b'))


@pytest.mark.parametrize('before', [(1, 1), (2, 4), (4, 1)])
def test_a_step_is_restored_onto_any_mesh(tmp_path, before):
  want = state(3)
  folder, before_save = tmp_path / 'new' / 'folder', placed(want, mesh(*before))
  # As the training loop: what is saved and restored crosses it on purpose.
  with checkpoint.Checkpoints(folder) as c, jax.transfer_guard('disallow'):
    assert c.restore(like(want)) is None
    c.save(3, before_save, {'it': {'at': 7}, 'lr': 1e-3})
    for after in ((2, 4), (1, 1), (1, 2)):
      wanted = like(want, mesh(*after))
      got = c.restore(wanted)
      assert (got.step, got.facts) == (3, {'it': {'at': 7}, 'lr': 1e-3})
      assert content(got.arrays) == content(want)
      # The old devices are forgotten.
      for x, y in zip(
        jax.tree.leaves(got.arrays), jax.tree.leaves(wanted), strict=True
      ):
        assert x.sharding == y.sharding
    got = c.restore(like(want)).arrays
    assert {d for x in jax.tree.leaves(got) for d in x.devices()} == {
      jax.devices()[0]
    }


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


def test_every_flipped_bit_is_found_and_its_file_named(folder):
  draw = random.Random(0)
  c, wanted = checkpoint.Checkpoints(folder), like(state(2))
  paths = [p for p in all_files(folder / '2') if p.stat().st_size]
  assert len(paths) > 8
  for i in range(500):
    # A third of them into the manifest, which must guard itself.
    path = folder / '2' / manifest.NAME if i % 3 == 0 else draw.choice(paths)
    old = path.read_bytes()
    bit = draw.randrange(8 * len(old))
    new = bytearray(old)
    new[bit // 8] ^= 1 << bit % 8
    path.write_bytes(new)
    with pytest.raises(manifest.Changed) as error:
      c.restore(wanted, step=2)
    assert error.value.path == path and str(path) in str(error.value)
    path.write_bytes(old)
  assert content(c.restore(wanted).arrays) == content(state(2))


def damage(path: pathlib.Path, how: str) -> type[checkpoint.Corrupt]:
  old = path.read_bytes()
  path.unlink()
  if how == 'gone':
    return manifest.Missing
  path.write_bytes(old[:-1] if how == 'cut' else b'')
  return manifest.Truncated


@pytest.mark.parametrize('how', ['gone', 'cut', 'empty'])
def test_every_missing_or_truncated_file_is_named(folder, how):
  c, wanted = checkpoint.Checkpoints(folder), like(state(2))
  paths = all_files(folder / '2')
  for path in paths:
    old = path.read_bytes()
    if not old and how != 'gone':
      continue
    want = damage(path, how)
    if path.name == manifest.NAME and how != 'gone':
      want = manifest.Changed
    with pytest.raises(want) as error:
      c.restore(wanted, step=2)
    assert error.value.path == path and str(path) in str(error.value)
    path.write_bytes(old)


@pytest.mark.parametrize('part', ['manifest', '_METADATA', 'state/d/'])
def test_the_newest_valid_step_is_used_and_said(folder, caplog, part):
  path = [p for p in all_files(folder / '2') if part in p.as_posix()][0]
  damage(path, 'cut')
  c = checkpoint.Checkpoints(folder)
  with caplog.at_level(logging.WARNING, logger='absl'):
    got = c.restore(like(state(0)))
  assert got.step == 1 and content(got.arrays) == content(state(1))
  assert f'step 2 is NOT restored: {path}' in caplog.text
  assert 'falling back to step 1' in caplog.text
  # Its place is taken by the same step of the resumed run.
  c.save(2, state(2), {})
  assert content(c.restore(like(state(0))).arrays) == content(state(2))
  assert c.steps() == [1, 2]
  c.save(3, state(3), {})
  c.wait()
  assert c.steps() == [2, 3]


def test_no_valid_step_is_an_error_that_names_the_newest(folder):
  paths = [folder / step / manifest.NAME for step in '12']
  for path in paths:
    path.write_text('{}')
  with pytest.raises(manifest.Changed, match='no valid step is left') as error:
    checkpoint.Checkpoints(folder).restore(like(state(0)))
  assert error.value.path == paths[1]


def test_a_file_that_was_not_saved_is_refused(folder):
  path = folder / '2' / 'arrays' / 'notes.txt'
  path.write_text('mine')
  with pytest.raises(manifest.Unexpected) as error:
    checkpoint.Checkpoints(folder).restore(like(state(0)), step=2)
  assert error.value.path == path


def test_a_step_under_another_number_is_refused(folder):
  (folder / '2').rename(folder / '7')
  c = checkpoint.Checkpoints(folder)
  with pytest.raises(manifest.Changed, match='step 2'):
    c.restore(like(state(0)), step=7)
  with pytest.raises(manifest.Missing, match='no such step'):
    c.restore(like(state(0)), step=2)


@pytest.mark.parametrize(
  'name, saved_as, asked_as',
  [
    (".params['a/b']", 'float32[8, 12]', 'float32[12, 8]'),
    (".params['layers'][0]", 'bfloat16[16]', 'float32[16]'),
    ('.key', 'uint32[2]', 'int32[2]'),
    (".params['none']", 'float32[0, 3]', 'nothing'),
    (".params['more']", 'nothing', 'float32[8, 12]'),
  ],
)
def test_a_foreign_tree_is_refused_before_a_file_is_read(
  folder, monkeypatch, name, saved_as, asked_as
):
  tree = like(state(0))
  params, key = dict(tree.params), tree.key
  forms = {
    'float32[12, 8]': lambda: params.update(
      {'a/b': jax.ShapeDtypeStruct((12, 8), jnp.float32)}
    ),
    'float32[16]': lambda: params.update(
      {'layers': [jax.ShapeDtypeStruct((16,), jnp.float32), None]}
    ),
    'int32[2]': lambda: None,
    'nothing': lambda: params.pop('none'),
    'float32[8, 12]': lambda: params.update(more=params['a/b']),
  }
  forms[asked_as]()
  if name == '.key':
    key = jax.ShapeDtypeStruct((2,), jnp.int32)
  monkeypatch.setattr(manifest, '_hash', lambda path: pytest.fail('read'))
  with pytest.raises(manifest.Foreign) as error:
    checkpoint.Checkpoints(folder).restore(
      tree._replace(params=params, key=key)
    )
  assert f'leaf {name} is saved as {saved_as}, asked for as {asked_as}' in str(
    error.value
  )
  assert error.value.path == folder / '2' / manifest.NAME


def test_the_newest_and_the_best_are_kept(tmp_path):
  small = {'x': jnp.arange(3)}
  seen = []
  with checkpoint.Checkpoints(tmp_path, keep=2) as c:
    for step in range(0, 70, 10):
      c.save(step, small, {}, best=step in (10, 40))
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


class Killed(BaseException):
  """As SIGKILL would: nothing of ours catches it, so nothing cleans up."""


@pytest.mark.parametrize('after', [False, True])
def test_death_at_any_change_of_the_folder_loses_one_step_at_most(
  tmp_path, monkeypatch, after
):
  """Before and after (halfway, for a removal) each change that a save makes."""
  with checkpoint.Checkpoints(tmp_path / 'first', keep=1) as c:
    c.save(1, saving_child.start(), {}, best=True)
    c.save(2, saving_child.start(), {})
  moment = 0
  while True:
    folder = tmp_path / str(moment)
    shutil.copytree(tmp_path / 'first', folder)
    (folder / '7.part' / 'arrays').mkdir(parents=True)
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
          all_files(path)[0].unlink() if all_files(path) else path.rmdir()
        elif after:
          real(path, *args, **kwargs)
        raise Killed

      return call

    with monkeypatch.context() as patch:
      patch.setattr(checkpoint.os, 'rename', dying(os.rename))
      patch.setattr(checkpoint.shutil, 'rmtree', dying(shutil.rmtree))
      patch.setattr(manifest.files, 'write', dying(manifest.files.write))
      try:
        with checkpoint.Checkpoints(folder, keep=1) as c:
          c.save(
            3, saving_child.advance(saving_child.start(), 3), {}, best=True
          )
        break
      except Killed:
        pass
    c = checkpoint.Checkpoints(folder, keep=1)
    assert c.steps()[-1] in (2, 3) and c.best() in (1, 3)
    for step in c.steps():
      assert c.restore(jax.eval_shape(saving_child.start), step).step == step
    if c.steps()[-1] == 2:
      c.save(3, saving_child.start(), {}, best=True)
    c.save(4, saving_child.start(), {})
    c.close()
    assert sorted(os.listdir(folder)) == ['3', '4']
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


def test_orbax_leftovers_are_ignored_and_removed(folder):
  part = folder / '3.part'
  shutil.copytree(folder / '2' / 'arrays', part / 'arrays.orbax-checkpoint-tmp')
  (folder / 'notes.part').mkdir()
  (folder / 'plots').mkdir()
  with checkpoint.Checkpoints(folder) as c:
    assert c.steps() == [1, 2] and c.restore(like(state(0))).step == 2
    c.save(4, state(4), {})
  assert sorted(os.listdir(folder)) == ['2', '4', 'notes.part', 'plots']


def test_a_write_that_fails_is_one_sentence_and_loses_nothing(folder, caplog):
  big = {'x': jnp.asarray(np.random.default_rng(0).normal(size=100_000))}
  before = {p: p.read_bytes() for p in all_files(folder)}
  c = checkpoint.Checkpoints(folder)
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  # The kernel refuses what goes beyond: no space of this file's own.
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
  try:
    c.save(3, big, {})
    with pytest.raises(checkpoint.Unsaved) as error:
      c.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
  text = str(error.value)
  assert text.startswith(f'{folder}: step 3 could not be saved: ')
  assert 'File too large' in text and '\n' not in text
  assert caplog.text == ''  # Orbax's stacks, one a thread
  assert {p: p.read_bytes() for p in all_files(folder)} == before
  assert sorted(os.listdir(folder)) == ['1', '2']
  c.wait()  # said once
  c.save(3, big, {})
  c.close()
  assert c.steps() == [2, 3]


# As tensorstore said it on a full tmpfs, where Python does not write itself.
TENSORSTORE = (
  'RESOURCE_EXHAUSTED: Failed writing: "/ck/2.part/arrays.orbax-checkpoint-tmp/'
  'state/d/31f5": Failed to write 113423 bytes to file 7: No space left on '
  "device [os_error_code='28']"
)


@pytest.mark.parametrize('where', ['arrays', 'manifest', 'folder'])
def test_a_full_disk_is_one_sentence_that_says_what_to_do(
  folder, monkeypatch, where
):
  def full(*_, **__):
    if where == 'arrays':
      raise ValueError(TENSORSTORE)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  c = checkpoint.Checkpoints(folder)
  with monkeypatch.context() as patch:
    module, name = {
      'arrays': (checkpoint.ocp, 'save_async'),
      'manifest': (manifest.files, 'write'),
      'folder': (checkpoint.pathlib.Path, 'mkdir'),
    }[where]
    patch.setattr(module, name, full)
    with pytest.raises(checkpoint.Unsaved) as error:
      c.save(3, state(3), {})
      c.close()
  assert str(error.value) == (
    f'{folder}: step 3 could not be saved: the disk is full; free space there '
    'or give another folder, earlier steps are untouched'
  )
  assert sorted(os.listdir(folder)) == ['1', '2']
  assert content(c.restore(like(state(0))).arrays) == content(state(2))


def test_what_cannot_be_saved_is_refused_by_name(folder):
  c, x = checkpoint.Checkpoints(folder), jnp.ones(3)
  with pytest.raises(ValueError, match="leaf \\['a'\\] is float, not an array"):
    c.save(3, {'a': 1.0}, {})
  with pytest.raises(ValueError, match='save jax.random.key_data of it'):
    c.save(3, {'a': jax.random.key(0)}, {})
  with pytest.raises(ValueError, match='nothing to save'):
    c.save(3, {'a': jnp.zeros((0, 2))}, {})
  with pytest.raises(ValueError, match='facts: not JSON: .*ndarray'):
    c.save(3, x, {'a': np.ones(2)})
  with pytest.raises(ValueError, match='has step 2, which would be restored'):
    c.save(2, x, {})
  with pytest.raises(ValueError, match='steps start at 0'):
    c.save(-1, x, {})
  with pytest.raises(ValueError, match='keep=0'):
    checkpoint.Checkpoints(folder, keep=0)
  assert sorted(os.listdir(folder)) == ['1', '2']


def run_child(folder, last: int) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, '-m', 'tests.io.saving_child', folder, str(last)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )


def kill_and_resume(folder: pathlib.Path, kills: int, last: int) -> None:
  draw = random.Random(kills)
  states = {0: saving_child.start()}
  for step in range(1, last + 1):
    states[step] = saving_child.advance(states[step - 1], step)
  for _ in range(kills):
    child = run_child(folder, last)
    said = 0
    for _ in range(draw.randrange(1, 4)):
      said = int(child.stdout.readline() or said)
    try:
      child.wait(timeout=draw.uniform(0, 0.15))
    except subprocess.TimeoutExpired:
      child.send_signal(signal.SIGKILL)
    said = max([said, *map(int, child.stdout.read().split())])
    assert child.wait() in (0, -signal.SIGKILL)
    c = checkpoint.Checkpoints(folder)
    assert [0, *c.steps()][-1] >= said - 1
    for step in c.steps():
      got = c.restore(jax.eval_shape(saving_child.start), step)
      assert content(got.arrays) == content(states[step])
      assert got.facts == {'next': step + 1}
  child = run_child(folder, last)
  assert child.wait() == 0
  got = checkpoint.Checkpoints(folder).restore(
    jax.eval_shape(saving_child.start)
  )
  assert got.step == last and content(got.arrays) == content(states[last])


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
  kill_and_resume(tmp_path / 'steps', kills=2, last=8)


@pytest.mark.slow
def test_a_run_killed_thirty_times_resumes_to_the_same_bytes(tmp_path):
  kill_and_resume(tmp_path / 'steps', kills=30, last=100)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_save_and_restore_one_array(tmp_path):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  children = [
    subprocess.Popen(
      [
        sys.executable,
        '-m',
        'tests.io.sharing_child',
        tmp_path,
        address,
        str(i),
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      cwd=ROOT,
      env=os.environ | {'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''},
    )
    for i in range(2)
  ]
  out = [child.communicate(timeout=240)[0] for child in children]
  assert [child.returncode for child in children] == [0, 0], '\n'.join(out)
  for text in out:
    assert text.splitlines()[-1] == 'restored 1 of [1, 2]; unsaved 3', text
