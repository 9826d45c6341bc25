"""Runs programs of the repository as a user does."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
# On the CPU; what is compiled is made in less time, and slower, and shared.
FAST = {
  'JAX_PLATFORMS': 'cpu',
  'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
}
# A quick config: random models, lookup drafts.
TINY = (
  '--config=configs/pair.py:tiny',
  "--config.decode.methods=('lookup',)",
  '--config.decode.gammas=(2,)',
  '--config.decode.max_new_tokens=8',
)


class Done(NamedTuple):
  """How a process ended; err is also the reason if a test fails."""

  status: int
  out: str
  err: str

  @property
  def document(self) -> Any:
    """The JSON of the last line of stdout."""
    return json.loads(self.out.splitlines()[-1])

  def check(self, status: int = 0) -> 'Done':
    assert self.status == status, self.err
    return self

  def check_refused(self, message: str) -> None:
    """One sentence on stderr, with the message in it, and status 2.

    Before it may be what loading takes of memory, and progress.
    """
    assert (self.status, self.out) == (2, ''), self.err
    lines = self.err.strip().splitlines()
    told = re.compile(r'memory: |.*: \d+ of \d+(, |$)')
    (line,) = (x for x in lines if not told.match(x))
    assert message in line


def run(program: str, *arguments: str | pathlib.Path, **env: str) -> Done:
  """One process of a program, named by its path in the repository.

  env: beside this process' variables and FAST.
  """
  done = subprocess.run(
    [sys.executable, ROOT / program, *arguments],
    cwd=ROOT,
    env=os.environ | FAST | env,
    capture_output=True,
    text=True,
  )
  return Done(done.returncode, done.stdout, done.stderr)
