"""Files that are written whole."""

import contextlib
import errno
import io
import os
import resource

import pytest

from specdec_jax import program
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


@contextlib.contextmanager
def small_files(size):
  """Under a limit of so many bytes a file, as `ulimit -f` sets one: the kernel
  refuses what goes beyond."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_may_not_grow_is_named(tmp_path):
  """Whether it is written at once or line by line, and closed after that."""
  for name in ('whole', 'lines'):
    path, text = tmp_path / name, 'longer than nine bytes'
    with small_files(9), pytest.raises(OSError) as found:
      if name == 'whole':
        files.write(path, text)
      else:
        with files.naming(path), open(path, 'a') as file:
          file.write(text)
          file.flush()
    said = program.surroundings(found.value)
    assert said == f'{path}: {os.strerror(errno.EFBIG)}'
  assert [x.name for x in tmp_path.iterdir()] == ['lines']


class Counted(io.BytesIO):
  """Bytes that know how many of them were asked for."""

  asked = 0

  def read(self, size=-1):
    self.asked += size if size >= 0 else 1 << 30
    return super().read(size)


@pytest.mark.parametrize(
  'before', [b'', b'\n', b'a\n', b'a\n' * 10**5, b'a' * 10**6 + b'\n']
)
@pytest.mark.parametrize('torn', [b'', b'{"te', b'b' * 10**5])
def test_a_torn_line_is_found_from_the_end(before, torn):
  file = Counted(before + torn)
  assert files.torn(file) == torn
  assert file.asked < len(torn) + 2**17


def test_jsonl_is_read_line_by_line(tmp_path):
  path = tmp_path / 'a.jsonl'
  text = '\ufeff{"a": "x\u2028y"}\n\n  \r\n{"b": [1]}'
  path.write_bytes(text.encode())
  assert list(files.read_jsonl(path)) == [
    (f'{path}:1', {'a': 'x\u2028y'}),
    (f'{path}:4', {'b': [1]}),
  ]
  assert len(list(files.read_jsonl(path, finished=True))) == 1


@pytest.mark.parametrize(
  'line, message',
  [
    (b'{"a": 1', r':2: not JSON \(.* at column 8'),
    (b'[1]', ':2: a JSON object is needed, not list'),
    (b'{"a": "\xff"}', ":2: not JSON .'utf-8' codec"),
    (b'[' * 100_000, ':2: not JSON'),
    # Half of a UTF-16 pair: valid JSON, no valid Unicode.
    (rb'{"a": "cut \ud83d"}', r':2: \\ud83d is half of a UTF-16 surrogate'),
    (rb'{"a": ["x", {"\uDE00": 1}]}', r':2: \\ude00 is half of'),
    (rb'{"a": "\ude00\ud83d"}', r':2: \\ude00 is half of'),
  ],
)
def test_a_line_that_is_no_object_is_named(tmp_path, line, message):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'{}\n' + line)
  with pytest.raises(ValueError, match=message):
    list(files.read_jsonl(path))


def test_whole_pairs_and_their_spelling_are_text(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_bytes(rb'{"a": "\ud83d\ude00 \\ud83d"}')
  assert [row for _, row in files.read_jsonl(path)] == [{'a': '😀 \\ud83d'}]
  path.write_bytes(rb'{"a": "\ud83d\ude00"}')
  assert files.read_json(path) == {'a': '😀'}
  path.write_bytes(rb'{"a": "\uD83d"}')
  with pytest.raises(ValueError, match=r'a.jsonl: \\ud83d is half of'):
    files.read_json(path)


def test_a_jsonl_file_that_is_not_there(tmp_path):
  with pytest.raises(ValueError, match='a: cannot be read .No such file'):
    list(files.read_jsonl(tmp_path / 'a'))
