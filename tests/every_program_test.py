"""What a newcomer tries first: every program without arguments and with --help,
every config at :tiny, each kind of student and of drafter."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import specdec_jax
from configs import distill, pair
from specdec_jax import settings
from specdec_jax.distill import distillation, sections
from specdec_jax.drafters import table
from specdec_jax.io import sources
from tests import programs
from tests.distill import runs

SCRIPTS = sorted(x.stem for x in (programs.ROOT / 'scripts').glob('*.py'))
# What begins its work without arguments; the others refuse in these words.
WORKS = {'certify', 'demo', 'kill_matrix', 'mutants'}
WANTS = {
  'check_draft': 'want --target=SOURCE and --draft=SOURCE',
  'distill': "workdir='': name a folder for the run, --workdir=DIR",
  'launch_local': 'no program: name it after --, as in -- scripts/train.py',
  'ngram': 'want --target=SOURCE and --output=FILE',
  'plot': '0 workdirs: name 1 to 6',
  'tpu_report': 'not in the cache',
  'train': "workdir='': name a folder for the run, --workdir=DIR",
}
MODEL = 'target.source is empty: give --config.target.source=hf:org/name'


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


def test_every_config_is_read_at_tiny_by_its_program():
  """As far as what each asks for besides."""
  asked = []
  for name in sorted(x.stem for x in (programs.ROOT / 'configs').glob('*.py')):
    kind, _, other = name.partition('_')
    first = kind if kind == 'distill' or other in ('lm', 't5') else 'generate'
    asked.append([first, f'--config=configs/{name}.py:tiny'])
  assert len(asked) == 11 and {x[0] for x in asked} == {
    *('distill', 'train', 'generate')
  }
  for (name, _), done in zip(asked, ran(*asked), strict=True):
    wants = WANTS.get(name, 'want --prompts=IN.jsonl and --output=OUT.jsonl')
    done.check_refused(wants)


def test_first_slips():
  slips, messages = zip(*SLIPS, strict=True)
  for done, message in zip(ran(*slips), messages, strict=True):
    done.check_refused(message)


# What each needs besides its name, on :tiny, says its refusal.
DRAFTERS = {
  'lm': '',
  'lookup': '',
  'ngram': 'ngram.source is empty: give a file of scripts/ngram.py',
  'early_exit': '',
  'self': '',
  'eagle': 'eagle.source is empty: give a file of scripts/distill.py',
  'medusa': 'medusa.source is empty: give ',
  'dflash': 'dflash.source is empty: give a folder',
  'hybrid': '',
  'adaptive': '',
}


@pytest.mark.parametrize('name', table.DRAFTERS)
def test_every_drafter_is_built_at_tiny_or_says_what_it_needs(name):
  c = pair.get_config('tiny')
  c.decode.methods = (name,)
  if message := DRAFTERS[name]:
    with pytest.raises(ValueError, match=message):
      settings.settings(c)
    return
  made = settings.first(settings.load(settings.settings(c)), measure=False)
  assert made.drafter.gamma == 3 and made.rule.name == 'reject'


# What configs/distill.py:tiny says must be given with a kind of student.
STUDENTS = {
  'eagle': [],
  'eagle3': [],
  'mtp': [],
  'dflash': [(dict(loss=dict(unroll=3)), 'loss.unroll=2: .* judge.gamma=3')],
  'medusa': [
    (dict(student=dict(vocabulary=0)), 'vocabulary=256: .* give 0'),
    (dict(loss=dict(unroll=3)), 'loss.unroll=2: .* judge.gamma=3'),
  ],
  'lm': [
    (dict(student=dict(size='tiny')), 'kind=lm: has nothing; give it one of'),
    (dict(student=dict(share=False)), ''),
  ],
}


@pytest.mark.parametrize('kind', sections._WITHOUT)
def test_every_student_begins_at_tiny_with_what_its_refusals_ask_for(kind):
  c = distill.get_config('tiny').unlock()
  c.student.kind = kind
  for changes, message in STUDENTS[kind]:
    if message:
      with pytest.raises(ValueError, match=message):
        distillation.settings(c)
    for section, values in changes.items():
      c[section].update(values)
  s = distillation.settings(c)
  target = specdec_jax.load('random:tiny', scan_layers=False, kernels='xla')
  module = distillation.KINDS[s.student.kind]
  assert module.check(s, sources.open_source('random:tiny')) is not None
  ids = np.arange(s.student.vocabulary or target.ids)
  student = module.make(s, target, ids)
  assert student.drafter(s.judge.gamma).gamma == 3


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['eagle3', 'dflash'])
def test_a_student_with_the_usual_taps_is_trained_and_drafts(tmp_path, kind):
  """Of two layers, which are fewer than the usual taps."""
  few = dict(steps=1, checkpoint_every=1, evaluate_every=1)
  loss = dict(unroll=2)
  made, _ = runs.run(tmp_path, student=dict(kind=kind), run=few, loss=loss)
  assert made['finished']
  drafter = 'dflash' if kind == 'dflash' else 'eagle'
  options = dict(source=made['draft'], check='off')
  runs.assert_decodes_as_plain(drafter, draft_options=options)
