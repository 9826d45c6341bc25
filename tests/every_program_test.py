"""Every program of scripts/ as a newcomer begins: without arguments, --help,
:tiny, each kind of student and of drafter. None ends in a traceback."""

import json
import os
import subprocess
import sys

from tests import programs

SCRIPTS = sorted(x.stem for x in (programs.ROOT / 'scripts').glob('*.py'))
# What begins its work without arguments; the others refuse in these words.
WORKS = {'certify', 'demo', 'doctor', 'kill_matrix', 'mutants'}
WANTS = {
  'check_draft': 'want --target=SOURCE and --draft=SOURCE',
  'distill': "workdir='': name a folder for the run, --workdir=DIR",
  'launch_local': 'no program: name it after --, as in -- scripts/train.py',
  'ngram': 'want --target=SOURCE and --output=FILE',
  'plot': '0 workdirs: name 1 to 6',
  'tpu_report': 'not in the cache',
  'train': "workdir='': name a folder for the run, --workdir=DIR",
}
MODEL = 'target.source is empty: give a model, as in --config.target.source='


def ran(*every: list[str], **env: str) -> list[programs.Done]:
  """Runs of programs, one after the other, in forks of one process."""
  out = subprocess.run(
    [sys.executable, programs.ROOT / 'tests/forked.py'],
    cwd=programs.ROOT,
    env=os.environ | programs.FAST | {'HF_HUB_OFFLINE': '1'} | env,
    input=json.dumps([[f'scripts/{x}.py', *rest] for x, *rest in every]),
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  ).stdout
  return [programs.Done(*x) for x in json.loads(out)]


def test_without_arguments_and_with_help():
  refuse = [x for x in SCRIPTS if x not in WORKS]
  asked = [*([x] for x in refuse), *([x, '--help'] for x in SCRIPTS)]
  done = ran(*asked)
  for name, found in zip(refuse, done, strict=False):
    found.check_refused(WANTS.get(name, MODEL))
    assert found.err.startswith(f'{name}.py: ')
  for name, found in zip(SCRIPTS, done[len(refuse) :], strict=True):
    assert not found.err and f'{name}.py:' in found.out, name
    about, flags = found.out.split('flags:\n', 1)
    assert 'python scripts/' in about and '--distributed' in flags, name


SLIPS = [
  (['bench', 'configs/pair.py'], "'configs/pair.py': want --NAME=VALUE, see"),
  (['bench', '--config'], 'config : no such file'),
  (['bench', '--target=x'], "flag 'target'; --help lists all"),
  (['bench', '--config=configs/distill.py:tiny'], "is it another program's?"),
  (['bench', '--config=configs/pair.py:tyni'], 'allowed are full, tiny'),
]


def test_first_slips():
  slips, messages = zip(*SLIPS, strict=True)
  for done, message in zip(ran(*slips), messages, strict=True):
    done.check_refused(message)
