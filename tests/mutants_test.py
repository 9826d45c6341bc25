"""The seeded bugs fit the code, and the runner can tell life from death."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

from tests.mutants import mechanical, mutant, run, seeded, table

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


@pytest.mark.more
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


def test_what_hung_is_tried_again_alone(tmp_path, monkeypatch):
  a, b, c = seeded.MUTANTS[:3]
  settings = run.Settings(tmp_path, tmp_path, limit=5.0)
  asked = []

  def outcome(mutant, settings):
    asked.append((mutant.name, settings.limit))
    first = {a.name: 'hung', b.name: 'killed', c.name: 'crashed'}
    verdict = first[mutant.name] if settings.limit == 5 else 'SURVIVED'
    return run.Outcome(mutant.name, '', verdict, '', 0.0)

  monkeypatch.setattr(run, 'outcome', outcome)
  found = {x.name: x.verdict for x in run.all_of((a, b, c), settings)}
  assert found == {a.name: 'SURVIVED', b.name: 'killed', c.name: 'SURVIVED'}
  assert sorted(asked[3:]) == sorted([(a.name, 10.0), (c.name, 10.0)])


@pytest.mark.parametrize(
  ('log', 'hung', 'verdict'),
  [
    ('start x\nfailed t.py::x', False, 'killed'),
    ('failed t.py', False, 'unrunnable'),
    ('start t.py::x', True, 'hung'),
    ('start t.py::x', False, 'crashed'),
    ('', False, 'unrunnable'),
    ('start t.py::x\ndone 0', False, 'SURVIVED'),
    ('start t.py::x\ndone 3', False, 'unrunnable'),
  ],
)
def test_what_a_log_says(log, hung, verdict):
  assert run._judge(log, '', hung).verdict == verdict


def test_the_summary_is_good_from_95_of_100_on():
  made = lambda verdict, n: [run.Outcome('m', '', verdict, '', 0.0)] * n
  good = lambda *args: table.summary(*args)['good']
  assert good(made('killed', 3), made('killed', 95) + made('SURVIVED', 5))
  assert not good(made('killed', 3), made('killed', 94) + made('SURVIVED', 6))
  assert not good(made('killed', 2) + made('SURVIVED', 1), [])
  assert not good(made('killed', 2) + made('unrunnable', 1), [])
  # What changes nothing is left out of both counts.
  doc = table.summary(
    [], made('killed', 19) + made('SURVIVED', 1) + made('equivalent', 9)
  )
  assert doc['good'] and doc['mechanical'] == 20
  assert doc['mechanical_equivalent'] == 9 and len(doc['survivors']) == 1


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


def test_a_newcomers_suite_sees_every_bug():
  """No test that kills a seeded bug is left to --all or --slow."""
  killers = sorted({x for m in seeded.MUTANTS for x in m.tests})
  done = subprocess.run(
    [sys.executable, '-m', 'pytest', '-q', '--co', '-m', 'more or slow']
    + killers,
    cwd=run.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 5, done.stdout  # no tests collected
