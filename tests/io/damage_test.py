"""Whatever happens to a file of a step, the error names it."""

import random

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.io import checkpoint
from tests.io import saved


def test_every_flipped_bit_is_found_and_its_file_named(folder):
  draw = random.Random(0)
  c, wanted = checkpoint.Checkpoints(folder), saved.like(saved.state(2))
  paths = [p for p in saved.all_files(folder / '2') if p.stat().st_size]
  assert len(paths) > 8
  for i in range(500):
    # A third of them into the manifest, which must guard itself.
    path = (
      folder / '2' / checkpoint.MANIFEST if i % 3 == 0 else draw.choice(paths)
    )
    old = path.read_bytes()
    bit = draw.randrange(8 * len(old))
    new = bytearray(old)
    new[bit // 8] ^= 1 << bit % 8
    path.write_bytes(new)
    with pytest.raises(checkpoint.Corrupt) as error:
      c.restore(wanted, step=2)
    assert error.value.path == path and str(path) in str(error.value)
    path.write_bytes(old)
  got = c.restore(wanted).arrays
  assert saved.content(got) == saved.content(saved.state(2))


@pytest.mark.parametrize(
  'how, wrong', [('gone', 'No such file'), ('cut', 'truncated'), ('empty', '')]
)
def test_every_missing_or_truncated_file_is_named(folder, how, wrong):
  c, wanted = checkpoint.Checkpoints(folder), saved.like(saved.state(2))
  for path in saved.all_files(folder / '2'):
    old = path.read_bytes()
    if not old and how != 'gone':
      continue
    path.unlink()
    if how != 'gone':
      path.write_bytes(old[:-1] if how == 'cut' else b'')
    with pytest.raises(checkpoint.Corrupt) as error:
      c.restore(wanted, step=2)
    assert error.value.path == path and str(path) in str(error.value)
    assert wrong in str(error.value) or path.name == checkpoint.MANIFEST
    path.write_bytes(old)


def test_no_valid_step_is_an_error_that_names_the_newest(folder):
  paths = [folder / step / checkpoint.MANIFEST for step in '12']
  for path in paths:
    path.write_text('{}')
  with pytest.raises(
    checkpoint.Corrupt, match='no valid step is left'
  ) as error:
    checkpoint.Checkpoints(folder).restore(saved.like(saved.state(0)))
  assert error.value.path == paths[1]


def test_a_file_that_was_not_saved_is_refused(folder):
  path = folder / '2' / 'arrays' / 'notes.txt'
  path.write_text('mine')
  with pytest.raises(checkpoint.Corrupt) as error:
    checkpoint.Checkpoints(folder).restore(saved.like(saved.state(0)), step=2)
  assert error.value.path == path


def test_a_step_under_another_number_is_refused(folder):
  (folder / '2').rename(folder / '7')
  c = checkpoint.Checkpoints(folder)
  with pytest.raises(checkpoint.Corrupt, match='step 2'):
    c.restore(saved.like(saved.state(0)), step=7)
  with pytest.raises(checkpoint.Corrupt, match='no such step'):
    c.restore(saved.like(saved.state(0)), step=2)


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
  tree = saved.like(saved.state(0))
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
  monkeypatch.setattr(checkpoint, '_hash', lambda path: pytest.fail('read'))
  with pytest.raises(checkpoint.Foreign) as error:
    checkpoint.Checkpoints(folder).restore(
      tree._replace(params=params, key=key)
    )
  assert f'leaf {name} is saved as {saved_as}, asked for as {asked_as}' in str(
    error.value
  )
  assert error.value.path == folder / '2' / checkpoint.MANIFEST
