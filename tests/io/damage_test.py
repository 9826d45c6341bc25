"""Whatever happens to a file of a step, the error names it."""

import pathlib
import random
import shutil

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.io import checkpoint, files
from tests.io import saved


def restore(folder, **changes):
  wanted = saved.like(saved.state(2))._replace(**changes)
  return checkpoint.Checkpoints(folder).restore(wanted, step=2)


@pytest.fixture(scope='module', name='two_steps')
def _two_steps(tmp_path_factory):
  return saved.two_steps(tmp_path_factory.mktemp('saved'))


@pytest.fixture(name='folder')
def _folder(two_steps, tmp_path):
  return pathlib.Path(shutil.copytree(two_steps, tmp_path / 'steps'))


def refused(folder, path, wrong=''):
  with pytest.raises(checkpoint.Corrupt) as error:
    restore(folder)
  assert str(error.value).startswith(f'{path}: ')
  assert wrong in str(error.value) or path.name == checkpoint.MANIFEST


def falls_back(folder):
  older = checkpoint.Checkpoints(folder).restore(saved.like(saved.state(1)))
  assert (older.step, older.facts) == (1, {'next': 1})
  assert saved.content(older.arrays) == saved.content(saved.state(1))


def test_every_flipped_bit_is_found_and_its_file_named(folder):
  draw = random.Random(0)
  paths = [p for p in saved.all_files(folder / '2') if p.stat().st_size]
  assert len(paths) > 8
  for i in range(500):
    # A third of them into the manifest, which must guard itself.
    manifest = folder / '2' / checkpoint.MANIFEST
    path = draw.choice(paths) if i % 3 else manifest
    old = path.read_bytes()
    bit = draw.randrange(8 * len(old))
    new = bytearray(old)
    new[bit // 8] ^= 1 << bit % 8
    path.write_bytes(new)
    refused(folder, path)
    if i % 25 == 0:
      falls_back(folder)
    path.write_bytes(old)
  assert saved.content(restore(folder).arrays) == saved.content(saved.state(2))


def test_missing_truncated_and_added_files_are_named(folder):
  for path in saved.all_files(folder / '2'):
    old = path.read_bytes()
    path.unlink()
    refused(folder, path, 'is missing')
    falls_back(folder)
    for new in {old[:-1], b''} - {old}:
      path.write_bytes(new)
      refused(folder, path, 'is not what was saved')
    path.write_bytes(old)
  (folder / '2' / 'arrays' / 'notes.txt').write_text('mine')
  refused(
    folder, folder / '2' / 'arrays' / 'notes.txt', 'is not what was saved'
  )


def test_no_valid_step_is_an_error_that_names_the_newest(folder):
  paths = [folder / step / checkpoint.MANIFEST for step in '12']
  for path in paths:
    path.write_text('{}')
  wrong = 'no valid step is left'
  with pytest.raises(checkpoint.Corrupt, match=wrong) as error:
    checkpoint.Checkpoints(folder).restore(saved.like(saved.state(0)))
  assert str(error.value).startswith(f'{paths[1]}: ')


def test_a_step_under_another_number_is_refused(folder):
  (folder / '2').rename(folder / '7')
  c = checkpoint.Checkpoints(folder)
  with pytest.raises(checkpoint.Corrupt, match='step 2'):
    c.restore(saved.like(saved.state(0)), step=7)
  with pytest.raises(checkpoint.Corrupt, match='no such step'):
    restore(folder)


SHAPED = jax.ShapeDtypeStruct
LAYERS = [SHAPED((16,), jnp.bfloat16), None]


@pytest.mark.parametrize(
  'changes, message',
  [
    (
      dict(params={'a/b': SHAPED((12, 8), jnp.float32), 'layers': LAYERS}),
      ".params['a/b'] is saved as float32[8, 12], asked for as float32[12, 8]",
    ),
    (
      dict(key=SHAPED((2,), jnp.int32)),
      '.key is saved as uint32[2], asked for as int32[2]',
    ),
    (
      dict(params={'layers': LAYERS}),
      ".params['a/b'] is saved as float32[8, 12], asked for as nothing",
    ),
    (
      dict(step={'a': SHAPED((), jnp.int32)}),
      '.step is saved as int32[], asked for as nothing (and 1 more leaves)',
    ),
  ],
)
def test_a_foreign_tree_is_refused_before_a_file_is_read(
  folder, monkeypatch, changes, message
):
  monkeypatch.setattr(files, 'sha256', lambda path: pytest.fail('read'))
  with pytest.raises(checkpoint.Corrupt) as error:
    restore(folder, **changes)
  manifest = folder / '2' / checkpoint.MANIFEST
  assert str(error.value).startswith(f'{manifest}: leaf {message}')
