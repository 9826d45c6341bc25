"""metrics.jsonl, clocks.jsonl and TensorBoard's files of a run."""

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

from specdec_jax.io import files

# Its classes are made when it is imported: no type checker sees them.
event_pb2: Any = _event_pb2


class Logs:
  """Appends to the logs of a workdir, from the step that a run goes on from.

  metrics.jsonl has no clock in it: killed and resumed, or never killed, a run
  leaves the same file. Lines of later steps are dropped first.

  Every method raises ValueError if the disk is full or gone.
  """

  def __init__(self, workdir: pathlib.Path, first: int):
    self._workdir, self._files = workdir, {}
    with writing(workdir):
      for name in ('metrics', 'clocks'):
        path = workdir / f'{name}.jsonl'
        files.write(path, b''.join(_until(path, first)))
        self._files[name] = open(path, 'a')  # noqa: SIM115
      # Not its SummaryWriter: the thread of that dies with the disk full, and
      # then the run waits for it forever. By pid: two starts in one second.
      (workdir / 'tb').mkdir(exist_ok=True)
      self._board = event_file_writer.EventsWriter(
        str(workdir / 'tb' / 'events'), f'.{os.getpid()}'
      )
      # Makes TensorBoard forget the later steps of an earlier start.
      begun = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._event(first + 1, session_log=begun)

  def write(self, name: str, step: int, figures: dict[str, Any]) -> None:
    """Plain figures: 'metrics', which every run of the same settings repeats,
    or 'clocks', which differ from run to run."""
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
    with writing(self._workdir):
      self._board.flush()

  def close(self) -> None:
    # A line that could not be written has raised already.
    for file in (*self._files.values(), self._board):
      with contextlib.suppress(OSError):
        file.close()

  def _event(self, step: int, **content: Any) -> None:
    self._board.write_event(
      event_pb2.Event(wall_time=time.time(), step=step, **content)
    )


def plain(figures: dict[str, Any]) -> dict[str, Any]:
  """Arrays as numbers and lists of numbers; None for what is not finite."""

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
  """The lines up to a step; half a line, which a kill leaves, is dropped."""
  if not path.exists():
    return []
  kept = []
  for line in path.read_bytes().splitlines(keepends=True):
    with contextlib.suppress(ValueError):
      if line.endswith(b'\n') and json.loads(line)['step'] <= step:
        kept.append(line)
  return kept
