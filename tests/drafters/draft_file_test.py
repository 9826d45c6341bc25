"""Files of drafts: what is written is read, or the error says why not."""

import types as python_types

import numpy as np
import pytest
import safetensors.numpy

from specdec_jax.drafters import draft_file
from specdec_jax.io import tokenizer

KIND = draft_file.Kind('medusa', 'a file of scripts/medusa.py')
OWN = tokenizer.from_bytes(300, 'bytes 300')
ARRAYS = {
  'a': np.arange(3, dtype=np.int32),
  'b': np.arange(6, dtype=np.float32).reshape(2, 3).T,
}
ABOUT = {'tokenizer': OWN.fingerprint(), 'steps': 3, 'taps': (1, 2)}


@pytest.fixture
def path(tmp_path):
  draft_file.write(KIND, tmp_path / 'draft', ARRAYS, ABOUT)
  return tmp_path / 'draft'


def test_what_is_written_is_read(path):
  arrays, about = draft_file.read(KIND, path)
  assert about == ABOUT | {'steps': '3', 'taps': '[1, 2]'}
  assert set(arrays) == set(ARRAYS)
  for name, x in ARRAYS.items():
    np.testing.assert_array_equal(arrays[name], x)
  with pytest.raises(ValueError, match='^output .*: cannot be written: No suc'):
    draft_file.write(KIND, path.parent / 'no' / 'a', ARRAYS, ABOUT)
  assert [x.name for x in path.parent.iterdir()] == ['draft']


def test_what_is_no_file_of_a_draft(path):
  folder = path.parent
  (folder / 'cut').write_bytes(path.read_bytes()[:-9])
  (folder / 'text').write_text('to be or not to be')
  safetensors.numpy.save_file(ARRAYS, folder / 'plain')
  other = draft_file.Kind('eagle', '')
  draft_file.write(other, folder / 'eagle', ARRAYS, ABOUT)
  for name, message in (
    ('cut', 'damaged, or not a file of scripts/medusa.py'),
    ('text', 'damaged, or not a file'),
    ('plain', 'not a file of scripts/medusa.py'),
    ('eagle', 'not a file of scripts/medusa.py'),
    ('.', 'no such file; give a file of scripts/medusa.py'),
    ('absent', 'no such file; give a file of scripts/medusa.py'),
  ):
    with pytest.raises(ValueError, match=f'^medusa {folder}.*: {message}'):
      draft_file.read(KIND, folder / name)


def test_the_zoo_is_a_folder_of_drafts(tmp_path, monkeypatch):
  monkeypatch.setattr(draft_file, 'ZOO', tmp_path)
  with pytest.raises(ValueError, match='^medusa zoo:a: the zoo has no draft y'):
    draft_file.find(KIND, 'zoo:a')
  file = tmp_path / 'one' / 'draft.safetensors'
  file.parent.mkdir()
  draft_file.write(KIND, file, ARRAYS, ABOUT)
  assert draft_file.find(KIND, 'zoo:one') == file
  with pytest.raises(ValueError, match='^medusa zoo:two: the zoo has one$'):
    draft_file.read(KIND, 'zoo:two')


def test_a_file_is_fitted_once_to_a_target(path):
  target = python_types.SimpleNamespace(drafts={}, tokenizer=OWN)
  load = lambda: draft_file.fitted(KIND, path, target, lambda *x: x)
  first = load()
  assert first is load()
  draft_file.check_tokenizer(KIND, path, first[1], target)
  path.write_bytes(path.read_bytes())  # another file of the same name
  assert load() is not first
  target.tokenizer = tokenizer.from_bytes(257, 'bytes 257')
  with pytest.raises(ValueError, match='another tokenizer than that of bytes'):
    draft_file.check_tokenizer(KIND, path, first[1], target)
