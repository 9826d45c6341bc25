"""The seeded bugs fit the code, and the runner can tell life from death."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

from tests.mutants import mechanical, mutant, run, seeded

ACCEPT = next(m for m in seeded.MUTANTS if m.name == 'accept with <=')


@functools.cache
def functions(path: pathlib.Path) -> set[str]:
  return {
    node.name
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef)
  }


def test_there_are_enough_and_every_failure_is_met_or_explained():
  assert len(seeded.MUTANTS) >= 40
  assert len({m.name for m in seeded.MUTANTS}) == len(seeded.MUTANTS)
  met = {m.row for m in seeded.MUTANTS} - {0}  # 0: in no list
  assert met | set(seeded.ELSEWHERE) == set(range(1, 47))
  assert not met & set(seeded.ELSEWHERE)


@pytest.mark.parametrize('m', seeded.MUTANTS, ids=lambda m: m.name)
def test_mutants_fit_the_code(m):
  source = (run.ROOT / m.path).read_text()
  text = mutant.mutated(m, source)
  assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))
  assert m.tests and ',' not in m.name  # names are listed with commas
  for node in m.tests:
    path, name = node.split('::')
    assert name.split('[')[0] in functions(run.ROOT / path), node


def test_a_mutant_that_no_longer_fits_is_refused():
  with pytest.raises(ValueError, match='occurs 0 times in .*reject.py'):
    mutant.mutated(ACCEPT, 'nothing here')


def test_mechanical_mutants_are_a_repeatable_sample():
  path = 'specdec_jax/verify/reject.py'
  found = list(mechanical.candidates(path))
  assert any('<= p_BK' in m.name for m in found)
  for m in found:
    assert ast.dump(ast.parse(m.new)) != ast.dump(ast.parse(m.old))


def test_the_runner_tells_killed_from_survived_and_unrunnable():
  """End to end, on the cheapest test there is."""
  node = 'tests/requests_test.py::test_buckets'
  by = dict(
    killed=('return _STEPS[', 'return -_STEPS['),
    SURVIVED=('that holds `length` tokens', 'that holds them'),
    unrunnable=('import bisect', 'import no_such_module'),
  )
  mutants = [
    mutant.Mutant(name, 0, '', 'specdec_jax/requests.py', old, new, (node,))
    for name, (old, new) in by.items()
  ]
  outcomes = run.run(mutants, wider=())
  assert [x.verdict for x in outcomes] == list(by)
  assert outcomes[0].test.startswith(node)


def test_a_tree_that_fails_by_itself_is_refused():
  node = 'tests/requests_test.py::no_such_test'
  with pytest.raises(ValueError, match='without a mutant'):
    run.run([ACCEPT._replace(tests=(node,))])


def test_the_program_refuses_unknown_names():
  done = subprocess.run(
    [sys.executable, 'scripts/mutants.py', '--only=accept with <'],
    cwd=run.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2 and not done.stdout
  assert "mutant 'accept with <': no seeded bug" in done.stderr
  assert "near are ['accept with <='" in done.stderr
  assert len(done.stderr.splitlines()) == 1
