"""The seeded bugs fit the code, and the runner can tell life from death."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

from tests.mutants import run, seeded

ACCEPT = next(m for m in seeded.MUTANTS if m.name == 'accept with <=')


@functools.cache
def functions(path: pathlib.Path) -> set[str]:
  return {
    node.name
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef)
  }


@functools.cache
def parsed(source: str) -> str:
  return ast.dump(ast.parse(source))


def test_there_are_enough_and_every_failure_is_met_or_explained():
  assert len({m.name for m in seeded.MUTANTS}) == len(seeded.MUTANTS) >= 140
  met = {m.row for m in seeded.MUTANTS} - {0}  # 0: in no list
  assert met | set(seeded.ELSEWHERE) == set(range(1, 47))
  assert not met & set(seeded.ELSEWHERE)


@pytest.mark.parametrize('m', seeded.MUTANTS, ids=lambda m: m.name)
def test_mutants_fit_the_code(m):
  source = (run.ROOT / m.path).read_text()
  text = seeded.mutated(m, source)
  if m.path.endswith('.py'):
    assert ast.dump(ast.parse(text)) != parsed(source)
  else:  # C, where neither spaces nor what a line's // says count
    bare = lambda x: [y.partition('//')[0].split() for y in x.splitlines()]
    assert bare(text) != bare(source)
  assert m.tests and ',' not in m.name  # names are listed with commas
  for node in m.tests:
    path, name = node.split('::')
    assert name.split('[')[0] in functions(run.ROOT / path), node


def test_a_mutant_that_no_longer_fits_is_refused():
  with pytest.raises(ValueError, match='occurs 0 times in .*reject.py'):
    seeded.mutated(ACCEPT, 'nothing here')


@pytest.mark.slow
def test_the_runner_tells_killed_from_survived_and_unrunnable():
  """End to end, on the cheapest test there is."""
  node = 'tests/requests_test.py::test_buckets'
  by = dict(
    killed=('return _STEPS[', 'return -_STEPS['),
    SURVIVED=('that holds `length` tokens', 'that holds them'),
    unrunnable=('import bisect', 'import no_such_module'),
  )
  mutants = [
    seeded.Mutant(name, 0, '', 'specdec_jax/requests.py', old, new, (node,))
    for name, (old, new) in by.items()
  ]
  outcomes = run.run(mutants)
  assert [x.verdict for x in outcomes] == list(by)
  assert outcomes[0].test.startswith(node)


@pytest.mark.parametrize(
  ('status', 'output', 'verdict', 'test'),
  [
    (1, '1 failed\nFAILED t.py::x[a b] - assert 0', 'killed', 't.py::x[a b]'),
    (1, '+++ Timeout +++', 'hung', ''),
    (-11, 'Segmentation fault', 'crashed', ''),
    (2, 'ERROR t.py - ImportError', 'unrunnable', 't.py'),
    (0, '1 passed', 'SURVIVED', ''),
  ],
)
def test_what_pytest_says(status, output, verdict, test):
  assert run._judge(status, output)[:2] == (verdict, test)


@pytest.mark.slow
def test_a_tree_that_fails_by_itself_is_refused():
  node = 'tests/requests_test.py::no_such_test'
  with pytest.raises(ValueError, match='without a mutant'):
    run.run([ACCEPT._replace(tests=(node,))])


def test_a_bug_without_tests_is_tried_with_those_of_its_file():
  of = lambda path: run.choose(seeded.Mutant('bug', 0, '', path, '', '', ()))
  mirror, *others = of('specdec_jax/pool.py')
  assert mirror == 'tests/pool_test.py'
  assert 'tests/bench/steady_test.py' in others and len(others) == 4
  assert of('specdec_jax/serve/page.html') == ('tests/page_test.py',)
  # What certificate_test imports imports it.
  mirror, *others = of('specdec_jax/certify/steps.py')
  assert mirror == 'tests/certify/steps_test.py'
  assert 'tests/certify/certificate_test.py' in others


def test_unknown_names_are_refused():
  message = r"'accept with <': no seeded bug .* near are \['accept with <='"
  with pytest.raises(ValueError, match=message):
    run.chosen(seeded.MUTANTS, ['accept with <'])


@pytest.mark.more
def test_all_tests_see_every_bug():
  """No test that kills a seeded bug is left to --slow."""
  killers = sorted({x for m in seeded.MUTANTS for x in m.tests})
  command = [sys.executable, '-m', 'pytest', '-q', '--co', '-m', 'slow']
  done = subprocess.run(
    command + killers, cwd=run.ROOT, capture_output=True, text=True
  )
  assert done.returncode == 5, done.stdout  # no tests collected
