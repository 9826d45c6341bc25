"""What is said of files and settings that the user named, and what is not."""

import errno
import os

import pytest
from absl import flags

from specdec_jax import fields
from tests import programs


@pytest.fixture(name='named')
def _named(monkeypatch, tmp_path):
  """A folder that a nested setting of a flag names."""
  given = {'config': {'bench': {'prompts': ('', str(tmp_path / 'in'))}}, 'n': 3}
  monkeypatch.setattr(
    flags.FlagValues, 'flag_values_dict', lambda self: given, raising=True
  )
  monkeypatch.setattr('sys.argv', ['program.py'])
  for name in ('SPECDEC_JAX_CACHE', 'XDG_CACHE_HOME', 'HF_HOME', 'TMPDIR'):
    monkeypatch.delenv(name, raising=False)
  return tmp_path


def error_of(act) -> OSError:
  with pytest.raises(OSError) as found:
    act()
  return found.value


@pytest.mark.parametrize('file', ['in', 'in/below'])
def test_a_file_that_the_user_named_is_one_sentence(named, file):
  said = fields.surroundings(error_of(lambda: open(named / file)))
  assert said == f'{named / file}: No such file or directory'


def test_a_file_of_the_environment_is_one_sentence(named, monkeypatch):
  lost = error_of(lambda: (named / 'cache/x').read_bytes())
  assert not fields.surroundings(lost)
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(named / 'cache'))
  assert fields.surroundings(lost) == f'{named}/cache/x: {lost.strerror}'


def test_a_mistake_of_the_program_keeps_its_traceback(named):
  for file in ('', named / 'index', named / 'inside', named.parent):
    assert not fields.surroundings(error_of(lambda file=file: open(file)))
  assert not fields.surroundings(OSError('no number'))
  assert not fields.surroundings(ConnectionError(errno.ECONNRESET, 'reset'))


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_never_the_programs_mistake(named, number):
  why = os.strerror(number)
  assert fields.surroundings(OSError(number, why)) == why
  assert fields.surroundings(OSError(number, why, '/any')) == f'/any: {why}'


@pytest.mark.parametrize(
  'text, message',
  [
    ('import nothing_here', "No module named 'nothing_here', in {file}:1"),
    ('def get_config():\n  return None', 'its get_config returns None'),
  ],
)
def test_what_a_config_file_raises_is_one_sentence(tmp_path, text, message):
  file = tmp_path / 'mine.py'
  file.write_text(text)
  done = programs.run('scripts/audit.py', f'--config={file}')
  # Of None, ml_collections says more before.
  said = done.check(2).err.splitlines()[-1]
  assert message.format(file=file) in said and 'Traceback' not in done.err


PRINTS = """
import os, sys
sys.path.insert(0, '.')
from specdec_jax import program

def run():
  print('\u2026', flush=True)
  read, write = os.pipe()
  os.close(read)
  os.dup2(write, 1)
  print('nobody reads this', flush=True)

program.launch(run)
"""


def test_a_result_is_printed_whatever_stdout_can_show(tmp_path):
  """And where its reader has ended, as in `| head`, there is no traceback."""
  (tmp_path / 'prints.py').write_text(PRINTS, 'utf-8')
  done = programs.run(tmp_path / 'prints.py', PYTHONIOENCODING='ascii')
  assert done.check(2).out == '\\u2026\n'
  assert done.err == 'prints.py: the reader of its output has ended\n'
