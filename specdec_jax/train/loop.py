"""The training loop: steps, evaluations, checkpoints, logs, and resuming.

What a run is about is a Task. Figures that are the same in every run of the
same settings go to metrics.jsonl; clocks go to clocks.jsonl.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.console
import rich.progress
from absl import logging

from specdec_jax import runtime, types
from specdec_jax.bench import machine
from specdec_jax.io import checkpoint, files
from specdec_jax.train import data
from specdec_jax.train import logs as logs_lib
from specdec_jax.train import step as step_lib

# What may differ when a run goes on: how often it says and keeps something.
FREE = ('run.log_every', 'run.keep')
# Written last of all: what there is to say of a run that needs no more work.
ENDED = 'ended.json'


@dataclasses.dataclass(frozen=True)
class Run:
  """How long, and how often. steps: in all. keep: checkpoints besides the best.

  checkpoint_every, evaluate_every, log_every: in steps; the last step does all.
  """

  steps: int
  checkpoint_every: int
  evaluate_every: int
  log_every: int
  keep: int
  seed: int

  def __post_init__(self):
    for name in ('steps', 'checkpoint_every', 'evaluate_every', 'log_every'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)}: must be 1 or more')
    if self.keep < 1:
      raise ValueError(f'keep={self.keep}: must be 1 or more')
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'seed={self.seed}: must be in 0 to 2**32 - 1')


class Task(NamedTuple):
  """What is trained, on what, and what it is judged by.

  params: where the first step starts, float32. loss, frozen: see step.Loss;
  frozen is what the loss reads and no step changes. batches: global batches of
  this process. judge(params) -> figures of the real decode loop, on held-out
  prompts. score(figures): the larger, the better. tokens, flops: of a batch,
  for the clocks; dtype: what the forward pass multiplies in. refresh(step,
  params): called before every batch, to make new data where it is due.
  """

  params: types.Params
  loss: step_lib.Loss
  frozen: Any
  batches: data.Batches
  judge: Callable[[types.Params], dict[str, Any]]
  score: Callable[[dict[str, Any]], float]
  tokens: int
  flops: float
  dtype: str = 'float32'
  refresh: Callable[[int, types.Params], None] = lambda step, params: None


class Broken(ValueError):
  """A figure that is not finite; says at which step, on which batch."""


class Ended(NamedTuple):
  """step: the last one. best: the best step, its parameters and figures; None
  if a signal ended the run before its last step.
  """

  step: int
  best: tuple[int, types.Params, dict[str, Any]] | None


def run(
  task: Task,
  settings: Run,
  optimiser: step_lib.Optimiser,
  workdir: pathlib.Path,
  *,
  config: dict[str, Any],
  changed: bool = False,
  place: Callable[[dict[str, np.ndarray]], dict[str, Any]] = lambda batch: (
    batch
  ),
  show: bool = True,
) -> Ended:
  """Trains to the last step, going on from the newest checkpoint of workdir.

  Args:
    task, settings, optimiser: what to do.
    workdir: config.json, checkpoints/, metrics.jsonl, clocks.jsonl, tb/.
    config: every setting of the run, as config.json has it.
    changed: whether to go on although config differs from that of workdir.
    place: puts a batch on the devices.
    show: draw a progress bar on stderr.

  Raises:
    ValueError: as open_workdir; a workdir with more steps than settings.steps,
      or without space; checkpoint.Corrupt: none of its checkpoints is whole.
    Broken: the loss, a norm or the score is not finite; what is saved is of
      the steps before.
  """
  open_workdir(workdir, config, changed)
  state = step_lib.start(optimiser, settings.steps, task.params)
  advance = step_lib.make(
    optimiser, settings.steps, task.loss, settings.seed, state
  )
  with contextlib.ExitStack() as stack:
    saved = stack.enter_context(
      checkpoint.Checkpoints(workdir / 'checkpoints', keep=settings.keep)
    )
    first, state, score = _begin(saved, task, settings, state)
    path, said = workdir / 'config.json', json.loads(json.dumps(config))
    if not path.exists() or files.read_json(path) != said:
      _write(path, config)
    if first == settings.steps:
      return Ended(first, _best(saved, task, state))
    logs = stack.enter_context(
      contextlib.closing(logs_lib.Logs(workdir, first))
    )
    stopping = stack.enter_context(_stops())
    bar = stack.enter_context(_progress(settings.steps, first, show))
    clock = _clock(task, state)
    for step in range(first, settings.steps):
      task.refresh(step, state.params)
      began = time.perf_counter()
      batch = next(task.batches)
      state, figures = advance(state, task.frozen, place(batch))
      figures = logs_lib.plain(jax.device_get(figures))
      seconds = time.perf_counter() - began
      norms = ('loss', 'gradient_norm', 'parameter_norm')
      _check({name: figures[name] for name in norms}, step, workdir)
      done, last = step + 1, step + 1 == settings.steps
      clocks = clock(seconds)
      bar(done, figures, clocks)
      if done % settings.log_every == 0 or last:
        logs.write(done, figures)
        logs.clock(done, clocks)
      best, judged = False, None
      if done % settings.evaluate_every == 0 or last:
        judged = logs_lib.plain(task.judge(state.params))
        found = task.score(judged)
        _check({'score': found}, step, workdir)
        logs.write(done, judged)
        best, score = found > score, max(score, found)
      stop = bool(stopping)
      if done % settings.checkpoint_every == 0 or last or best or stop:
        facts = {
          'data': task.batches.state(),
          'score': score if math.isfinite(score) else None,
          'figures': judged,
        }
        logs.flush()
        saved.save(done, state, facts, best=best)
      if stop and not last:
        return Ended(done, None)
    return Ended(settings.steps, _best(saved, task, state))


def _begin(
  saved: checkpoint.Checkpoints,
  task: Task,
  settings: Run,
  start: step_lib.State,
) -> tuple[int, step_lib.State, float]:
  """(steps done, the state after them, the best score in them)."""
  found = saved.restore(jax.tree.map(_abstract, start))
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
  # Where the best one is not left to be exported, any other is better.
  if score is None or saved.best() is None:
    score = -math.inf
  return found.step, found.arrays, score


def _check(figures: dict[str, Any], step: int, workdir: pathlib.Path) -> None:
  """Before anything is kept of a step. NaN is None in plain figures."""
  for name, x in figures.items():
    if x is None or not math.isfinite(x):
      raise Broken(
        f'step {step + 1}: {name} is not finite on batch {step} of {workdir}; '
        'the checkpoints are of the steps before it: try a smaller '
        'learning_rate, or float32'
      )


def _best(saved: checkpoint.Checkpoints, task: Task, state: step_lib.State):
  """The best step, its parameters and figures; the newest one that is whole
  where the best one is not."""
  saved.wait()
  like, found = jax.tree.map(_abstract, state), None
  if (step := saved.best()) is not None:
    try:
      found = saved.restore(like, step)
    except checkpoint.Corrupt as error:
      logging.warning('the best step %d is NOT restored: %s', step, error)
  if found is None:
    found = saved.restore(like)
    assert found is not None, saved.folder
    logging.warning('step %d takes the place of the best one', found.step)
  params, figures = found.arrays.params, found.facts['figures']
  return found.step, params, figures or logs_lib.plain(task.judge(params))


def _clock(task: Task, state: step_lib.State):
  """What the seconds of a step say, of the devices that the state lies on."""
  devices = set[jax.Device]().union(
    *(x.devices() for x in jax.tree.leaves(state))
  )
  peak = machine.matmul_flops(task.dtype) * len(devices)
  return lambda seconds: {
    'tokens_per_second': task.tokens / seconds,
    'utilisation': task.flops / seconds / peak,
  }


def check_one_process() -> None:
  """Runs write one workdir: batches and checkpoints are ready for several
  processes (train/data.py, io/checkpoint.py), logs and exports are not.

  Raises:
    ValueError: there are several.
  """
  if jax.process_count() > 1:
    raise ValueError(
      f'{jax.process_count()} processes: a run is trained by one, on devices '
      'of its own host; start one'
    )


def open_workdir(workdir: pathlib.Path, config, changed: bool) -> None:
  """Makes the folder, or compares its config.json with config.

  One process at a time: what another one was writing there is removed.

  Raises:
    ValueError: it differs, naming the keys; a folder that cannot be written.
  """
  runtime.open_workdir(str(workdir))
  files.sweep(workdir)
  path = workdir / 'config.json'
  if changed or not path.exists():
    return
  differ = _differ(files.read_json(path), config)
  if differ:
    raise ValueError(
      f'workdir {workdir}: begun with other values of {", ".join(differ)}; '
      'take another workdir, or say --changed to go on with the new ones'
    )


def ended(workdir: pathlib.Path, config) -> dict[str, Any] | None:
  """What `end` was told of a run with this config; None if it was not.

  None too where what the run made is gone.
  """
  path = workdir / ENDED
  if not path.exists():
    return None
  found = files.read_json(path)
  whole = (workdir / found['made']).exists()
  return None if _differ(found['config'], config) or not whole else found


def end(workdir: pathlib.Path, config, made: str, figures) -> dict[str, Any]:
  """Notes that there is nothing left to do. made: a name in workdir."""
  found = {'made': made, 'figures': figures, 'config': config}
  _write(workdir / ENDED, found)
  return found


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
  with logs_lib.writing(path):
    files.write(path, json.dumps(content, indent=1))


def _differ(before: dict[str, Any], config: dict[str, Any]) -> list[str]:
  """The keys that differ, but those that are free to."""
  before, now = flat(before), flat(json.loads(json.dumps(config)))
  names = sorted((before.keys() | now) - set(FREE))
  return [x for x in names if before.get(x) != now.get(x)]


def flat(config: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  """{'a': {'b': 1}} -> {'a.b': 1}."""
  out = {}
  for name, value in config.items():
    if isinstance(value, dict):
      out |= flat(value, f'{prefix}{name}.')
    else:
      out[f'{prefix}{name}'] = value
  return out


@contextlib.contextmanager
def _stops():
  """A list that a SIGTERM or SIGINT puts its number in."""
  seen: list[int] = []
  numbers = signal.SIGTERM, signal.SIGINT
  before = [signal.signal(n, lambda n, _: seen.append(n)) for n in numbers]
  try:
    yield seen
  finally:
    for number, handler in zip(numbers, before, strict=True):
      signal.signal(number, handler)


@contextlib.contextmanager
def _progress(steps: int, first: int, show: bool):
  """bar(step, figures, clocks)."""
  columns = (
    *rich.progress.Progress.get_default_columns()[:3],
    rich.progress.TimeRemainingColumn(),
    rich.progress.TextColumn('{task.fields[said]}'),
  )
  console = rich.console.Console(stderr=True)
  with rich.progress.Progress(
    *columns, console=console, disable=not show
  ) as bars:
    bar = bars.add_task('training', total=steps, completed=first, said='')
    alpha = ''

    def advance(step, figures, clocks):
      nonlocal alpha
      if 'train_alpha' in figures:
        alpha = f'  alpha {np.ravel(figures["train_alpha"])[0]:.3f}'
      speed, share = clocks['tokens_per_second'], clocks['utilisation']
      said = f'loss {figures["loss"]:.4f}{alpha}  {speed:,.0f} tok/s'
      said += f', {share:.0%} of matmul peak'
      bars.update(bar, completed=step, said=said)

    yield advance


def _abstract(x) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
