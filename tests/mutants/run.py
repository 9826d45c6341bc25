"""Plants bugs in copies of the tree and asks which quick test sees each.

Every bug gets a fresh copy, so nothing of one run is left for the next. They
are copies of one copy: the tree may be edited meanwhile. All share a folder of
compiled programs: what a bug does not change is not compiled again.
"""

import concurrent.futures
import difflib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tests.mutants.seeded import Mutant, mutated

ROOT = pathlib.Path(__file__).parents[2]
# What the tests named by mutants read.
_PARTS = ('specdec_jax', 'tests', 'configs', 'scripts', 'pyproject.toml')


class Outcome(NamedTuple):
  """verdict: killed, hung (past the time limit), crashed (the process died),
  SURVIVED, or unrunnable (no test could start: not a fair mutant). test: the
  one that failed or was running."""

  name: str
  failure: str
  verdict: str
  test: str
  seconds: float


DOUBTFUL = ('hung', 'crashed')
KILLED = ('killed', *DOUBTFUL)


class Settings(NamedTuple):
  """jobs: mutants at a time. limit: seconds that a test may take before it
  counts as hanging. tree, compiled: folders of the unmutated files and of
  compiled programs."""

  tree: pathlib.Path
  compiled: pathlib.Path
  jobs: int = 2
  limit: float = 90.0


def chosen(
  mutants: Sequence[Mutant], names: Sequence[str] | None
) -> list[Mutant]:
  """The mutants of these names, all if None.

  Raises:
    ValueError: a name that no mutant has.
  """
  table = {mutant.name: mutant for mutant in mutants}
  for name in names or ():
    if name not in table:
      near = difflib.get_close_matches(name, table, 3, 0.0)
      raise ValueError(
        f'mutant {name!r}: no seeded bug has this name; near are {near}'
      )
  return [table[name] for name in names or table]


def baseline(mutants: Sequence[Mutant], settings: Settings) -> None:
  """Runs every named test on the tree as it is.

  Raises:
    ValueError: one of them fails, so that killing would mean nothing.
  """
  tests = sorted({test for mutant in mutants for test in mutant.tests})
  file_of = lambda test: test.split('::')[0]
  # A file's tests share fixtures: keep them together.
  files = sorted(set(map(file_of, tests)))
  groups = [
    [test for test in tests if file_of(test) in files[i :: settings.jobs]]
    for i in range(min(settings.jobs, len(files)))
  ]
  with concurrent.futures.ThreadPoolExecutor(settings.jobs) as pool:
    for seen in pool.map(lambda group: _run(None, group, settings), groups):
      if seen.verdict != 'SURVIVED':
        raise ValueError(
          f'{seen.test or "the tests"} {seen.verdict} without a mutant: '
          f'mend the tree first\n{seen.output}'
        )


def all_of(mutants: Sequence[Mutant], settings: Settings) -> Iterator[Outcome]:
  """Each mutant's outcome, as they come in.

  What hung or crashed may have done so because the machine was busy: it is
  tried once more in the end, alone and with twice the time.
  """
  again = []
  pool = concurrent.futures.ThreadPoolExecutor(settings.jobs)
  try:
    jobs = {pool.submit(outcome, x, settings): x for x in mutants}
    for job in concurrent.futures.as_completed(jobs):
      if job.result().verdict in DOUBTFUL:
        again.append(jobs[job])
      else:
        yield job.result()
    for mutant in again:
      yield outcome(mutant, settings._replace(limit=2 * settings.limit))
  finally:
    pool.shutdown(cancel_futures=True)


def outcome(mutant: Mutant, settings: Settings) -> Outcome:
  """Runs the tests that the mutant names, until one fails."""
  began = time.monotonic()
  seen = _run(mutant, mutant.tests, settings)
  seconds = round(time.monotonic() - began, 1)
  return Outcome(mutant.name, mutant.failure, seen.verdict, seen.test, seconds)


class _Seen(NamedTuple):
  verdict: str
  test: str
  output: str


def _run(mutant: Mutant | None, tests, settings: Settings) -> _Seen:
  with tempfile.TemporaryDirectory(prefix='mutant-') as folder:
    tree = pathlib.Path(folder, 'tree')
    shutil.copytree(settings.tree, tree)
    if mutant is not None:
      path = tree / mutant.path
      path.write_text(mutated(mutant, path.read_text()))
    log, output = pathlib.Path(folder, 'log'), pathlib.Path(folder, 'output')
    log.touch()
    with output.open('w') as f:
      hung = _pytest(tree, log, tests, settings, f)
    return _judge(log.read_text(), output.read_text()[-4000:], hung)


def copy(tree: pathlib.Path) -> None:
  ignore = shutil.ignore_patterns('__pycache__', '.*')
  for part in _PARTS:
    source = ROOT / part
    if source.is_dir():
      shutil.copytree(source, tree / part, ignore=ignore)
    else:
      shutil.copy(source, tree / part)


def _pytest(tree, log, tests, settings: Settings, output) -> bool:
  """Runs the tests in the copy; true if they had to be ended."""
  environment = dict(os.environ)
  environment |= dict(
    JAX_PLATFORMS='cpu',
    PYTHONDONTWRITEBYTECODE='1',  # a stale .pyc would hide a mutant
    JAX_COMPILATION_CACHE_DIR=str(settings.compiled),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
  )
  environment.pop('PYTHONPATH', None)
  command = [sys.executable, '-m', 'tests.mutants.child', str(log), '-x', '-q']
  command += ['-m', 'not slow', '-p', 'no:cacheprovider', '--tb=short']
  command += ['--timeout=0', *tests]
  with subprocess.Popen(
    command,
    cwd=tree,
    env=environment,
    stdin=subprocess.DEVNULL,
    stdout=output,
    stderr=output,
  ) as process:
    size, since = 0, time.monotonic()
    while process.poll() is None:
      time.sleep(0.1)
      if log.stat().st_size != size:  # a test has begun, or failed
        size, since = log.stat().st_size, time.monotonic()
      if time.monotonic() - since > settings.limit:
        process.kill()
        return True
  return False


def _judge(log: str, output: str, hung: bool) -> _Seen:
  lines = [line.split(' ', 1) for line in log.splitlines()]
  of = lambda word: [rest for first, rest in lines if first == word]
  failed, started, done = of('failed'), of('start'), of('done')
  if failed:
    loads = '::' in failed[0]
    return _Seen('killed' if loads else 'unrunnable', failed[0], output)
  running = started[-1] if started else ''
  if hung:
    return _Seen('hung', running, output)
  if done == ['0']:
    return _Seen('SURVIVED', '', output)
  return _Seen('crashed' if running and not done else 'unrunnable', '', output)


def run(
  mutants: Sequence[Mutant],
  track: Callable = lambda outcomes: outcomes,
  **changes,
) -> list[Outcome]:
  """Baseline, then every mutant; outcomes in the order given.

  track(iterator of outcomes) -> the same, for a progress bar; changes are
  fields of Settings.
  """
  with tempfile.TemporaryDirectory(prefix='mutants-') as folder:
    tree, compiled = (pathlib.Path(folder, x) for x in ('tree', 'compiled'))
    copy(tree)
    for mutant in mutants:  # say so before hours of work, not after
      mutated(mutant, (tree / mutant.path).read_text())
    settings = Settings(tree, compiled, **changes)
    baseline(mutants, settings)
    outcomes = {x.name: x for x in track(all_of(mutants, settings))}
  return [outcomes[mutant.name] for mutant in mutants]
