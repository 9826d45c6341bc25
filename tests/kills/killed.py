"""Runs a program of ours, writes down what it is doing, dies when told to.

python -m tests.kills.killed NOTES PLAN PROGRAM [ARGUMENTS]

A plan is 'never' or PHASE:COUNT:WHEN, of which COUNT is how often the phase
begins, and WHEN is 'before', 'after' or seconds after its beginning. Programs
know nothing of it: the calls that phases are made of are replaced from outside.
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
from typing import Any, NamedTuple

PHASES = (
  'import',
  'restore',
  'compile',
  'step',
  'evaluation',
  'save',
  'rename',
  'cleanup',
  'export',
)
# What the training thread is in; what any other one is in, from 1, or 0; the
# step it makes; the last save that began, and the one before.
_LAYOUT = struct.Struct('<BBiii')


class Notes(NamedTuple):
  """phase: of the background if there is one. saved, before: steps, or 0."""

  phase: str
  step: int
  saved: int
  before: int


def blank(path: pathlib.Path) -> None:
  """What is read of a process that did not get as far as to write."""
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
    self.seconds, self.times = {}, {}

  @contextlib.contextmanager
  def at(self, phase: str):
    front = threading.current_thread() is threading.main_thread()
    before = self._phases[not front]
    number = PHASES.index(phase)
    self._set(not front, number if front else number + 1)
    began = time.perf_counter()
    times = self._count(phase)
    try:
      yield
    finally:
      if self._plan == [phase, str(times), 'after']:
        _die()
      self._set(not front, before)
      self._spent(phase, time.perf_counter() - began)

  def into(self, phase: str) -> None:
    """The training thread enters a phase that is no call."""
    now = time.perf_counter()
    self._spent(PHASES[self._phases[0]], now - self._since)
    self._since = now
    self._set(False, PHASES.index(phase))
    self._count(phase)

  def makes(self, step: int) -> None:
    self._steps[0] = step
    self._write()

  def saves(self, step: int) -> None:
    self._steps[1:] = step, self._steps[1]
    self._write()

  def _set(self, slot: bool, number: int) -> None:
    self._phases[slot] = number
    self._write()

  def _write(self) -> None:
    os.pwrite(self._file, _LAYOUT.pack(*self._phases, *self._steps), 0)

  def _count(self, phase: str) -> int:
    self.times[phase] = times = self.times.get(phase, 0) + 1
    wanted, count, when = self._plan
    if (wanted, count) == (phase, str(times)) and when != 'after':
      if when == 'before':
        _die()
      timer = threading.Timer(float(when), _die)
      timer.daemon = True
      timer.start()
    return times

  def _spent(self, phase: str, seconds: float) -> None:
    self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def _die() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


def watch(phases: Phases, owner: Any, name: str, phase: str) -> None:
  """Replaces a function of a module or class by one that says where it is."""
  setattr(owner, name, watched(phases, getattr(owner, name), phase))


def watched(phases: Phases, call: Callable, phase: str) -> Callable:
  @functools.wraps(call)
  def wrapped(*args, **named):
    with phases.at(phase):
      return call(*args, **named)

  return wrapped


def install(phases: Phases) -> None:
  """Into this process, for good."""
  from specdec_jax.bench import machine
  from specdec_jax.io import checkpoint
  from specdec_jax.train import loop
  from specdec_jax.train import step as step_lib

  for name in ('rename', 'replace'):
    watch(phases, os, name, 'rename')
  watch(phases, shutil, 'rmtree', 'cleanup')
  for name in ('save', '_finish'):
    watch(phases, checkpoint.Checkpoints, name, 'save')
  watch(phases, checkpoint.Checkpoints, 'restore', 'restore')
  make, run, save = step_lib.make, loop.run, checkpoint.Checkpoints.save

  def watched_save(self, step, *args, **named):
    self.wait()  # as save does: now the one before is complete
    phases.saves(step)
    return save(self, step, *args, **named)

  def watched_make(*args):
    advance = make(*args)
    first = [True]

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
    judge = watched(phases, task.judge, 'evaluation')
    out = run(task._replace(judge=judge, refresh=refresh), *args, **named)
    phases.into('export')
    return out

  checkpoint.Checkpoints.save = watched_save
  step_lib.make = watched_make
  loop.run = watched_run
  # Only clocks read it, and it takes a second.
  machine.matmul_flops = lambda dtype: 1e12


def main(path: str, plan: str, program: str, *args: str) -> None:
  """Beside the notes, PATH.json says how long each phase took."""
  phases = Phases(path, plan)
  install(phases)
  sys.argv = [program, *args]
  try:
    runpy.run_path(program, run_name='__main__')
  finally:
    phases.into('export')
    spent = {k: [phases.times.get(k, 1), x] for k, x in phases.seconds.items()}
    pathlib.Path(f'{path}.json').write_text(json.dumps(spent))


if __name__ == '__main__':
  main(*sys.argv[1:])
