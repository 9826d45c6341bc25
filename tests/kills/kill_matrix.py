"""Kills training runs at random, and compares what they leave, byte by byte."""

import collections
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import printing
from specdec_jax.io import checkpoint
from tests.kills import killed

ROOT = pathlib.Path(__file__).parents[2]
# The phases that kills are aimed at, in turn; 'anywhere' is any time of a life.
AIMS = ('compile', 'anywhere', 'import', 'save', 'rename', 'cleanup')
AIMS += ('evaluation', 'step', 'anywhere')
COLD = 2  # the first kills are of runs without a compilation cache
CHAIN = 4  # kills that one workdir lives through, at most
INTERVAL = 4  # steps from one checkpoint to the next, at most


@dataclasses.dataclass
class Found:
  """The findings. wrong: sentences, none if all is well."""

  phases: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  starts: int = 0
  runs: int = 0
  restored: int = 0
  lost: int = 0
  wrong: list[str] = dataclasses.field(default_factory=list)

  def check(self, good: bool, sentence: str) -> None:
    if not good:
      self.wrong.append(sentence)


class Reference(NamedTuple):
  """A run that was never killed."""

  like: Any  # the tree of its checkpoints
  steps: dict[int, tuple[list[bytes], dict[str, Any]]]  # (leaves, facts)
  files: dict[str, bytes]  # those that must be the same in the end
  spent: dict[str, tuple[int, float]]  # phase -> (times, seconds in all)


@jax.tree_util.register_pytree_with_keys_class
class Leaves(dict):
  """{a leaf's name in a manifest: leaf}, as a tree with just these names."""

  def tree_flatten_with_keys(self):
    # keystr writes the dot that the names of a NamedTuple's fields begin with.
    keys = [jax.tree_util.GetAttrKey(name.removeprefix('.')) for name in self]
    return list(zip(keys, self.values(), strict=True)), tuple(self)

  @classmethod
  def tree_unflatten(cls, names, leaves):
    return cls(zip(names, leaves, strict=True))


def like(folder: pathlib.Path) -> Leaves:
  """The tree that a step's manifest describes."""
  leaves = checkpoint.read_manifest(folder).leaves
  return Leaves(
    {k: jax.ShapeDtypeStruct(tuple(x[1]), x[0]) for k, x in leaves.items()}
  )


def content(tree: Any) -> list[bytes]:
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def training(folder: pathlib.Path, steps: int) -> list[str]:
  """A program and arguments: a run of a few seconds, without its workdir."""
  source = folder / 'corpus.txt'
  source.write_text('\n\n'.join(topics.topics.values())[:60_000])
  every = dict(checkpoint_every=INTERVAL, evaluate_every=5, log_every=1)
  return [
    str(ROOT / 'scripts/train.py'),
    f'--config={ROOT / "configs/train_lm.py"}:tiny',
    f'--config.text.source={source}',
    '--config.text.rows=4',
    f'--config.run.steps={steps}',
    *(f'--config.run.{name}={x}' for name, x in every.items()),
  ]


def cached(folder: pathlib.Path) -> dict[str, str]:
  """The environment of programs that keep all that they compile in a folder."""
  return {
    'JAX_COMPILATION_CACHE_DIR': str(folder),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
  }


class Runs:
  """A run of a few seconds that saves, judges and exports, and its end."""

  def __init__(self, folder: pathlib.Path, steps: int):
    self._arguments = training(folder, steps)
    self.cache, self.notes = folder / 'cache', folder / 'notes'
    self.checkpoints = folder / 'reference/checkpoints'
    whole = self.checkpoints.parent
    code, end = self.start(whole, keep=1000)
    if code:
      raise ValueError(f'the run that is not killed ended with {code}: {end}')
    saved, found = checkpoint.Checkpoints(self.checkpoints), {}
    tree = like(self.checkpoints / str(saved.steps()[-1]))
    for step in saved.steps():
      got = saved.restore(tree, step)
      assert got is not None, step
      found[step] = content(got.arrays), got.facts
    spent = json.loads(self.notes.with_name('notes.json').read_text())
    self.reference = Reference(tree, found, final_files(whole), spent)

  def start(self, workdir, plan='never', seconds=None, *, cold=False, keep=2):
    """(exit status, the end of stderr) of one process."""
    killed.blank(self.notes)
    env = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
    env.pop('JAX_COMPILATION_CACHE_DIR', None)
    env |= {} if cold else cached(self.cache)
    command = [sys.executable, '-m', 'tests.kills.killed', self.notes, plan]
    command += [*self._arguments, f'--config.run.keep={keep}']
    errors = self.notes.with_suffix('.err')
    with open(errors, 'wb') as err:
      child = subprocess.Popen(
        [*command, f'--workdir={workdir}'],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=err,
      )
      try:
        child.wait(seconds)
      except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return child.returncode, errors.read_text()[-600:]

  def aim(self, kind: str, draw: random.Random) -> tuple[str, float | None]:
    """(plan of a process, seconds after which it is killed from outside)."""
    spent = self.reference.spent
    if kind == 'anywhere':
      whole = sum(spent[x][1] for x in ('import', 'compile', 'step'))
      return 'never', draw.uniform(0, whole)
    times, seconds = spent[kind]
    if kind == 'import':
      return 'never', draw.uniform(0, seconds)
    within = f'{draw.uniform(0, seconds / times):.6f}'
    if kind in ('compile', 'step'):  # no calls: they have no end of their own
      return f'{kind}:1:{within}', None
    # Half of the times of a run: one that goes on has fewer of them.
    count = draw.randint(1, max(1, times // 2))
    return f'{kind}:{count}:{draw.choice(["before", "after", within])}', None


def final_files(workdir: pathlib.Path) -> dict[str, bytes]:
  """The results of a run: no clocks, no checkpoints."""
  paths = [workdir / 'metrics.jsonl', workdir / 'model/model.safetensors']
  return {x.name: x.read_bytes() for x in paths}


def kill(runs: Runs, workdir: pathlib.Path, count: int, seed: int) -> Found:
  """`count` SIGKILLs, a few in each workdir, and what they left."""
  found, draw, left = Found(), random.Random(seed), 0
  for number in printing.track(range(count), 'kills'):
    code = 0
    while code != -signal.SIGKILL:
      if not left:
        if workdir.exists():
          finish(found, runs, workdir)
        left = draw.randint(1, CHAIN)
      aim = runs.aim(AIMS[number % len(AIMS)], draw)
      code, end = runs.start(workdir, *aim, cold=number < COLD)
      found.starts += 1
      if code == 0:  # It was done before its time came.
        left = 0
      elif code != -signal.SIGKILL:
        found.wrong.append(f'kill {number}: the run ended with {code}: {end}')
        return found
    left -= 1
    check_killed(found, workdir, runs.reference, killed.read(runs.notes))
  if workdir.exists():
    finish(found, runs, workdir)
  return found


def check_killed(
  found: Found, workdir: pathlib.Path, reference: Reference, notes: killed.Notes
) -> None:
  """Checks the workdir of a killed process."""
  found.phases[notes.phase] += 1
  where = f'killed in {notes.phase}, step {notes.step}'
  steps = check_steps(found, workdir, reference, where)
  newest = max([0, *steps])
  found.check(
    newest >= notes.before,
    f'{where}: step {notes.before} was saved, the newest is {newest}',
  )
  if notes.step:
    found.lost = max(found.lost, notes.step - newest)


def check_steps(
  found: Found, workdir: pathlib.Path, reference: Reference, where: str
) -> list[int]:
  """Restores every step that is listed, and compares it."""
  saved = checkpoint.Checkpoints(workdir / 'checkpoints')
  for step in saved.steps():
    found.restored += 1
    try:
      got = saved.restore(reference.like, step)
    except checkpoint.Corrupt as error:
      found.wrong.append(f'{where}: step {step} is listed, but {error}')
      continue
    assert got is not None
    same = reference.steps.get(step) == (content(got.arrays), got.facts)
    found.check(same, f'{where}: step {step} is not that of the reference')
  return saved.steps()


def finish(found: Found, runs: Runs, workdir: pathlib.Path) -> None:
  """Runs to the end, compares it with the reference, removes it."""
  code, end = runs.start(workdir)
  found.starts += 1
  found.runs += 1
  where = f'run {found.runs}, in the end'
  found.check(code == 0, f'{where}: it ended with {code}: {end}')
  if code == 0:
    steps = check_steps(found, workdir, runs.reference, where)
    last = max(runs.reference.steps)
    found.check(last in steps, f'{where}: no step {last}')
    for name, bytes_ in final_files(workdir).items():
      same = bytes_ == runs.reference.files[name]
      found.check(same, f'{where}: {name} is not that of the reference')
  shutil.rmtree(workdir)


def summary(found: Found, seconds: float) -> dict[str, Any]:
  return {
    'good': not found.wrong,
    'kills': found.phases.total(),
    'phases': dict(found.phases),
    'starts': found.starts,
    'runs': found.runs,
    'restored': found.restored,
    'steps_lost': found.lost,
    'interval': INTERVAL,
    'wrong': found.wrong,
    'seconds': round(seconds),
  }
