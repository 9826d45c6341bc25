"""Trainings that end, and what they gain in tokens a target call.

A row has 'emitted' and 'calls', a list each: tokens and target calls by prompt.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from experiments import resampled
from specdec_jax.bench import intervals
from specdec_jax.distill import distillation
from specdec_jax.train import train_lm


def efficiency(row: dict[str, Any]) -> intervals.Interval:
  """Tokens per target call, with its interval over prompts."""
  return resampled.interval(_ratios(row), len(row['emitted']))


def gain(row: dict[str, Any], base: dict[str, Any]) -> intervals.Interval:
  """Block efficiency relative to the baseline's, minus 1; paired by prompt."""
  return resampled.interval(
    _ratios(row) / _ratios(base) - 1, len(row['emitted'])
  )


def _ratios(row: dict[str, Any]) -> np.ndarray:
  emitted, calls = (np.asarray(row[x], float) for x in ('emitted', 'calls'))
  times_RB = resampled.draws(len(emitted))
  return (times_RB @ emitted) / (times_RB @ calls)


def half(row: dict[str, Any], *, first: bool) -> dict[str, Any]:
  """Every other prompt: one half chooses the best cell, the other tests it."""
  part = slice(0 if first else 1, None, 2)
  return row | {name: row[name][part] for name in ('emitted', 'calls')}


def best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """The cell with the most tokens per target call on the first half."""

  def score(row):
    seen = half(row, first=True)
    return sum(seen['emitted']) / sum(seen['calls'])

  return max(rows, key=score)


def language(c: ConfigDict, folder: pathlib.Path) -> pathlib.Path:
  """The model of a training by cross-entropy; a killed one goes on."""
  _finished(train_lm.run(train_lm.settings(c), folder), folder.name)
  return folder / 'model'


def draft(c: ConfigDict, folder: pathlib.Path) -> pathlib.Path:
  """The draft of a distillation; a killed one goes on."""
  found = distillation.run(distillation.settings(c), folder)
  return pathlib.Path(_finished(found, folder.name)['draft'])


def _finished(found: dict[str, Any], name: str) -> dict[str, Any]:
  """What a training returned; raises SystemExit if a signal ended it."""
  if not found['finished']:
    raise SystemExit(f'{name}: ended at step {found["step"]} by a signal')
  return found
