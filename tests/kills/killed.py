"""Runs a program of ours, notes what it is doing, and dies when told to.

python -m tests.kills.killed NOTES PLAN PROGRAM [ARGUMENTS]

A plan is 'never' or PHASE:COUNT:WHEN: the phase's COUNTth time, and 'before',
'after' or seconds after it begins. The program knows nothing of it: functions
of the library are replaced from outside. NOTES.json gets the times and seconds
of each phase.
"""

import contextlib
import functools
import json
import os
import pathlib
import runpy
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

PHASES = ('import', 'restore', 'compile', 'step', 'evaluation')
PHASES += ('save', 'rename', 'cleanup', 'export')
# The training thread's phase; that of any other one, from 1, or 0; the step
# under way; the last save that began, and the one before.
_LAYOUT = struct.Struct('<BBiii')


class Notes(NamedTuple):
  phase: str  # of the background if there is one
  step: int
  saved: int
  before: int


def blank(path: pathlib.Path) -> None:
  """The notes of a process that was killed before it wrote any."""
  path.write_bytes(_LAYOUT.pack(0, 0, 0, 0, 0))


def read(path: pathlib.Path) -> Notes:
  front, back, *steps = _LAYOUT.unpack(path.read_bytes())
  return Notes(PHASES[back - 1 if back else front], *steps)


class Phases:
  """Where this process is; `seconds` and `times` of every phase so far."""

  def __init__(self, path: str, plan: str):
    self._file = os.open(path, os.O_WRONLY)
    self._plan = plan.split(':') if plan != 'never' else ('', '0', '')
    self._phases, self._steps = [0, 0], [0, 0, 0]
    self._since = time.perf_counter()
    self.seconds, self.times = dict.fromkeys(PHASES, 0.0), {}

  @contextlib.contextmanager
  def at(self, phase: str):
    back = threading.current_thread() is not threading.main_thread()
    before = self._phases[back]
    self._set(back, PHASES.index(phase) + back)
    began, times = time.perf_counter(), self._begin(phase)
    try:
      yield
    finally:
      if self._plan == [phase, str(times), 'after']:
        _die()
      self._set(back, before)
      self.seconds[phase] += time.perf_counter() - began

  def into(self, phase: str) -> None:
    """The training thread enters a phase that is no call."""
    now = time.perf_counter()
    self.seconds[PHASES[self._phases[0]]] += now - self._since
    self._since = now
    self._set(False, PHASES.index(phase))
    self._begin(phase)

  def makes(self, step: int) -> None:
    self._steps[0] = step
    self._write()

  def saves(self, step: int) -> None:
    self._steps[1:] = step, self._steps[1]
    self._write()

  def _set(self, back: bool, number: int) -> None:
    self._phases[back] = number
    self._write()

  def _write(self) -> None:
    os.pwrite(self._file, _LAYOUT.pack(*self._phases, *self._steps), 0)

  def _begin(self, phase: str) -> int:
    self.times[phase] = times = self.times.get(phase, 0) + 1
    wanted, count, when = self._plan
    if (wanted, count) == (phase, str(times)) and when != 'after':
      if when == 'before':
        _die()
      timer = threading.Timer(float(when), _die)
      timer.daemon = True
      timer.start()
    return times


def _die() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


def watched(phases: Phases, call: Callable, phase: str) -> Callable:
  @functools.wraps(call)
  def wrapped(*args, **named):
    with phases.at(phase):
      return call(*args, **named)

  return wrapped


def install(phases: Phases) -> None:
  """Replaces the functions that phases begin and end with, for good."""
  from specdec_jax import machine
  from specdec_jax.io import checkpoint
  from specdec_jax.train import loop
  from specdec_jax.train import step as step_lib

  steps = checkpoint.Checkpoints
  for owner, name, phase in (
    (os, 'rename', 'rename'),
    (os, 'replace', 'rename'),
    (shutil, 'rmtree', 'cleanup'),
    (steps, 'save', 'save'),
    (steps, '_finish', 'save'),
    (steps, 'restore', 'restore'),
  ):
    setattr(owner, name, watched(phases, getattr(owner, name), phase))
  make, run, save = step_lib.make, loop.run, steps.save

  def watched_save(self, step, *args, **named):
    self.wait()  # as save does: now the one before is complete
    phases.saves(step)
    return save(self, step, *args, **named)

  def watched_make(*args):
    advance, first = make(*args), [True]

    def step(*args):
      out = advance(*args)
      if first:
        first.clear()
        phases.into('step')
      return out

    return step

  def watched_run(task, *args, **named):
    def refresh(step, params):
      phases.makes(step)
      task.refresh(step, params)

    phases.into('compile')
    evaluate = watched(phases, task.evaluate, 'evaluation')
    out = run(task._replace(evaluate=evaluate, refresh=refresh), *args, **named)
    phases.into('export')
    return out

  steps.save, step_lib.make, loop.run = watched_save, watched_make, watched_run
  # Only clocks read it, and it takes a second.
  machine.matmul_flops = lambda dtype: 1e12


def main(path: str, plan: str, program: str, *args: str) -> None:
  phases = Phases(path, plan)
  install(phases)
  sys.argv = [program, *args]
  try:
    runpy.run_path(program, run_name='__main__')
  finally:
    phases.into('export')
    spent = {k: (phases.times.get(k, 1), x) for k, x in phases.seconds.items()}
    pathlib.Path(f'{path}.json').write_text(json.dumps(spent))


if __name__ == '__main__':
  main(*sys.argv[1:])
