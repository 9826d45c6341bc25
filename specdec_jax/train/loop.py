"""Trains: steps, evaluations, checkpoints, logs, and resuming."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from specdec_jax import fields, hosts, machine, printing, program, types
from specdec_jax.io import checkpoint
from specdec_jax.train import data
from specdec_jax.train import logs as logs_lib
from specdec_jax.train import step as step_lib

CONFIG = 'config.json'  # every setting of the run


@dataclasses.dataclass(frozen=True)
class Run(fields.Checked):
  """A run's length and intervals, all of which include the last step."""

  steps: int = fields.setting(low=1, help='of the optimiser, in all')
  checkpoint_every: int = fields.setting(low=1, help='steps')
  evaluate_every: int = fields.setting(low=1, help='steps')
  log_every: int = fields.setting(low=1, help='steps')
  keep: int = fields.setting(low=1, help='checkpoints, besides the best')
  seed: int = fields.setting(low=0, high=2**32 - 1)


class Task(NamedTuple):
  """Parameters to train, with their loss, data and evaluation."""

  params: types.Params  # initial values, float32
  loss: step_lib.Loss
  frozen: Any  # parameters that the loss reads and no step changes
  batches: data.Batches
  evaluate: Callable[[types.Params], dict[str, Any]]  # held-out figures
  score: Callable[[dict[str, Any]], float]  # of those; larger: better
  tokens: int  # in a batch
  flops: float | None = None  # for a batch, forward and backward, if known
  dtype: str = 'float32'  # of the matmuls in the forward pass
  # Called with (step, params) before every batch: on-policy data is made here.
  refresh: Callable[[int, types.Params], None] = lambda step, params: None
  # Puts a batch on the devices.
  place: Callable[[dict[str, Any]], dict[str, Any]] = lambda batch: batch


# Of a step's figures, those that must be finite.
_NORMS = ('loss', 'gradient_norm', 'parameter_norm')


class Ended(NamedTuple):
  """The best step; the last one, and None, if a signal stopped the run."""

  step: int
  params: types.Params | None = None
  figures: Any = None  # of its evaluation


def run(
  task: Task,
  settings: Run,
  optimiser: step_lib.Optimiser,
  workdir: pathlib.Path,
  config: dict[str, Any],
) -> Ended:
  """Trains to the last step, resuming from workdir's newest checkpoint.

  SIGTERM and Ctrl-C end the run after the current step, which is saved.

  workdir: a folder after runner.open_run. config: all settings, for CONFIG.

  Raises:
    ValueError: workdir has more than settings.steps steps, is full, or has no
      valid checkpoint; the loss, a norm or the score is not finite, and that
      step not saved.
  """
  state = step_lib.start(optimiser, settings.steps, task.params)
  advance = step_lib.make(
    optimiser, settings.steps, task.loss, settings.seed, state
  )
  with contextlib.ExitStack() as stack:
    saved = stack.enter_context(
      checkpoint.Checkpoints(workdir / 'checkpoints', keep=settings.keep)
    )
    first, state, score = _begin(saved, task, settings, state)
    # Only now: a run that is refused leaves the workdir as it was.
    if hosts.is_first():
      logs_lib.write_json(workdir / CONFIG, config)
    if first == settings.steps:
      return _best(saved, task, state)
    logs = logs_lib.Logs(workdir, first)
    stack.enter_context(contextlib.closing(logs))
    stops = stack.enter_context(program.interrupts())
    bar = printing.progress('training', settings.steps, first)
    advanced = stack.enter_context(bar)
    record = _recorder(task, settings, saved, logs, score, stops)
    devices = {d for x in jax.tree.leaves(state) for d in x.devices()}
    peak = task.flops and machine.matmul_flops(task.dtype) * len(devices)
    for step in range(first, settings.steps):
      task.refresh(step, state.params)
      began, worked = time.perf_counter(), time.process_time()
      batch = task.place(next(task.batches))
      state, figures = advance(state, task.frozen, batch)
      figures = logs_lib.plain(hosts.fetch(figures))
      seconds = time.perf_counter() - began
      clocks = {'tokens_per_second': task.tokens / seconds}
      if task.flops and peak:
        clocks['utilisation'] = task.flops / seconds / peak
      # Of all cores together, which other work on the machine changes least.
      clocks['core_seconds'] = time.process_time() - worked
      _check_finite({name: figures[name] for name in _NORMS}, step)
      advanced(step + 1, _words(figures, clocks))
      stop = record(step + 1, state, figures, clocks)
      if stop and step + 1 < settings.steps:
        return Ended(step + 1)
    return _best(saved, task, state)


def _recorder(
  task: Task,
  settings: Run,
  saved: checkpoint.Checkpoints,
  logs: logs_lib.Logs,
  top: float,
  stops: Sequence[int],
) -> Callable[..., bool]:
  """Makes a function that logs, evaluates and saves what `step` steps made,
  each if due; it returns whether the run must stop, with that step saved.

  top: the best score so far. stops: signals received.
  """

  def record(step: int, state: step_lib.State, figures, clocks) -> bool:
    nonlocal top
    due = lambda every: step % every == 0 or step == settings.steps
    if due(settings.log_every):
      logs.write('metrics', step, figures)
      logs.write('clocks', step, clocks)
    found, best = None, False
    if due(settings.evaluate_every):
      found = logs_lib.plain(task.evaluate(state.params))
      score = task.score(found)
      _check_finite({'score': score}, step - 1)
      logs.write('metrics', step, found)
      best, top = score > top, max(score, top)
    stop = hosts.anywhere(bool(stops))
    if best or stop or due(settings.checkpoint_every):
      known = top if math.isfinite(top) else None
      facts = {'data': task.batches.state(), 'score': known, 'figures': found}
      saved.save(step, state, facts, best=best)
    return stop

  return record


def _begin(
  saved: checkpoint.Checkpoints,
  task: Task,
  settings: Run,
  start: step_lib.State,
) -> tuple[int, step_lib.State, float]:
  """Returns (steps done, state, best score), from a checkpoint or step 0."""
  found = saved.restore(start)
  if found is None:
    return 0, start, -math.inf
  if found.step > settings.steps:
    raise ValueError(
      f'steps={settings.steps}: {saved.folder} has step {found.step}; take '
      'that many or more, or another workdir'
    )
  logging.warning('going on from step %d of %s', found.step, saved.folder)
  task.batches.restore(found.facts['data'])
  score = found.facts['score']
  # If the best checkpoint is gone, any later step counts as better.
  if score is None or hosts.from_first(saved.best) is None:
    score = -math.inf
  return found.step, found.arrays, score


def _check_finite(figures: dict[str, Any], step: int) -> None:
  """Raises ValueError before a step is saved. NaN is None in figures."""
  for name, x in figures.items():
    if x is None or not math.isfinite(x):
      raise ValueError(
        f'step {step + 1}: {name} is not finite on batch {step}; the '
        'checkpoints are of the steps before it: try a smaller learning_rate, '
        'or float32'
      )


def _best(
  saved: checkpoint.Checkpoints, task: Task, state: step_lib.State
) -> Ended:
  """Restores the best step, or the newest valid one if that is damaged."""
  saved.wait()
  found = None
  if (step := hosts.from_first(saved.best)) is not None:
    try:
      found = saved.restore(state, step)
    except checkpoint.Corrupt as error:
      logging.warning('the best step %d is NOT restored: %s', step, error)
  if found is None:
    found = saved.restore(state)
    assert found is not None, saved.folder
    logging.warning('step %d takes the place of the best one', found.step)
  params, figures = found.arrays.params, found.facts['figures']
  figures = figures or logs_lib.plain(task.evaluate(params))
  return Ended(found.step, params, figures)


def _words(figures: dict[str, Any], clocks: dict[str, float]) -> str:
  """Describes a step for the progress bar."""
  alphas = np.ravel(figures.get('train_alpha', ()))  # by draft position
  alpha = f'  alpha {alphas[0]:.3f}' if alphas.size else ''
  speed = f'{clocks["tokens_per_second"]:,.0f} tok/s'
  return f'loss {figures["loss"]:.4f}{alpha}  {speed}'
