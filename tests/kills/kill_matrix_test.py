"""The kill matrix: it dies where it is told to, and sees what is wrong."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from specdec_jax.io import checkpoint
from tests.io import saved
from tests.kills import kill_matrix, killed

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def steps(tmp_path):
  """A folder with two steps."""
  folder = tmp_path / 'steps'
  with checkpoint.Checkpoints(folder) as c:
    for step in (3, 4):
      c.save(step, saved.state(step), {'at': step})
  return folder


@pytest.fixture
def reference(steps):
  """That of the two steps, which are then those of the workdir above."""
  tree = kill_matrix.like(steps / '4')
  with checkpoint.Checkpoints(steps) as c:
    found = {n: c.restore(tree, n) for n in (3, 4)}
  steps.rename(steps.parent / 'checkpoints')
  every = {
    n: (kill_matrix.content(x.arrays), x.facts) for n, x in found.items()
  }
  return kill_matrix.Reference(tree, every, {}, {})


def test_a_step_that_is_another_is_said(reference, tmp_path):
  reference.steps[4] = reference.steps[4][0], {'at': 3}
  found = kill_matrix.Found()
  kill_matrix.check_steps(found, tmp_path, reference, 'here')
  assert found.restored == 2
  assert found.wrong == ['here: step 4 is not that of the reference']


@pytest.mark.parametrize(('before', 'wrong'), [(4, 0), (5, 1)])
def test_a_step_that_was_saved_and_is_gone_is_said(
  before, wrong, reference, tmp_path
):
  found = kill_matrix.Found()
  notes = killed.Notes('save', 7, 6, before)
  kill_matrix.check_killed(found, tmp_path, reference, notes)
  assert len(found.wrong) == wrong, found.wrong
  assert (found.phases, found.lost) == ({'save': 1}, 3)


RENAMES = """
import os, sys
for i in range(3):
  os.rename(sys.argv[1], sys.argv[1] + 'x')
  os.rename(sys.argv[1] + 'x', sys.argv[1])
"""


@pytest.mark.more
@pytest.mark.parametrize(
  ('plan', 'code', 'left'),
  [
    ('never', 0, 'file'),
    ('rename:3:before', -signal.SIGKILL, 'file'),
    ('rename:3:after', -signal.SIGKILL, 'filex'),
  ],
)
def test_a_process_dies_where_its_plan_says(plan, code, left, tmp_path):
  (tmp_path / 'program.py').write_text(RENAMES)
  (tmp_path / 'file').write_text('')
  notes = tmp_path / 'notes'
  killed.blank(notes)
  done = subprocess.run(
    [sys.executable, '-m', 'tests.kills.killed', notes, plan]
    + [tmp_path / 'program.py', tmp_path / 'file'],
    env=os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == code, done.stderr
  assert (tmp_path / left).exists()
  assert killed.read(notes).phase == ('export' if not code else 'rename')
  if not code:
    times, seconds = json.loads((tmp_path / 'notes.json').read_text())['rename']
    assert (times, seconds < 5) == (6, True)
