"""Kills processes of jobs of several at random, and compares what is made."""

import dataclasses
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specdec_jax import printing
from specdec_jax.io import checkpoint
from tests.kills import kill_matrix

ROOT = kill_matrix.ROOT
# What gets a signal, in turn: the program, the signal, the process.
CASES = tuple(
  itertools.product(('decoding', 'training'), ('SIGKILL', 'SIGSTOP'), (1, 0))
)
LIMIT = 30  # seconds from a signal until all processes have to be gone
PATIENCE = 60  # seconds until those that are not are a hang, and are ended
WHOLE = 900  # the same, without a signal
PROMPTS = 64


class Ended(NamedTuple):
  """How a job ended. hung: it did not; words: the end of stderr."""

  status: int
  seconds: float | None  # since the signal; None if none was sent
  hung: bool
  words: str


@dataclasses.dataclass
class Found:
  """The findings. wrong: sentences, none if all is well."""

  kills: list[tuple[tuple, Ended]] = dataclasses.field(default_factory=list)
  runs: int = 0
  wrong: list[str] = dataclasses.field(default_factory=list)


class Job:
  """A program in several processes; the same command goes on with its work.

  launcher: the command that starts the processes and waits for them; once all
  have begun, each writes its pid into folder/notes/NUMBER. What the job makes
  is in folder/work; results(work) must be the same in the end.
  """

  def __init__(
    self,
    launcher: list[str],
    processes: int,
    folder: pathlib.Path,
    results: Callable[[pathlib.Path], dict[str, bytes]],
  ):
    self._launcher, self._processes = launcher, processes
    self._work, self._folder = folder / 'work', folder
    self._results = results
    self.spent = 0.0  # seconds of the last run in one piece
    self._work.mkdir(parents=True)

  def take(self) -> dict[str, bytes]:
    """The results, which are then removed with all that was made."""
    found = self._results(self._work)
    shutil.rmtree(self._work)
    self._work.mkdir()
    return found

  def start(self, name='', process=0, after=0.0) -> Ended:
    """Runs it; a process gets the signal `name`, `after` seconds after all
    have begun, if one is named."""
    notes, errors = self._folder / 'notes', self._folder / 'errors'
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    fresh = not any(self._work.iterdir())
    fast = kill_matrix.cached(self._folder.parent / 'cache')
    fast['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
    with open(errors, 'wb') as err:
      child = subprocess.Popen(
        self._launcher,
        cwd=ROOT,
        env=os.environ | {'PYTHONPATH': str(ROOT)} | fast,
        stdout=subprocess.DEVNULL,
        stderr=err,
        start_new_session=True,  # by which none of its processes is missed
      )
    gone, sent = lambda: _gone(child), None
    pids = lambda: [x.read_text() for x in sorted(notes.iterdir())]
    begun = lambda: len([x for x in pids() if x]) == self._processes
    hung, began = not _wait(lambda: begun() or gone(), WHOLE), time.monotonic()
    if name and not hung and not _wait(gone, after):
      sent = time.monotonic()
      os.kill(int(pids()[process]), signal.Signals[name])
    hung = hung or not _wait(gone, PATIENCE if sent else WHOLE)
    now = time.monotonic()
    if hung:
      os.killpg(child.pid, signal.SIGKILL)
    if not (status := child.wait()) and fresh:
      self.spent = now - began
    words = errors.read_text()[-600:]
    return Ended(status, now - sent if sent else None, hung, words)


def _wait(done: Callable[[], bool], seconds: float) -> bool:
  end = time.monotonic() + seconds
  while not (good := done()) and time.monotonic() < end:
    time.sleep(0.02)
  return good


def _gone(child: subprocess.Popen) -> bool:
  """Whether a process has ended, and all those that it started."""
  try:
    child.poll()
    os.killpg(child.pid, 0)
  except ProcessLookupError:
    return True
  return False


def jobs(
  folder: pathlib.Path, processes: int, steps: int
) -> tuple[dict[str, Job], dict[str, dict[str, bytes]]]:
  """Small jobs, and what they make if they are not killed."""
  rows = [{'id': str(i), 'prompt': 'ab' * (i % 5 + 1)} for i in range(PROMPTS)]
  (folder / 'in.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  decoding = [
    str(ROOT / 'scripts/generate.py'),
    f'--config={ROOT / "configs/pair.py"}:tiny',
    f'--config.bench.batch_size={2 * processes}',
    "--config.decode.methods=('lookup',)",
    '--config.decode.max_new_tokens=6',
    f'--prompts={folder / "in.jsonl"}',
    f'--output={folder / "decoding/work/out.jsonl"}',
  ]
  training = [
    *kill_matrix.training(folder, steps),
    f'--config.text.rows={2 * processes}',
    f'--workdir={folder / "training/work"}',
  ]
  made, wanted = {}, {}
  for name, command, results in (
    ('decoding', decoding, _decoded),
    ('training', training, _trained),
  ):
    here = folder / name
    launcher = [sys.executable, str(ROOT / 'scripts/launch_local.py')]
    launcher += [f'--processes={processes}', f'--logs={here / "logs"}', '--']
    launcher += ['-m', 'tests.kills.begun', str(here / 'notes'), *command]
    launcher += [f'--config.mesh.data={processes}']
    made[name] = Job(launcher, processes, here, results)
    ended = made[name].start()
    if ended.status:
      raise ValueError(f'{name}, not killed: {ended.status}, {ended.words}')
    wanted[name] = made[name].take()
  return made, wanted


def _decoded(work: pathlib.Path) -> dict[str, bytes]:
  return {'out.jsonl': (work / 'out.jsonl').read_bytes()}


def _trained(work: pathlib.Path) -> dict[str, bytes]:
  """The model, the figures and the last checkpoint."""
  with checkpoint.Checkpoints(work / 'checkpoints') as saved:
    last = str(saved.steps()[-1])
    got = saved.restore(kill_matrix.like(saved.folder / last))
  assert got is not None and got.step == int(last), last
  facts = json.dumps(got.facts).encode()
  state = b''.join([facts, *kill_matrix.content(got.arrays)])
  return kill_matrix.final_files(work) | {f'checkpoint {last}': state}


def kill(
  jobs: Mapping[str, Job],
  wanted: Mapping[str, dict[str, bytes]],
  count: int,
  seed: int,
) -> Found:
  """`count` signals, one or more in each run of a job, and what was made."""
  found, draw = Found(), random.Random(seed)
  finish = lambda name, ended=None: _finish(
    found, name, jobs[name], wanted[name], ended
  )
  for number in printing.track(range(count), 'kills'):
    name, *how = case = CASES[number % len(CASES)]
    start = lambda job=jobs[name], how=how: job.start(
      *how, draw.uniform(0, job.spent)
    )
    while not (ended := start()).status:
      finish(name, ended)  # It was done before its time came.
    _check(found, case, ended)
    if draw.random() < 0.5:
      finish(name)
  for name in jobs:
    finish(name)
  return found


def _check(found: Found, case: tuple, ended: Ended) -> None:
  """Checks how a job ended that was sent a signal."""
  found.kills.append((case, ended))
  where = 'kill {}, {}, {} of process {}'.format(len(found.kills), *case)
  if ended.hung:
    found.wrong.append(f'{where}: HANGS, and had to be ended')
  elif ended.seconds is None:
    found.wrong.append(f'{where}: before it, {ended.status}: {ended.words}')
  elif ended.seconds > LIMIT:
    found.wrong.append(f'{where}: all gone only after {ended.seconds:.1f} s')
  elif f'process {case[2]} was ' not in ended.words:
    found.wrong.append(f'{where}: nothing says so: {ended.words}')


def _finish(
  found: Found,
  name: str,
  job: Job,
  wanted: dict[str, bytes],
  ended: Ended | None,
) -> None:
  """Runs a job to its end, if it has not ended, and compares its results."""
  ended = ended or job.start()
  found.runs += 1
  if ended.status:
    found.wrong.append(f'{name}: in the end {ended.status}: {ended.words}')
    return
  made = job.take()
  differ = [x for x in wanted | made if made.get(x) != wanted.get(x)]
  if differ:
    found.wrong.append(f'{name}, run {found.runs}: differs in {differ}')


def summary(found: Found, seconds: float) -> dict[str, Any]:
  """The findings; cases: [program, signal, process, kills, longest seconds]."""
  cases = []
  for case in CASES:
    took = [x.seconds or 0.0 for made, x in found.kills if made == case]
    cases.append([*case, len(took), max(took, default=0.0)])
  return {
    'good': not found.wrong,
    'kills': len(found.kills),
    'hangs': sum(x.hung for _, x in found.kills),
    'longest': max(row[-1] for row in cases),
    'cases': cases,
    'runs': found.runs,
    'wrong': found.wrong,
    'seconds': round(seconds),
  }
