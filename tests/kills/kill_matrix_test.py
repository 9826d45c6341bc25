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


@pytest.mark.parametrize(
  ('facts', 'before', 'wrong'),
  [
    (4, 4, ''),
    (3, 4, 'step 4 is not that of'),
    (4, 5, 'step 5 was saved, the'),
  ],
)
def test_a_step_that_is_another_or_gone_is_said(tmp_path, facts, before, wrong):
  with checkpoint.Checkpoints(tmp_path / 'checkpoints') as c:
    for step in (3, 4):
      c.save(step, saved.state(step), {'at': step})
    c.wait()
    tree = kill_matrix.like(c.folder / '4')
    kept = {n: c.restore(tree, n) for n in (3, 4)}
  every = {n: (kill_matrix.content(x.arrays), x.facts) for n, x in kept.items()}
  every[4] = every[4][0], {'at': facts}
  reference = kill_matrix.Reference(tree, every, {}, {})
  found, notes = kill_matrix.Found(), killed.Notes('save', 7, 6, before)
  kill_matrix.check_killed(found, tmp_path, reference, notes)
  assert (found.phases, found.lost, found.restored) == ({'save': 1}, 3, 2)
  assert [x for x in found.wrong if wrong in x] == found.wrong
  assert len(found.wrong) == bool(wrong)


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
