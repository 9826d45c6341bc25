"""A seeded bug: one exact replacement in one file, and who should see it."""

from typing import NamedTuple


class Mutant(NamedTuple):
  """One bug.

  failure: what would go wrong, in words. row: its number in the project's list
  of failure modes, 0 if it has none there. path: the file, from the root of the
  repository. old, new: text; old occurs in the file once. tests: node ids that
  should fail, cheapest first. equivalent: why none can, if none can.
  """

  name: str
  row: int
  failure: str
  path: str
  old: str
  new: str
  tests: tuple[str, ...]
  equivalent: str = ''


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
