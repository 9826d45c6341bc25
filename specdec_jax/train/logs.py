"""metrics.jsonl, clocks.jsonl and TensorBoard's files of a run."""

import json
import math
import pathlib
from typing import Any

import numpy as np
import tensorboardX

from specdec_jax.io import files


class Logs:
  """Appends to the logs of a workdir, from the step that a run goes on from.

  metrics.jsonl has no clock in it: killed and gone on with, or never killed, a
  run leaves the same file. What it says of later steps is dropped first.
  """

  def __init__(self, workdir: pathlib.Path, first: int):
    self._files = {}
    for name in ('metrics', 'clocks'):
      path = workdir / f'{name}.jsonl'
      files.write(path, b''.join(_until(path, first)))
      self._files[name] = open(path, 'a')  # noqa: SIM115
    self._board = tensorboardX.SummaryWriter(
      str(workdir / 'tb'), purge_step=first + 1, flush_secs=30
    )

  def write(self, step: int, figures: dict[str, Any]) -> None:
    """Figures that only the settings decide; numbers or lists of numbers."""
    self._line('metrics', step, figures)
    for name, value in figures.items():
      many = isinstance(value, list)
      for i, x in enumerate(value if many else [value]):
        if x is not None and math.isfinite(x):
          label = f'{name}/{i}' if many else name
          self._board.add_scalar(label, float(np.float64(x)), step)

  def clock(self, step: int, figures: dict[str, float]) -> None:
    """Figures that another run of the same settings has otherwise."""
    self._line('clocks', step, figures)

  def flush(self) -> None:
    for file in self._files.values():
      file.flush()

  def close(self) -> None:
    for file in self._files.values():
      file.close()
    self._board.close()

  def _line(self, name: str, step: int, figures: dict[str, Any]) -> None:
    print(json.dumps({'step': step} | figures), file=self._files[name])
    self._files[name].flush()


def _until(path: pathlib.Path, step: int) -> list[bytes]:
  """The lines up to a step; half a line, which a kill leaves, is dropped."""
  if not path.exists():
    return []
  kept = []
  for line in path.read_bytes().splitlines(keepends=True):
    try:
      if line.endswith(b'\n') and json.loads(line)['step'] <= step:
        kept.append(line)
    except ValueError:
      continue
  return kept
