"""The seeded bugs, and the failures that cannot be seeded here.

bugs/*.txt hold them, each as a small patch under the file that it is for:

  @ specdec_jax/verify/reject.py

  [8] accept with <=: a token of probability 0 passes at u = 0
  - ok_BK = noise.accept_BK * q_BK < p_BK
  + ok_BK = noise.accept_BK * q_BK <= p_BK
  > tests/verify/window_test.py::test_u_zero_rejects_what_the_target_excludes

[8] is the failure's row in the project's list of failure modes, 0 if it is not
there. The text after - occurs in the file once; > are tests that should fail. A
bug that names none is tried with those that scripts/mutants.py chooses.
"""

import pathlib
import re
from typing import NamedTuple


class Mutant(NamedTuple):
  """One bug.

  failure: what would go wrong, in words. row: its number in the list of failure
  modes, or 0. path: the file, from the root of the repository. old, new: text;
  old occurs in the file once. tests: node ids that should fail, cheapest first.
  """

  name: str
  row: int
  failure: str
  path: str
  old: str
  new: str
  tests: tuple[str, ...]


def mutated(mutant: Mutant, source: str) -> str:
  """The file's text with the bug in it.

  Raises:
    ValueError: the text to replace is not there exactly once.
  """
  found = source.count(mutant.old)
  if found != 1 or mutant.old == mutant.new:
    raise ValueError(
      f'mutant {mutant.name!r}: the text to replace occurs {found} times in '
      f'{mutant.path}; it must be there once: adapt the mutant to the code'
    )
  return source.replace(mutant.old, mutant.new)


def read(text: str) -> list[Mutant]:
  """The bugs of one file of bugs/."""
  out, path = [], ''
  for block in text.strip().split('\n\n'):
    lines = block.split('\n')
    if lines[0].startswith('@ '):
      path = lines[0][2:]
    if not lines[0].startswith('['):
      continue
    row, name, failure = re.fullmatch(
      r'\[(\d+)\] (.*?): (.*)', lines[0]
    ).groups()
    of = lambda mark, lines=lines: [x[2:] for x in lines[1:] if x[0] == mark]
    old, new = ('\n'.join(of(mark)) for mark in '-+')
    out.append(Mutant(name, int(row), failure, path, old, new, tuple(of('>'))))
  return out


FOLDER = pathlib.Path(__file__).parent / 'bugs'
MUTANTS = [m for p in sorted(FOLDER.glob('*.txt')) for m in read(p.read_text())]

# Row of the list of failure modes: (failure, why nothing can be seeded).
ELSEWHERE = {
  14: (
    'a wide and a narrow matrix product round differently at near-ties',
    'no bug but arithmetic: every first difference is audited',
  ),
  21: ('a recurrent state cannot be rewound', 'there is none'),
  32: ('dropout or dropped experts in verification', 'there are none'),
  34: (
    'int32 products of rows and vocabulary',
    'no index is a product: every gather is along one axis',
  ),
  37: ('one of several drafts judged as a sample', 'one draft a window'),
  38: (
    'penalties that do not advance inside a window',
    'settings with a history are refused by name',
  ),
  39: (
    'verification and baseline read different weights',
    'both are handed the same array of parameters',
  ),
  40: ('an overlapped step uses an old outcome', 'steps do not overlap'),
}
