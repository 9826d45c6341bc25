"""Files that are written whole."""

import pytest

from specdec_jax.io import files


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
  path = tmp_path / 'a.md'
  files.write(path, 'old')
  files.write(tmp_path / 'a.png', b'\x89PNG')
  assert (tmp_path / 'a.png').read_bytes() == b'\x89PNG'

  def full(*_):
    raise OSError('no space')

  monkeypatch.setattr(files.os, 'replace', full)
  with pytest.raises(OSError, match='no space'):
    files.write(path, 'new')
  assert path.read_text() == 'old\n'
  assert sorted(x.name for x in tmp_path.iterdir()) == ['a.md', 'a.png']
