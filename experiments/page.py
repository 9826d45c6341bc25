"""Markdown of the experiments: tables, and the filled part of a README."""

from collections.abc import Iterable, Sequence

MARKS = '<!-- filled by run.sh -->', '<!-- end -->'


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
  """The lines of a table."""
  every = [head, ['---'] * len(head), *rows]
  return ['| ' + ' | '.join(map(str, row)) + ' |' for row in every]


def filled(page: str, lines: Sequence[str]) -> str:
  """The page with these lines between its marks.

  Raises:
    ValueError: a page without the two marks.
  """
  if any(page.count(mark) != 1 for mark in MARKS):
    raise ValueError(f'a README needs each of {MARKS[0]} and {MARKS[1]} once')
  first, rest = page.split(MARKS[0])
  last = rest.split(MARKS[1])[1]
  return first + '\n'.join([MARKS[0], '', *lines, '', MARKS[1]]) + last
