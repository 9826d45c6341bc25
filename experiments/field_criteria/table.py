"""Plants every seeded bug of the core and lists the criteria that still pass.

python -m experiments.field_criteria.table [--only=NAME,NAME] [--jobs=N]
  [--workdir=DIR]: writes field_criteria.json and .md there. A run of all bugs
  fills results/field_criteria.md and the README too.
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
from experiments.field_criteria import measure
from specdec_jax import machine
from specdec_jax.io import files
from tests.mutants import run as runner
from tests.mutants import seeded
from tests.mutants.seeded import Mutant, mutated

HERE = pathlib.Path(__file__).parent
# Bugs of files, the API, batching, meshes or evaluation are left out: these
# criteria do not cover them.
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
# Kinds of bugs by their number in the project's list of failure modes.
KINDS = {
  'distribution': (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 45),
  'noise': (24, 25, 26, 27, 46),
  'cache': (1, 2, 3, 17, 19, 22, 30, 42),
  'ends, rows, counts': (15, 16, 18, 28, 33, 35, 41, 43, 44),
}
LOOKS = {
  **dict.fromkeys(measure.WINDOW, 'tokens of one window'),
  **dict.fromkeys(measure.GREEDY, 'greedy text'),
  measure.OURS: 'the tests that the bug names',
}


class Outcome(NamedTuple):
  """One mutant. seen: criterion -> the line of measure.py."""

  name: str
  path: str
  row: int
  seen: dict[str, Any]
  seconds: float

  def kind(self) -> str:
    of = (name for name, rows in KINDS.items() if self.row in rows)
    return next(of, 'other')

  def missed(self, name: str) -> bool:
    return self.seen[name]['passed']


def core() -> list[Mutant]:
  return [m for m in seeded.MUTANTS if m.path.startswith(CORE)]


# --- running ------------------------------------------------------------------


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
    _measure(copy, out, compiled)
    lines = map(json.loads, out.read_text().splitlines())
    seen = {x.pop('criterion'): x for x in lines}
  # A criterion without a line when the process hung or died counts as failed.
  for name in measure.THEIRS:
    seen.setdefault(name, dict(passed=False, digest='hung', why='hung'))
  seen[measure.OURS] = dict(passed=True, digest='', why='')
  if mutant.tests:
    settings = runner.Settings(tree, compiled, limit=LIMIT)
    tested = runner.outcome(mutant, settings)
    killed = tested.verdict in runner.KILLED
    seen[measure.OURS] = dict(passed=not killed, digest='', why=tested.test)
  seconds = round(time.monotonic() - began, 1)
  return Outcome(mutant.name, mutant.path, mutant.row, seen, seconds)


def _measure(copy, out, compiled) -> None:
  """Runs measure.py in the copy, until it ends or makes no progress."""
  environment = dict(os.environ) | dict(
    JAX_PLATFORMS='cpu',
    PYTHONPATH=str(copy),
    PYTHONDONTWRITEBYTECODE='1',  # a stale .pyc would hide a mutant
    JAX_COMPILATION_CACHE_DIR=str(compiled),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
  )
  command = [sys.executable, '-m', 'experiments.field_criteria.measure']
  quiet = subprocess.DEVNULL
  with subprocess.Popen(
    [*command, str(out)],
    cwd=copy,
    env=environment,
    stdin=quiet,
    stdout=quiet,
    stderr=quiet,
  ) as process:
    size, since = 0, time.monotonic()
    while process.poll() is None:
      time.sleep(0.1)
      if out.stat().st_size != size:  # progress
        size, since = out.stat().st_size, time.monotonic()
      if time.monotonic() - since > LIMIT:
        process.kill()


def run(mutants: list[Mutant], jobs: int, save) -> None:
  """Calls save(outcome of the unmutated code, outcomes so far) after each one.

  Raises:
    ValueError: the unmutated code fails a criterion or a test.
  """
  with tempfile.TemporaryDirectory(prefix='field-criteria-') as folder:
    tree, compiled = (pathlib.Path(folder, x) for x in ('tree', 'compiled'))
    runner.copy(tree)
    shutil.copytree(HERE, tree / 'experiments' / HERE.name)
    measured = functools.partial(one, tree=tree, compiled=compiled)
    plain, found = measured(UNMUTATED), {}
    for name, seen in plain.seen.items():
      if not seen['passed']:
        raise ValueError(f'{name} fails without a mutant: {seen["why"]}')
    runner.baseline(mutants, runner.Settings(tree, compiled, jobs=jobs))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
      runs = [pool.submit(measured, mutant) for mutant in mutants]
      for done in concurrent.futures.as_completed(runs):
        new = done.result()
        found[new.name] = new
        save(plain, [found[m.name] for m in mutants if m.name in found])
        passed = sum(x['passed'] for x in new.seen.values())
        line = f'{new.seconds:6.1f} s  {new.name}: {passed} pass'
        print(line, file=sys.stderr, flush=True)


# --- tables -------------------------------------------------------------------


def reached(name: str, outcome: Outcome, plain: Outcome) -> bool:
  """Whether the bug changes the samples that the criterion reads."""
  if name == measure.OURS:
    return True
  return outcome.seen[name]['digest'] != plain.seen[name]['digest']


def row(name: str, plain: Outcome, outcomes: list[Outcome]) -> list[str]:
  """A criterion's row of the summary: bugs missed, in all and by kind."""
  missed = [x for x in outcomes if x.missed(name)]
  inside = [x for x in outcomes if reached(name, x, plain)]
  kinds = [
    f'{sum(x.kind() == kind for x in missed)} of '
    f'{sum(x.kind() == kind for x in outcomes)}'
    for kind in KINDS
  ]
  seen = f'{sum(x.missed(name) for x in inside)} of {len(inside)}'
  all_of_them = f'{len(missed)} of {len(outcomes)}'
  return [name, LOOKS[name], all_of_them, seen, *kinds]


def summary(
  plain: Outcome, outcomes: list[Outcome], m: dict[str, Any], seconds: float
) -> list[str]:
  """The setting of the run and a table with a row for each criterion."""
  head = ('criterion', 'looks at', 'missed', 'missed of those it can see')
  rows = [row(name, plain, outcomes) for name in measure.EVERY]
  return [
    f'{page.made_on(m)[:-1]}, Python {m["python"]}; {seconds:.0f} s for '
    f'{len(outcomes)} bugs of {len(seeded.MUTANTS)} seeded. The unmutated code '
    'passes all.',
    '',
    *page.table((*head, *KINDS), rows),
  ]


def each(plain: Outcome, outcomes: list[Outcome]) -> list[str]:
  """A table of every bug under every criterion."""

  def sign(x: Outcome, name: str) -> str:
    if not x.missed(name):
      return 'x'
    return '**missed**' if reached(name, x, plain) else '-'

  head, rows = ('bug', 'file', *measure.EVERY, 'the test that fails'), []
  for x in outcomes:
    signs = [sign(x, name) for name in measure.EVERY]
    test = x.seen[measure.OURS]['why'].removeprefix('tests/')
    rows.append((x.name, pathlib.Path(x.path).name, *signs, test))
  return page.table(head, rows)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--only', default='', help='names of mutants; or all')
  parser.add_argument('--jobs', type=int, default=2, help='at a time')
  parser.add_argument('--workdir', default='workdir/field_criteria')
  options = parser.parse_args()
  names = [name for name in options.only.split(',') if name]
  folder = pathlib.Path(options.workdir)
  folder.mkdir(parents=True, exist_ok=True)
  # Read before writing the results, which would make the commit dirty.
  began, made = time.monotonic(), machine.describe()
  lines = []

  def save(plain, outcomes):
    lines[:] = summary(plain, outcomes, made, time.monotonic() - began)
    text = '\n'.join([*lines, '', *each(plain, outcomes)])
    doc = [x._asdict() for x in (plain, *outcomes)]
    files.write(folder / 'field_criteria.json', json.dumps(doc, indent=1))
    files.write(folder / 'field_criteria.md', text)

  run(runner.chosen(core(), names), options.jobs, save)
  text = (folder / 'field_criteria.md').read_text()
  if not names:
    files.write(HERE / 'results/field_criteria.md', text)
    page.fill(HERE, '\n'.join(lines))
  print(text)


if __name__ == '__main__':
  main()
