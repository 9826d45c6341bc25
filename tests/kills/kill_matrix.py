"""Kills training runs at random, damages checkpoints, and compares bytes.

It knows of a run what lies in its workdir, and how scripts/train.py is called.
"""

import collections
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table

from specdec_jax.io import checkpoint
from tests.kills import killed

ROOT = pathlib.Path(__file__).parents[2]
# What a kill is aimed at, in turn; 'anywhere' is uniform over a whole life. The
# first ones are without a compilation cache.
AIMS = ('compile', 'anywhere', 'import', 'save', 'rename', 'cleanup')
AIMS += ('evaluation', 'step', 'anywhere')
_COLD = 2
# Kills that one workdir lives through, at most.
_CHAIN = 4


@dataclasses.dataclass(frozen=True)
class Program:
  """arguments: of Python, all but --workdir. interval: steps from one
  checkpoint to the next, at most.
  """

  arguments: tuple[str, ...]
  interval: int


@dataclasses.dataclass
class Found:
  """What happened. wrong: sentences, none if all is well."""

  phases: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  starts: int = 0
  runs: int = 0
  restored: int = 0
  lost: int = 0
  damaged: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  wrong: list[str] = dataclasses.field(default_factory=list)

  def check(self, good: bool, sentence: str) -> None:
    if not good:
      self.wrong.append(sentence)


@dataclasses.dataclass(frozen=True)
class Reference:
  """A run that was never killed. steps: step -> (leaves' bytes, facts).

  files: those that must be the same in the end. spent: phase -> (times,
  seconds in all).
  """

  like: Any
  steps: dict[int, tuple[list[bytes], dict[str, Any]]]
  files: dict[str, bytes]
  spent: dict[str, tuple[int, float]]


# --- trees that are known by their manifests only ----------------------------


@jax.tree_util.register_pytree_with_keys_class
class Leaves(dict):
  """{a leaf's name in a manifest: leaf}, as a tree with just these names."""

  def tree_flatten_with_keys(self):
    # keystr writes the dot that the names of a NamedTuple's fields begin with.
    assert all(name.startswith('.') for name in self), list(self)
    keys = [jax.tree_util.GetAttrKey(name[1:]) for name in self]
    return list(zip(keys, self.values(), strict=True)), tuple(self)

  @classmethod
  def tree_unflatten(cls, names, leaves):
    return cls(zip(names, leaves, strict=True))


def like(folder: pathlib.Path) -> Leaves:
  """What a step's manifest says that it holds."""
  leaves = checkpoint.read_manifest(folder).leaves
  return Leaves(
    {k: jax.ShapeDtypeStruct(tuple(x[1]), x[0]) for k, x in leaves.items()}
  )


def content(tree: Any) -> list[bytes]:
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


# --- kills -------------------------------------------------------------------


def small(folder: pathlib.Path, steps: int) -> Program:
  """A run of a few seconds that saves, judges and exports."""
  from pydoc_data import topics

  source = folder / 'corpus.txt'
  source.write_text('\n\n'.join(topics.topics.values())[:60_000])
  settings = dict(
    steps=steps, checkpoint_every=4, evaluate_every=5, log_every=1, keep=2
  )
  return Program(
    (
      str(ROOT / 'scripts/train.py'),
      f'--config={ROOT / "configs/train_lm.py"}:tiny',
      f'--config.text.source={source}',
      '--config.text.rows=4',
      *(f'--config.run.{name}={x}' for name, x in settings.items()),
    ),
    interval=4,
  )


def kills(
  program: Program,
  folder: pathlib.Path,
  count: int,
  seed: int,
  track: Callable[[Iterable[int]], Iterable[int]],
) -> tuple[Found, pathlib.Path]:
  """`count` SIGKILLs, a few in each workdir, and what was found of them.

  Also the checkpoints of a run that was never killed.
  """
  cache = folder / 'cache'
  whole = folder / 'reference'
  notes = folder / 'notes'
  keep = dataclasses.replace(
    program, arguments=(*program.arguments, '--config.run.keep=1000')
  )
  start = functools.partial(_start, notes=notes)
  code, said = start(keep, whole, cache=cache)
  if code:
    raise ValueError(f'the run that is not killed ended with {code}: {said}')
  reference = _reference(whole, notes)
  found, draw = Found(), random.Random(seed)
  workdir, left = folder / 'run', 0
  for number in track(range(count)):
    code = 0
    while code != -signal.SIGKILL:
      if not left:
        if workdir.exists():
          _finish(found, program, workdir, reference, start, cache)
        left = draw.randint(1, _CHAIN)
      aim = _aim(AIMS[number % len(AIMS)], reference, draw)
      cold = number < _COLD
      code, said = start(
        program, workdir, cache=None if cold else cache, aim=aim
      )
      found.starts += 1
      if code == 0:  # It was done before its time came.
        left = 0
      elif code != -signal.SIGKILL:
        found.wrong.append(f'kill {number}: the run ended with {code}: {said}')
        return found, whole / 'checkpoints'
    left -= 1
    _after(found, program, workdir, reference, killed.read(notes))
  if workdir.exists():
    _finish(found, program, workdir, reference, start, cache)
  return found, whole / 'checkpoints'


def _aim(kind: str, reference: Reference, draw: random.Random):
  """(plan of the process, seconds after which it is killed from outside)."""
  whole = sum(reference.spent[x][1] for x in ('import', 'compile', 'step'))
  if kind == 'anywhere':
    return 'never', draw.uniform(0, whole)
  times, seconds = reference.spent[kind]
  if kind == 'import':
    return 'never', draw.uniform(0, seconds)
  within = f'{draw.uniform(0, seconds / times):.6f}'
  # Half of those of a run: one that goes on has fewer of them.
  count = draw.randint(1, max(1, times // 2))
  when = draw.choice(['before', 'after', within])
  # Compiling and stepping are no calls: they have no end of their own.
  when = within if kind in ('compile', 'step') else when
  return f'{kind}:{1 if kind in ("compile", "step") else count}:{when}', None


def _start(program, workdir, *, notes, cache, aim=('never', None)):
  """(exit status, the end of stderr) of one process."""
  plan, seconds = aim
  killed.blank(notes)
  env = os.environ | {'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
  if cache:
    env |= {
      'JAX_COMPILATION_CACHE_DIR': str(cache),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
  said = notes.with_suffix('.err')
  with open(said, 'wb') as err:
    child = subprocess.Popen(
      [
        sys.executable,
        *('-m', 'tests.kills.killed', str(notes), plan),
        *program.arguments,
        f'--workdir={workdir}',
      ],
      env=env,
      stdout=subprocess.DEVNULL,
      stderr=err,
    )
    try:
      child.wait(seconds)
    except subprocess.TimeoutExpired:
      child.send_signal(signal.SIGKILL)
      child.wait()
  return child.returncode, said.read_text()[-600:]


def _reference(workdir: pathlib.Path, notes: pathlib.Path) -> Reference:
  folder = workdir / 'checkpoints'
  saved, steps = checkpoint.Checkpoints(folder), {}
  tree = like(folder / str(saved.steps()[-1]))
  for step in saved.steps():
    got = saved.restore(tree, step)
    assert got is not None, step
    steps[step] = content(got.arrays), got.facts
  spent = json.loads(notes.with_name(f'{notes.name}.json').read_text())
  return Reference(tree, steps, _files(workdir), spent)


def _files(workdir: pathlib.Path) -> dict[str, bytes]:
  """All but clocks, what is said of the run, and the checkpoints."""
  paths = [workdir / 'metrics.jsonl', workdir / 'model/model.safetensors']
  return {x.name: x.read_bytes() for x in paths}


def _after(
  found: Found, program: Program, workdir, reference: Reference, notes
) -> None:
  """Checks what a killed process left."""
  found.phases[notes.phase] += 1
  where = f'killed in {notes.phase}, step {notes.step}'
  saved = checkpoint.Checkpoints(workdir / 'checkpoints')
  for step in saved.steps():
    _same(found, saved, step, reference, where)
  newest = max([0, *saved.steps()])
  found.check(
    newest >= notes.before,
    f'{where}: step {notes.before} was saved, the newest is {newest}',
  )
  if notes.step:
    found.lost = max(found.lost, notes.step - newest)


def _same(found: Found, saved, step: int, reference: Reference, where) -> None:
  found.restored += 1
  try:
    got = saved.restore(reference.like, step)
  except checkpoint.Corrupt as error:
    found.wrong.append(f'{where}: step {step} is listed, but {error}')
    return
  same = step in reference.steps and reference.steps[step] == (
    content(got.arrays),
    got.facts,
  )
  found.check(same, f'{where}: step {step} is not that of the reference')


def _finish(
  found: Found, program, workdir, reference: Reference, start, cache
) -> None:
  """Runs to the end, and compares it with the reference."""
  code, said = start(program, workdir, cache=cache)
  found.starts += 1
  found.runs += 1
  where = f'run {found.runs}, in the end'
  found.check(code == 0, f'{where}: it ended with {code}: {said}')
  if code == 0:
    saved = checkpoint.Checkpoints(workdir / 'checkpoints')
    last = max(reference.steps)
    found.check(last in saved.steps(), f'{where}: no step {last}')
    for step in saved.steps():
      _same(found, saved, step, reference, where)
    for name, bytes_ in _files(workdir).items():
      same = bytes_ == reference.files[name]
      found.check(same, f'{where}: {name} is not that of the reference')
  shutil.rmtree(workdir)


# --- damage ------------------------------------------------------------------


def damage(
  found: Found,
  source: pathlib.Path,
  folder: pathlib.Path,
  flips: int,
  seed: int,
  track: Callable[[Iterable[int]], Iterable[int]],
) -> None:
  """Flips bits of the newest step and removes its files, one at a time.

  Each must be found out, and the step before it restored, byte for byte.
  """
  steps = checkpoint.Checkpoints(source).steps()[-2:]
  for step in steps:
    shutil.copytree(source / str(step), folder / str(step))
  tree = like(folder / str(steps[0]))
  older = checkpoint.Checkpoints(folder).restore(tree, steps[0])
  assert older is not None, folder
  want = content(older.arrays), older.facts
  newest = folder / str(steps[1])
  paths = sorted(x for x in newest.rglob('*') if x.is_file())
  filled = [x for x in paths if x.stat().st_size]
  draw = random.Random(seed)
  for i in track(range(flips + len(paths))):
    flip = i < flips
    path = draw.choice(filled) if flip else paths[i - flips]
    old = path.read_bytes()
    if flip:
      bit = draw.randrange(8 * len(old))
      new = bytearray(old)
      new[bit // 8] ^= 1 << bit % 8
      path.write_bytes(new)
    else:
      path.unlink()
    kind = 'flip' if flip else 'deletion'
    outcome = _outcome(folder, tree, steps[0], want)
    found.damaged[f'{kind}: {outcome}'] += 1
    what = f'{kind} in {path.relative_to(folder)}: {outcome}'
    found.check(outcome == REFUSED, what)
    path.write_bytes(old)


REFUSED = 'refused, the older step restored'


def _outcome(folder: pathlib.Path, tree, older: int, want) -> str:
  saved = checkpoint.Checkpoints(folder)
  try:
    got = saved.restore(tree)
  except checkpoint.Corrupt:
    return 'refused, nothing restored'
  # Whatever else it is, it is what this looks for.
  except Exception as error:  # noqa: BLE001
    return f'untyped {type(error).__name__}'
  finally:
    saved.close()
  if got is None or got.step != older:
    return 'silently restored'
  same = (content(got.arrays), got.facts) == want
  return REFUSED if same else 'the older step restored wrong'


# --- what is said ------------------------------------------------------------


def summary(found: Found, interval: int, seconds: float) -> dict[str, Any]:
  return {
    'good': not found.wrong,
    'kills': found.phases.total(),
    'phases': dict(found.phases),
    'starts': found.starts,
    'runs': found.runs,
    'restored': found.restored,
    'steps_lost': found.lost,
    'interval': interval,
    'damaged': dict(found.damaged),
    'wrong': found.wrong,
    'seconds': round(seconds),
  }


def show(doc: dict[str, Any], console: rich.console.Console) -> None:
  table = rich.table.Table('killed in', 'times')
  for phase in killed.PHASES:
    table.add_row(phase, str(doc['phases'].get(phase, 0)))
  table.add_row('all', str(doc['kills']))
  console.print(table)
  console.print(
    f'{doc["restored"]} listed steps restored, {doc["runs"]} runs of '
    f'{doc["starts"]} starts compared; at most {doc["steps_lost"]} steps made '
    f'again, {doc["interval"]} from one save to the next'
  )
  for kind, times in sorted(doc['damaged'].items()):
    console.print(f'{times} x {kind}')
  for sentence in doc['wrong']:
    console.print(f'WRONG: {sentence}', style='bold red', markup=False)
