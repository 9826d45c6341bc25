"""docs/your_own_drafter.md: one file and one row, used from bench.py."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'your_own_drafter.md').read_text()
RUN = """
import runpy, sys
sys.path[:0] = [{folder!r}, {root!r}]
import periodic
from specdec_jax import build
build.DRAFTERS['periodic'] = periodic
from specdec_jax.certify import load
assert load.RECIPES['periodic'] is periodic.recipe
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name='__main__')
"""


@pytest.fixture(scope='module')
def bench(tmp_path_factory):
  """scripts/bench.py with the page's file and its row."""
  folder = tmp_path_factory.mktemp('own')
  code = re.findall(r'```python\n(.*?)```', PAGE, re.S)[0]
  (folder / 'periodic.py').write_text(code)
  script = str(ROOT / 'scripts' / 'bench.py')
  text = RUN.format(folder=str(folder), root=str(ROOT), script=script)
  (folder / 'run.py').write_text(text)

  def run(*flags):
    config = f'--config={ROOT}/configs/pair.py:tiny'
    methods = "--config.decode.methods=('periodic',)"
    command = [sys.executable, str(folder / 'run.py'), config, methods, *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)

  return run


@pytest.mark.more
def test_one_file_and_one_row_make_a_method(bench):
  done = bench('--config.periodic.period=2', '--config.bench.repeats=1')
  assert done.returncode == 0, done.stderr
  doc = json.loads(done.stdout.splitlines()[-1])
  assert doc['config']['periodic'] == {'period': 2, 'most': 8}
  assert 'periodic' in {row['drafter'] for row in doc['rows']}


def test_its_settings_are_checked_before_any_work(bench):
  done = bench('--config.periodic.most=0')
  assert done.returncode == 2
  (line,) = done.stderr.strip().splitlines()
  assert line == (
    'bench.py: periodic.most=0: must be a whole number, at least 1 (drafts of '
    'a window, at most)'
  )
