"""Plants bugs in copies of the tree and asks which quick test sees each.

Every bug gets a fresh copy, so nothing of one run is left for the next. They
are copies of one copy: the tree may be edited meanwhile. All share a folder of
compiled programs: what a bug does not change is not compiled again.
"""

import ast
import concurrent.futures
import difflib
import functools
import os
import pathlib
import re
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
_PARTS = (
  *('specdec_jax', 'tests', 'configs', 'scripts', 'experiments'),
  'pyproject.toml',
)


class Outcome(NamedTuple):
  """One mutant's end.

  verdict: killed, hung (past the time limit), crashed (the process died),
    SURVIVED, or unrunnable (no test could start: not a fair mutant).
  test: the one that failed.
  """

  name: str
  failure: str
  verdict: str
  test: str
  seconds: float


KILLED = ('killed', 'hung', 'crashed')


class Settings(NamedTuple):
  """How tests are run.

  tree, compiled: folders of the unmutated files and of compiled programs.
  jobs: mutants at a time.
  limit: seconds that a test may take before it counts as hanging.
  """

  tree: pathlib.Path
  compiled: pathlib.Path
  jobs: int = 2
  limit: float = 180.0


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


def choose(mutant: Mutant) -> tuple[str, ...]:
  """The test files for a mutant that names no test, the likeliest first.

  The one that mirrors its file, then four of those that import it, or else
  what imports it; those of its folder first, then shorter ones.
  """
  dotted = mutant.path.removesuffix('.py').replace('/', '.')
  first = {dotted} | {x for x, of in _imports('specdec_jax') if dotted in of}
  own, near, far = [], [], []
  for name, of in _imports('tests'):
    leaf = name.rpartition('.')[2].removesuffix('_test')
    if not name.endswith('_test'):
      continue
    if leaf in dotted.split('.')[-2:]:  # its module's, or its folder's
      own.append(name)
    elif dotted in of:
      near.append(name)
    elif first & of:
      far.append(name)
  path = lambda name: name.replace('.', '/') + '.py'
  folder = 'tests' + dotted.removeprefix('specdec_jax').rpartition('.')[0]
  order = lambda name: (
    name.rpartition('.')[0] != folder,
    (ROOT / path(name)).stat().st_size,
  )
  others = [*sorted(near, key=order), *sorted(far, key=order)]
  return tuple(path(name) for name in [*own, *others[:4]])


@functools.cache
def _imports(folder: str) -> list[tuple[str, frozenset[str]]]:
  """(module, the modules that it imports) of all files of a folder, dotted."""
  out = []
  for path in sorted((ROOT / folder).rglob('*.py')):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom):
        found |= {f'{node.module}.{x.name}' for x in node.names}
      elif isinstance(node, ast.Import):
        found |= {x.name for x in node.names}
    name = '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    out.append((name, frozenset(found)))
  return out


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
  """Each mutant's outcome, as they come in."""
  pool = concurrent.futures.ThreadPoolExecutor(settings.jobs)
  try:
    jobs = [pool.submit(outcome, x, settings) for x in mutants]
    for job in concurrent.futures.as_completed(jobs):
      yield job.result()
  finally:
    pool.shutdown(cancel_futures=True)


def outcome(mutant: Mutant, settings: Settings) -> Outcome:
  """Runs the tests that the mutant names, else those chosen, until one fails.

  A chosen test that fails without the mutant too says nothing: unrunnable.
  """
  began = time.monotonic()
  seen = _run(mutant, mutant.tests or choose(mutant), settings)
  if not mutant.tests and seen.test and seen.verdict == 'killed':
    if _run(None, (seen.test,), settings).verdict != 'SURVIVED':
      seen = seen._replace(verdict='unrunnable')
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
    status, output = _pytest(tree, tests, settings)
  return _judge(status, output)


def copy(tree: pathlib.Path) -> None:
  ignore = shutil.ignore_patterns('__pycache__', '.*')
  for part in _PARTS:
    source = ROOT / part
    if source.is_dir():
      shutil.copytree(source, tree / part, ignore=ignore)
    else:
      shutil.copy(source, tree / part)


def _pytest(tree, tests, settings: Settings) -> tuple[int, str]:
  """(status, output) of the tests in the copy, up to the first failure."""
  environment = dict(os.environ)
  environment |= dict(
    JAX_PLATFORMS='cpu',
    PYTHONDONTWRITEBYTECODE='1',  # a stale .pyc would hide a mutant
    JAX_COMPILATION_CACHE_DIR=str(settings.compiled),
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
  )
  environment['PYTHONPATH'] = str(tree)  # for programs that tests start, too
  command = [sys.executable, '-m', 'pytest', '-x', '-q', '-rfE', '--tb=short']
  command += ['-m', 'not slow', '-p', 'no:cacheprovider']
  # By a thread: a signal waits for compiled loops, which may be endless.
  command += [f'--timeout={settings.limit}', '--timeout-method=thread', *tests]
  try:
    done = subprocess.run(
      command,
      cwd=tree,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=20 * settings.limit,  # of all tests, and for a hanging import
    )
  except subprocess.TimeoutExpired:
    return 1, ''
  return done.returncode, done.stdout


def _judge(status: int, output: str) -> _Seen:
  """From pytest's status: 0 is passed, 1 failed, 2 and more not run."""
  failed = re.findall(r'^(?:FAILED|ERROR) (.+?)(?: - .*)?$', output, re.M)
  verdict = {0: 'SURVIVED', 1: 'killed'}.get(status, 'unrunnable')
  if status < 0:
    verdict = 'crashed'
  elif status == 1 and not failed:
    verdict = 'hung'  # pytest-timeout ends the process with this status too
  return _Seen(verdict, failed[0] if failed else '', output[-4000:])


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
    for folder in ('tests', 'specdec_jax'):
      _imports(folder)  # here: the parser fails in threads
    settings = Settings(tree, compiled, **changes)
    baseline(mutants, settings)
    outcomes = {x.name: x for x in track(all_of(mutants, settings))}
  return [outcomes[mutant.name] for mutant in mutants]
