"""Logs of a training run: metrics.jsonl, clocks.jsonl and TensorBoard."""

import contextlib
import json
import math
import os
import pathlib
import time
from typing import Any

import numpy as np
from tensorboardX import event_file_writer, summary
from tensorboardX.proto import event_pb2 as _event_pb2

from specdec_jax import hosts
from specdec_jax.io import files

# protobuf makes its classes on import: type checkers do not see them.
event_pb2: Any = _event_pb2


class Logs:
  """Appends to the logs of a workdir, after removing lines of later steps.

  metrics.jsonl has no times, so that a run leaves the same file whether or not
  it was killed and resumed. Every method raises ValueError if the disk is full
  or gone; of several processes, only the first writes.

  Args:
    workdir: the folder of the run.
    first: the last step whose lines stay.
  """

  def __init__(self, workdir: pathlib.Path, first: int):
    self._workdir, self._files = workdir, {}
    self._silent = not hosts.is_first()
    if self._silent:
      return
    with writing(workdir):
      for name in ('metrics', 'clocks'):
        path = workdir / f'{name}.jsonl'
        files.write(path, b''.join(_until(path, first)))
        self._files[name] = open(path, 'a')  # noqa: SIM115
      # Not SummaryWriter: its thread dies if the disk is full, and then the run
      # waits for it forever. By pid: a run may start twice in one second.
      (workdir / 'tb').mkdir(exist_ok=True)
      self._board = event_file_writer.EventsWriter(
        str(workdir / 'tb' / 'events'), f'.{os.getpid()}'
      )
      # Makes TensorBoard forget the later steps of an earlier start.
      begun = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._event(first + 1, session_log=begun)

  def write(self, name: str, step: int, figures: dict[str, Any]) -> None:
    """Appends the figures of a step to a log.

    Args:
      name: 'metrics', for figures that a run with the same settings repeats, or
        'clocks', for times.
      step: steps done.
      figures: as from `plain`.
    """
    if self._silent:
      return
    with writing(self._workdir):
      print(json.dumps({'step': step} | figures), file=self._files[name])
      self._files[name].flush()
      for label, value in figures.items():
        many = isinstance(value, list)
        for i, x in enumerate(value if many else [value]):
          if x is not None:
            tag = f'{label}/{i}' if many else label
            self._event(step, summary=summary.scalar(tag, float(x)))

  def flush(self) -> None:
    if not self._silent:
      with writing(self._workdir):
        self._board.flush()

  def close(self) -> None:
    boards = () if self._silent else (self._board,)
    # A failed write has raised already.
    for file in (*self._files.values(), *boards):
      with contextlib.suppress(OSError):
        file.close()

  def _event(self, step: int, **content: Any) -> None:
    self._board.write_event(
      event_pb2.Event(wall_time=time.time(), step=step, **content)
    )


def plain(figures: dict[str, Any]) -> dict[str, Any]:
  """Arrays as numbers or lists of numbers; None for NaN and infinity."""

  def clean(x):
    if isinstance(x, list):
      return [clean(value) for value in x]
    return x if x is None or math.isfinite(x) else None

  return {name: clean(np.asarray(x).tolist()) for name, x in figures.items()}


@contextlib.contextmanager
def writing(path: pathlib.Path):
  """Turns the OSError of a full or missing disk into a ValueError."""
  try:
    yield
  except OSError as error:
    raise ValueError(
      f'{path}: cannot be written: {error.strerror}; mend that, and the same '
      'command goes on from the last checkpoint'
    ) from error


def _until(path: pathlib.Path, step: int) -> list[bytes]:
  """The lines up to a step, without an incomplete last line of a killed run."""
  if not path.exists():
    return []
  kept = []
  for line in path.read_bytes().splitlines(keepends=True):
    with contextlib.suppress(ValueError):
      if line.endswith(b'\n') and json.loads(line)['step'] <= step:
        kept.append(line)
  return kept
