"""Runs pytest on the copy it is started in, and tells what it sees as it goes.

python -m tests.mutants.child LOG [arguments of pytest], in the copy's root. LOG
gets lines `start NODE`, `failed NODE` and `done STATUS`; without the last one
the process was ended from outside.
"""

import importlib.util
import pathlib
import sys

import pytest


class _Telling:
  """A pytest plugin that appends to the log."""

  def __init__(self, log: pathlib.Path):
    self.log = log

  def tell(self, line: str):
    with self.log.open('a') as f:
      f.write(line + '\n')

  def pytest_runtest_logstart(self, nodeid, location):
    self.tell(f'start {nodeid}')

  def pytest_runtest_logreport(self, report):
    if report.failed:
      self.tell(f'failed {report.nodeid}')

  pytest_collectreport = pytest_runtest_logreport


def main(log: str, *args: str) -> int:
  found = importlib.util.find_spec('specdec_jax')
  assert found and found.origin, 'no specdec_jax here'
  here = pathlib.Path.cwd().resolve()
  assert pathlib.Path(found.origin).resolve().is_relative_to(here), (
    f'{found.origin} would be tested, not the copy in {here}'
  )
  telling = _Telling(pathlib.Path(log))
  status = int(pytest.main(list(args), plugins=[telling]))
  telling.tell(f'done {status}')
  return status


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
