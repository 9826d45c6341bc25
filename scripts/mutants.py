"""Plants bugs in a copy of the tree and shows which quick test fails for each.

python scripts/mutants.py
python scripts/mutants.py --only='accept with <=,residual is p'
python scripts/mutants.py --output=tests/mutants/seen.json
"""

import functools
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import rich.console
import rich.table
import rich.text
from absl import flags

from specdec_jax import machine, printing, program
from specdec_jax.io import files
from tests.mutants import run as runner
from tests.mutants import seeded

_ONLY = flags.DEFINE_list('only', [], 'names of seeded bugs; all if empty')
_OUTPUT = flags.DEFINE_string(
  'output', '', 'JSON file: the test that sees each bug, machine and commit'
)
_JOBS = flags.DEFINE_integer('jobs', 2, 'bugs tried at a time', lower_bound=1)


def show(outcomes: list[runner.Outcome]) -> None:
  """Prints a row for each bug to stdout."""
  table = rich.table.Table('bug', 'what goes wrong', 'verdict', 'test', 's')
  for x in outcomes:
    test = x.test.removeprefix('tests/')
    cells = x.name, x.failure, x.verdict, test, f'{x.seconds:.1f}'
    table.add_row(*map(rich.text.Text, cells))
  console = rich.console.Console()
  if not console.is_terminal:
    console.width = 160
  console.print(table)


def told(
  planted: Sequence[seeded.Mutant], outcomes
) -> Iterator[runner.Outcome]:
  """The outcomes, each a line of stderr when it comes."""
  for i, x in enumerate(outcomes, 1):
    line = f'{i} of {len(planted)}: {x.name}: {x.verdict} {x.test}'
    print(line.rstrip(), file=sys.stderr)
    yield x


def run() -> bool:
  """True if every bug is killed."""
  began = time.monotonic()
  planted = runner.chosen(seeded.MUTANTS, _ONLY.value)
  print(f'{len(planted)} bugs; their tests without them first', file=sys.stderr)
  outcomes = runner.run(
    planted, functools.partial(told, planted), jobs=_JOBS.value
  )
  show(outcomes)
  alive = [x._asdict() for x in outcomes if x.verdict not in runner.KILLED]
  killed, seconds = len(planted) - len(alive), round(time.monotonic() - began)
  doc = dict(bugs=len(planted), killed=killed, seconds=seconds, alive=alive)
  if _OUTPUT.value:
    seen = {x.name: x.test for x in outcomes}
    made = dict(doc, seen=seen, machine=machine.describe())
    files.write(pathlib.Path(_OUTPUT.value), json.dumps(made, indent=1))
  printing.result(doc, f'{killed} of {len(planted)} bugs are killed')
  return not alive


if __name__ == '__main__':
  program.launch(run)
