"""What programs say of flags, settings and files, and what they leave."""

import collections
import contextlib
import errno
import os
import pathlib

import jax
import pytest
from absl import flags
from jax.experimental.compilation_cache import compilation_cache

from specdec_jax import hosts, program
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


def said_of(file) -> str:
  with pytest.raises(OSError) as found:
    open(file)
  return program.surroundings(found.value)


def test_a_file_that_the_user_named_is_one_sentence(named, monkeypatch):
  for file in ('in', 'in/below'):
    assert said_of(named / file) == f'{named / file}: No such file or directory'
  cached = named / 'cache/x'
  assert not said_of(cached)
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(named / 'cache'))
  assert said_of(cached) == f'{cached}: No such file or directory'


def test_a_mistake_of_the_program_keeps_its_traceback(named):
  for file in ('', named / 'index', named / 'inside', named.parent):
    assert not said_of(file)
  assert not program.surroundings(OSError('no number'))
  assert not program.surroundings(ConnectionError(errno.ECONNRESET, 'reset'))


@pytest.mark.parametrize(
  'number', [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG]
)
def test_a_full_disk_is_never_the_programs_mistake(named, number):
  why = os.strerror(number)
  assert program.surroundings(OSError(number, why)) == why
  assert program.surroundings(OSError(number, why, '/any')) == f'/any: {why}'


PRINTS = """
import os, sys
sys.path.insert(0, '.')
from specdec_jax import hosts, program

def run():
  print('\u2026', flush=True)
  read, write = os.pipe()
  os.close(read)
  os.dup2(write, 1)
  print('nobody reads this', flush=True)

program.launch(run)
"""


@pytest.mark.more
def test_a_result_is_printed_whatever_stdout_can_show(tmp_path):
  """And where its reader has ended, as in `| head`, there is no traceback."""
  (tmp_path / 'prints.py').write_text(PRINTS, 'utf-8')
  done = programs.run(tmp_path / 'prints.py', PYTHONIOENCODING='ascii')
  assert done.check(2).out == '\\u2026\n'
  assert done.err == 'prints.py: the reader of its output has ended\n'


@pytest.mark.more
def test_help_names_the_config_and_where_its_keys_are():
  out = ' '.join(programs.run('scripts/distill.py', '--help').out.split())
  assert '--config: FILE or FILE:ARGUMENT' in out
  assert 'listed in configs/distill.py' in out
  assert '--config.SECTION.KEY=VALUE' in out and '--distributed:' in out


@pytest.mark.parametrize(
  'options, message',
  [
    (['--config.decode.gama=2'], 'decode.gama: no such key; did you mean gam'),
    (['--noconfig.bench.chatt'], 'chatt: no such key; did you mean chat? all'),
    (
      ['--config.benc.chat=1'],
      'config.benc: no such key; did you mean bench',
    ),
    (
      ['--config=configs/pair.py:tiny', '--config.decode.gammas.x=1'],
      'config.decode.gammas.x: no such key; allowed are none',
    ),
  ],
)
def test_an_unknown_key_is_answered_with_those_of_its_section(
  monkeypatch, capsys, options, message
):
  monkeypatch.setattr('sys.argv', ['x.py', *options])
  with pytest.raises(SystemExit):
    program._check_config('configs/pair.py')
  assert message in capsys.readouterr().err


more = lambda *values: pytest.param(*values, marks=pytest.mark.more)


@pytest.mark.parametrize(
  'name, options',
  [
    ('bench', ['--config=configs/pair.py:tiny', '--config.target.source=no']),
    more('train', ['--config=configs/train_lm.py', '--config.text.source=no']),
    more('certify', ['--only=nothing']),
  ],
)
def test_a_refused_run_leaves_no_folder(tmp_path, name, options):
  workdir = tmp_path / 'new/folder'
  done = programs.run(f'scripts/{name}.py', *options, f'--workdir={workdir}')
  assert done.check(2).err.startswith(f'{name}.py: ')
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('gpu, refused', [(True, True), (False, False)])
def test_flags_that_break_texts_on_a_gpu_are_refused(monkeypatch, gpu, refused):
  flag = '--xla_gpu_enable_command_buffer=FUSION,WHILE'
  monkeypatch.setenv('XLA_FLAGS', flag)
  monkeypatch.setattr(hosts, 'has_gpu', lambda: gpu)
  told = pytest.raises(ValueError, match='generations end early')
  with told if refused else contextlib.nullcontext():
    program.set_xla_flags()


@pytest.fixture
def kept(monkeypatch, tmp_path):
  """Nothing is set for JAX, and the cache folder is empty."""
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path))
  jax.config.update(names[0], None)
  compilation_cache.reset_cache()
  yield tmp_path / 'compiled'
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def test_what_was_compiled_is_not_compiled_again(kept, recwarn):
  counts, added = collections.Counter(), lambda x, **_: counts.update([x])
  jax.monitoring.register_event_listener(added)
  square = lambda x: jax.jit(lambda y: y * y + 3.25)(x)
  before = square(2.0)
  program.keep_programs('')
  for hits in (False, True, False):
    jax.clear_caches()
    counts.clear()
    assert square(2.0) == before
    assert bool(counts['/jax/compilation_cache/cache_hits']) == hits
    assert bool(counts['/jax/compilation_cache/cache_misses']) == (not hits)
    for path in kept.glob('*/*-cache'):
      if hits:  # a kill while it was written
        path.write_bytes(path.read_bytes()[:-9])
  assert any('Error reading' in str(x.message) for x in recwarn)


def test_programs_are_kept_under_what_they_depend_on(kept, monkeypatch):
  names = set()
  for asked, cpu in (('', 'a'), ('--xla_a', 'a'), ('', 'b')):
    jax.config.update('jax_compilation_cache_dir', None)
    monkeypatch.setenv('XLA_FLAGS', asked)
    monkeypatch.setattr(program, 'cpu', lambda cpu=cpu: cpu)
    program.keep_programs('')
    names.add(jax.config.jax_compilation_cache_dir)
  assert {str(x) for x in kept.iterdir()} == names and len(names) == 3
  for age, name in enumerate(sorted(names)):
    path = pathlib.Path(name, 'x-cache')
    path.write_bytes(bytes(10))
    os.utime(path, (age, age))
  monkeypatch.setattr(program, '_MOST', 25)  # two of three
  pathlib.Path(min(names), 'y-cache').symlink_to('gone')  # meanwhile
  jax.config.update('jax_compilation_cache_dir', None)
  program.keep_programs('')
  left = [str(x.parent) for x in sorted(kept.glob('*/x-cache'))]
  assert left == sorted(names)[1:]


def test_where_programs_cannot_be_kept_one_line_says_so(kept, capsys):
  kept.write_text('a file')
  program.keep_programs('')
  assert not jax.config.jax_compilation_cache_dir
  told = capsys.readouterr().err
  assert told.count('\n') == 1 and 'set SPECDEC_JAX_CACHE to a folder' in told
