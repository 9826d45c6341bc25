"""docs/your_own_drafter.md: its code runs as printed, and is certified."""

import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import specdec_jax
from specdec_jax import types
from specdec_jax.certify import certificate, load

pytestmark = pytest.mark.more

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'your_own_drafter.md').read_text()
HEADS, USE, RULE = re.findall(r'```python\n(.*?)```', PAGE, re.S)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The page's files, and the heads that they have trained and saved."""
  folder = tmp_path_factory.mktemp('own')
  (folder / 'heads.py').write_text(HEADS)
  (folder / 'agree.py').write_text(RULE)
  (folder / 'use.py').write_text(USE)
  run(folder, 'heads.py').check_returncode()
  return folder


def run(folder, *command):
  return subprocess.run(
    [sys.executable, *command],
    capture_output=True,
    text=True,
    cwd=folder,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )


def test_trained_heads_are_loaded_and_accepted(folder):
  """Of 5 at most; heads of answers without their prompts have 1.8."""
  done = run(folder, 'use.py')
  assert float(done.stdout) > 4, done.stderr


def test_the_page_has_the_three_signatures():
  made = {}
  exec(compile(HEADS.partition('if __name__')[0], 'heads.py', 'exec'), made)
  drafter = made['drafter'](gamma=2, tap=0)
  for name in ('init', 'propose', 'commit'):
    (said,) = re.findall(rf'^\| `{name}\((.*?)\)` \|', PAGE, re.M)
    plain = lambda x: re.sub('(_[A-Z]+)?$', '', x)
    own = inspect.signature(getattr(drafter, name)).parameters
    assert [*map(plain, said.split(', '))] == [*map(plain, own)], name
    (docs,) = re.findall(rf'  {name}\((.*?)\)', str(types.Drafter.__doc__))
    assert [*map(plain, docs.split(', '))] == [*map(plain, own)], name


def test_heads_of_another_target_are_refused(folder, monkeypatch):
  monkeypatch.chdir(folder)
  target = specdec_jax.load('random:tiny')
  draft = 'heads.py:make:heads.safetensors'
  with pytest.raises(ValueError, match='heads.safetensors: not 5 heads of'):
    specdec_jax.generate(target, 'a', draft=draft, gamma=5)


def test_the_benchmark_takes_both_by_their_paths(folder):
  script, config = ROOT / 'scripts/bench.py', ROOT / 'configs/pair.py'
  draft = 'heads.py:make:heads.safetensors'
  done = run(
    folder,
    str(script),
    f'--config={config}:tiny',
    f"--config.decode.methods=('{draft}',)",
    '--config.decode.rule=agree.py:agree',
    '--config.bench.repeats=1',
    '--config.bench.prompts_per_category=1',
    '--config.decode.max_new_tokens=8',
  )
  assert done.returncode == 0, done.stderr
  doc = json.loads(done.stdout.splitlines()[-1])
  _, heads = doc['rows']
  assert heads['drafter'] == draft


@pytest.mark.slow
@pytest.mark.parametrize(
  'rule, promise, amount',
  [('', 'windows-enumerated', 2), ('agree.py:agree', 'greedy-identity', 200)],
)
def test_both_are_certified_by_their_paths(
  folder, monkeypatch, rule, promise, amount
):
  monkeypatch.chdir(folder)
  subject = load.subject(rule, 'heads.py:make', '', seed=0)
  assert list(subject.drafters) == ['heads']
  (one,) = (x for x in certificate.PROMISES if x.name == promise)
  row = certificate.check(one._replace(quick=amount), subject, full=False)
  assert row.passed, row.case
