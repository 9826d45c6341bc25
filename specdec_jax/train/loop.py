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

from specdec_jax import types
from specdec_jax.eval import machine
from specdec_jax.io import checkpoint, files
from specdec_jax.train import data
from specdec_jax.train import logs as logs_lib
from specdec_jax.train import step as step_lib

# What may differ when a run goes on: how often it says and keeps something.
FREE = ('log_every', 'keep')


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


class Broken(FloatingPointError):
  """A loss that is not finite; says at which step and on which rows."""


class Ended(NamedTuple):
  """step: the last one. best: the best step, its parameters and figures.

  finished: False if a signal ended the run before its last step; best is None
  if that was before anything was judged.
  """

  step: int
  best: tuple[int, types.Params, dict[str, Any]] | None
  finished: bool


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
    ValueError: a workdir of another config (naming the keys), or one that
      cannot be written; checkpoint.Corrupt: none of its checkpoints is whole.
    Broken: the loss is not finite. The checkpoints before are kept.
  """
  keep_config(workdir, config, changed)
  state = step_lib.start(optimiser, settings.steps, task.params)
  advance = step_lib.make(optimiser, settings.steps, task.loss, settings.seed)
  peak = machine.matmul_flops(task.dtype) * jax.device_count()
  clock = lambda seconds: {
    'tokens_per_second': task.tokens / seconds,
    'utilisation': task.flops / seconds / peak,
  }
  with contextlib.ExitStack() as stack:
    saved = stack.enter_context(
      checkpoint.Checkpoints(workdir / 'checkpoints', keep=settings.keep)
    )
    found = saved.restore(jax.tree.map(_abstract, state))
    first, score = 0, -math.inf
    if found is not None:
      first, state = found.step, found.arrays
      score = found.facts['score']
      score = -math.inf if score is None else score
      logging.warning('going on from step %d of %s', first, workdir)
      task.batches.restore(found.facts['data'])
    logs = stack.enter_context(
      contextlib.closing(logs_lib.Logs(workdir, first))
    )
    stopping = stack.enter_context(_stops())
    bar = stack.enter_context(_progress(settings.steps, first, show))
    for step in range(first, settings.steps):
      task.refresh(step, state.params)
      began = time.perf_counter()
      batch = next(task.batches)
      state, figures = advance(state, task.frozen, place(batch))
      figures = _host(figures)
      if not math.isfinite(figures['loss']):
        raise Broken(
          f'step {step + 1}: the loss is {figures["loss"]} on batch '
          f'{step} of {workdir}; the checkpoints before it are kept: try a '
          'smaller learning_rate or float32'
        )
      done, last = step + 1, step + 1 == settings.steps
      seconds = time.perf_counter() - began
      bar(done, figures, task.tokens / seconds)
      if done % settings.log_every == 0 or last:
        logs.write(done, figures)
        logs.clock(done, clock(seconds))
      best, judged = False, None
      if done % settings.evaluate_every == 0 or last:
        judged = task.judge(state.params)
        logs.write(done, judged)
        best = task.score(judged) > score
        score = max(score, task.score(judged))
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
        return Ended(done, _best(saved, state), False)
    return Ended(settings.steps, _best(saved, state), True)


def _best(saved: checkpoint.Checkpoints, like: step_lib.State):
  saved.wait()
  step = saved.best()
  if step is None:
    return None
  found = saved.restore(jax.tree.map(_abstract, like), step)
  assert found is not None, step
  return step, found.arrays.params, found.facts['figures']


def keep_config(workdir: pathlib.Path, config, changed: bool) -> None:
  """Writes config.json, or compares with the one that is there.

  Raises:
    ValueError: it differs, naming the keys; a folder that cannot be written.
  """
  path = workdir / 'config.json'
  config = json.loads(json.dumps(config))
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if path.exists():
      before = files.read_json(path)
      differ = sorted(
        name
        for name in {*flat(before), *flat(config)}
        if name.rpartition('.')[2] not in FREE
        and flat(before).get(name) != flat(config).get(name)
      )
      if differ and not changed:
        raise ValueError(
          f'workdir {workdir}: begun with other values of {", ".join(differ)}; '
          'take another workdir, or say --changed to go on with the new ones'
        )
    files.write(path, json.dumps(config, indent=1, sort_keys=True))
  except OSError as error:
    raise ValueError(
      f'workdir {workdir}: cannot be written: {error.strerror}'
    ) from error


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
  """bar(step, figures, tokens a second)."""
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

    def advance(step, figures, speed):
      nonlocal alpha
      if 'alpha' in figures:
        alpha = f'  alpha {np.ravel(figures["alpha"])[0]:.3f}'
      said = f'loss {figures["loss"]:.4f}{alpha}  {speed:,.0f} tok/s'
      bars.update(bar, completed=step, said=said)

    yield advance


def _host(figures: dict[str, Any]) -> dict[str, Any]:
  """Numbers and lists of numbers."""
  return {k: np.asarray(v).tolist() for k, v in jax.device_get(figures).items()}


def _abstract(x) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
