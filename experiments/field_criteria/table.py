"""Every seeded bug of the core, and which criteria pass although it is there.

python -m experiments.field_criteria.table [--only=NAME,NAME] [--jobs=N]
  [--results=DIR] [--resume]: writes field_criteria.json and .md there.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from experiments import page
from experiments.field_criteria import measure, render
from specdec_jax.io import files
from tests.mutants import run as runner
from tests.mutants import seeded
from tests.mutants.mutant import Mutant, mutated

HERE = pathlib.Path(__file__).parent
# What touches only reading, the API, batching, meshes or evaluation is not what
# these criteria are about.
CORE = (
  'specdec_jax/sampling.py',
  'specdec_jax/decode.py',
  'specdec_jax/forward.py',
  'specdec_jax/verify/',
  'specdec_jax/drafters/',
  'specdec_jax/models/',
)
LIMIT = 90.0  # seconds that one criterion, or test of ours, may take
UNMUTATED = Mutant('none', 0, 'no bug', '', '', '', ())


class Outcome(NamedTuple):
  """One mutant. seen: criterion -> what measure.py wrote. hung: it was ended
  from outside, or died; what it had not written by then is caught."""

  name: str
  failure: str
  path: str
  row: int
  seen: dict[str, Any]
  hung: bool
  seconds: float


def core() -> list[Mutant]:
  return [m for m in seeded.MUTANTS if m.path.startswith(CORE)]


def one(mutant: Mutant, tree: pathlib.Path, compiled: pathlib.Path) -> Outcome:
  """Measures one mutant in a copy of the tree."""
  began = time.monotonic()
  with tempfile.TemporaryDirectory(prefix='field-') as folder:
    copy, out = pathlib.Path(folder, 'tree'), pathlib.Path(folder, 'out')
    shutil.copytree(tree, copy)
    out.touch()
    if mutant.path:
      path = copy / mutant.path
      path.write_text(mutated(mutant, path.read_text()))
    hung = _measure(copy, out, compiled)
    lines = map(json.loads, out.read_text().splitlines())
    seen = {x.pop('criterion'): x for x in lines}
  for name in measure.THEIRS:
    seen.setdefault(name, dict(passed=False, digest='hung', why='hung'))
  seen[measure.OURS] = dict(passed=True, digest='', why='')
  if mutant.tests:
    settings = runner.Settings(tree, compiled, limit=LIMIT, wider=())
    tested = runner.outcome(mutant, settings)
    killed = tested.verdict in runner.KILLED
    seen[measure.OURS] = dict(passed=not killed, digest='', why=tested.test)
  seconds = round(time.monotonic() - began, 1)
  return Outcome(
    mutant.name, mutant.failure, mutant.path, mutant.row, seen, hung, seconds
  )


def _measure(copy, out, compiled) -> bool:
  """Runs measure.py in the copy; true if it did not end well."""
  environment = dict(os.environ) | dict(
    JAX_PLATFORMS='cpu',
    PYTHONPATH=str(copy),
    PYTHONDONTWRITEBYTECODE='1',  # a stale .pyc would hide a mutant
    JAX_COMPILATION_CACHE_DIR=str(compiled),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
  )
  command = [sys.executable, '-m', 'experiments.field_criteria.measure']
  with subprocess.Popen(
    [*command, str(out)],
    cwd=copy,
    env=environment,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  ) as process:
    size, since = 0, time.monotonic()
    while process.poll() is None:
      time.sleep(0.1)
      if out.stat().st_size != size:  # it has come further
        size, since = out.stat().st_size, time.monotonic()
      if time.monotonic() - since > LIMIT:
        process.kill()
        return True
    return process.returncode != 0


def baseline(tree: pathlib.Path, compiled: pathlib.Path) -> Outcome:
  """The unmutated code, which must pass everything.

  Raises:
    ValueError: a criterion fails, so that failing would mean nothing.
  """
  found = one(UNMUTATED, tree, compiled)
  for name, seen in found.seen.items():
    if not seen['passed']:
      raise ValueError(f'{name} fails without a mutant: {seen["why"]}')
  return found


def _fits(mutant: Mutant, tree: pathlib.Path) -> bool:
  try:
    mutated(mutant, (tree / mutant.path).read_text())
  except ValueError:  # the code has moved on: tests/mutants_test.py says so
    return False
  return True


def _in_turn(running: list[str], left: list[Mutant], **folders) -> Outcome:
  """The next mutant; a second at a time only while the machine is idle."""
  while running and os.getloadavg()[0] > (os.cpu_count() or 1) + 0.3:
    time.sleep(1)
  mutant = left.pop(0)
  running.append(mutant.name)
  try:
    return one(mutant, **folders)
  finally:
    running.remove(mutant.name)


def run(mutants: list[Mutant], jobs: int, save, before) -> None:
  """Calls save(baseline, outcomes so far, lost=names) after every mutant."""
  with tempfile.TemporaryDirectory(prefix='field-criteria-') as folder:
    tree, compiled = (pathlib.Path(folder, x) for x in ('tree', 'compiled'))
    runner.copy(tree)
    shutil.copytree(HERE, tree / 'experiments' / HERE.name)
    lost = [m for m in mutants if not _fits(m, tree)]
    mutants = [m for m in mutants if m not in lost]
    save = functools.partial(save, lost=[m.name for m in lost])
    plain = baseline(tree, compiled)
    found = {x.name: x for x in before(plain)}
    save(plain, list(found.values()))
    left = [m for m in mutants if m.name not in found]
    runner.baseline(left, runner.Settings(tree, compiled, jobs=jobs))
    turn = functools.partial(_in_turn, [], left, tree=tree, compiled=compiled)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
      runs = [pool.submit(turn) for _ in range(len(left))]
      for done in concurrent.futures.as_completed(runs):
        new = done.result()
        found[new.name] = new
        order = [m.name for m in mutants if m.name in found]
        save(plain, [found[name] for name in order])
        passed = sum(x['passed'] for x in new.seen.values())
        line = f'{new.seconds:6.1f} s  {new.name}: {passed} pass'
        print(line, file=sys.stderr, flush=True)


def kept(file: pathlib.Path, plain: Outcome) -> list[Outcome]:
  """What an earlier run has found, if its unmutated code looked the same."""
  doc = json.loads(file.read_text()) if file.exists() else None
  if not doc or doc['unmutated']['seen'] != plain.seen:
    return []
  fields = Outcome._fields
  return [Outcome(*(x[field] for field in fields)) for x in doc['outcomes']]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--only', default='', help='names of mutants; or all')
  parser.add_argument('--jobs', type=int, default=2, help='at most, at a time')
  parser.add_argument('--resume', action='store_true', help='keep results')
  parser.add_argument('--results', default=str(HERE / 'results'))
  options = parser.parse_args()
  names = [name for name in options.only.split(',') if name]
  folder = pathlib.Path(options.results)
  folder.mkdir(parents=True, exist_ok=True)
  began = time.monotonic()

  def save(plain, outcomes, lost):
    seconds = time.monotonic() - began
    doc = render.document(plain, outcomes, seconds, lost)
    files.write(folder / 'field_criteria.json', json.dumps(doc, indent=1))
    files.write(folder / 'field_criteria.md', render.markdown(doc))

  def before(plain):
    file = folder / 'field_criteria.json'
    return kept(file, plain) if options.resume else []

  run(runner.chosen(core(), names), options.jobs, save, before)
  if not names and folder == HERE / 'results':
    doc = json.loads((folder / 'field_criteria.json').read_text())
    page.fill(HERE, '\n'.join(render.summary(doc)))
  print((folder / 'field_criteria.md').read_text())


if __name__ == '__main__':
  main()
