"""Writes a training run's logs: metrics.jsonl and clocks.jsonl."""

import contextlib
import json
import math
import pathlib
from typing import Any

import numpy as np

from specdec_jax import hosts
from specdec_jax.io import files


class Logs:
  """Appends to a workdir's logs, after removing lines behind step `first`.

  metrics.jsonl has no times, so that a run leaves the same file whether or not
  it was killed and resumed. A full or missing disk raises ValueError. Only the
  first process writes.
  """

  def __init__(self, workdir: pathlib.Path, first: int):
    self._workdir, self._files = workdir, {}
    if hosts.is_first():
      with writing(workdir):
        for name in ('metrics', 'clocks'):
          path = workdir / f'{name}.jsonl'
          files.write(path, b''.join(_until(path, first)))
          self._files[name] = open(path, 'a')

  def write(self, name: str, step: int, figures: dict[str, Any]) -> None:
    """Appends figures, as from `plain`, for every reader at once: to 'metrics'
    what a run with the same settings repeats, to 'clocks' times."""
    if name in self._files:
      line, file = json.dumps({'step': step} | figures), self._files[name]
      with writing(self._workdir):
        # Flushed: a checkpoint never has steps that the logs may still lose.
        print(line, file=file, flush=True)

  def close(self) -> None:
    for file in self._files.values():
      with contextlib.suppress(OSError):  # a failed write has raised already
        file.close()


def plain(figures: dict[str, Any]) -> dict[str, Any]:
  """Returns arrays as (lists of) numbers; None for NaN and infinity."""

  def clean(x):
    if isinstance(x, list):
      return [clean(value) for value in x]
    return x if x is None or math.isfinite(x) else None

  return {name: clean(np.asarray(x).tolist()) for name, x in figures.items()}


@contextlib.contextmanager
def writing(path: pathlib.Path):
  """Turns a full or missing disk's OSError into a ValueError."""
  try:
    yield
  except OSError as error:
    raise ValueError(
      f'{path}: cannot be written: {error.strerror}; mend that, and the same '
      'command goes on from the last checkpoint'
    ) from error


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  with writing(path):
    files.write(path, json.dumps(content, indent=1))


def _until(path: pathlib.Path, step: int) -> list[bytes]:
  """Returns lines up to a step, without those that a killed run or a power cut
  left damaged."""
  kept = []
  lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
  for line in lines:
    with contextlib.suppress(ValueError):
      if line.endswith(b'\n') and json.loads(line)['step'] <= step:
        kept.append(line)
  return kept
