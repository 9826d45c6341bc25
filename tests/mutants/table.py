"""Which test killed what: on the screen, as markdown, as JSON."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table
import rich.text

from tests.mutants.run import EQUIVALENT, KILLED, Outcome

# Of the mechanical mutants; the seeded ones must all be killed.
SHARE = 0.95

_COLUMNS = ('mutant', 'what goes wrong', 'killed by', 'seconds')


def _by(outcome: Outcome) -> str:
  """'test_a_draw', 'test_a_draw (hung)', 'SURVIVED'."""
  if outcome.verdict not in KILLED:
    return f'{outcome.verdict} {outcome.test}'.strip()
  test = outcome.test.removeprefix('tests/')
  return test if outcome.verdict == 'killed' else f'{test} ({outcome.verdict})'


def show(title: str, outcomes: Sequence[Outcome]) -> None:
  """Prints the table to stdout."""
  table = rich.table.Table(*_COLUMNS, title=title, title_justify='left')
  for x in outcomes:
    cells = (x.name, x.failure, _by(x), f'{x.seconds:.1f}')
    table.add_row(*map(rich.text.Text, cells))
  console = rich.console.Console()
  if not console.is_terminal:
    console.width = 160
  console.print(table)


def save(folder: pathlib.Path, titled, doc: dict[str, Any]) -> None:
  """mutants.md and mutants.json; titled: (title, outcomes) pairs."""
  text = '\n'.join(markdown(title, part) for title, part in titled)
  (folder / 'mutants.md').write_text(text)
  every = [x._asdict() for _, part in titled for x in part]
  (folder / 'mutants.json').write_text(
    json.dumps(doc | dict(outcomes=every), indent=2) + '\n'
  )


def markdown(title: str, outcomes: Sequence[Outcome]) -> str:
  clean = lambda text: text.replace('|', '\\|').replace('\n', ' ')
  rows = [_COLUMNS, ('---',) * len(_COLUMNS)]
  rows += [(x.name, x.failure, _by(x), f'{x.seconds:.1f}') for x in outcomes]
  lines = ['| ' + ' | '.join(map(clean, row)) + ' |' for row in rows]
  return '\n'.join([f'## {title}', '', *lines, ''])


def summary(
  seeded: Sequence[Outcome], mechanical: Sequence[Outcome]
) -> dict[str, Any]:
  """Counts and survivors; good: whether the promise is kept."""
  killed = lambda outcomes: sum(x.verdict in KILLED for x in outcomes)
  # What changes nothing cannot be killed: it is explained, and left out.
  same = [x for x in mechanical if x.verdict == EQUIVALENT]
  mechanical = [x for x in mechanical if x.verdict != EQUIVALENT]
  lost = [x for x in (*seeded, *mechanical) if x.verdict not in KILLED]
  good = killed(seeded) == len(seeded)
  good &= killed(mechanical) >= SHARE * len(mechanical)
  return dict(
    good=good,
    seeded=len(seeded),
    seeded_killed=killed(seeded),
    mechanical=len(mechanical),
    mechanical_killed=killed(mechanical),
    mechanical_equivalent=len(same),
    survivors=[x._asdict() for x in lost],
  )
