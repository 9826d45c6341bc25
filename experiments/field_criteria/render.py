"""Outcomes -> a document, and the document as tables."""

import functools
import pathlib
from typing import Any

from experiments import page
from experiments.field_criteria import measure
from specdec_jax.bench import machine
from tests.mutants import seeded

# Kinds of bugs by their number in the project's list of failure modes.
KINDS = {
  'law': (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 45),
  'noise': (24, 25, 26, 27, 46),
  'cache': (1, 2, 3, 17, 19, 22, 30, 42),
  'ends, rows, counts': (15, 16, 18, 28, 33, 35, 41, 43, 44),
}
LOOKS = {
  **dict.fromkeys(measure.WINDOW, 'law of one window'),
  **dict.fromkeys(measure.GREEDY, 'greedy text'),
  measure.OURS: 'the tests that the bug names',
}


# Asked once, before the results are files that git sees.
_describe = functools.cache(machine.describe)


def document(plain, outcomes, seconds: float, lost=()) -> dict[str, Any]:
  """Everything as plain data. plain: the unmutated code's outcome. lost: names
  of bugs that do not fit the code as it is."""
  found = _describe()
  return dict(
    machine={
      k: found[k] for k in ('commit', 'dirty', 'cpu', 'cores', 'jax', 'python')
    },
    seconds=round(seconds),
    seeded=len(seeded.MUTANTS),
    lost=list(lost),
    unmutated=plain._asdict(),
    summary=[_row(name, plain, outcomes) for name in measure.EVERY],
    outcomes=[_told(x, plain) for x in outcomes],
  )


def reached(name: str, outcome, plain) -> bool:
  """Whether the bug changes anything that the criterion looks at."""
  if name == measure.OURS:
    return True
  return outcome.seen[name]['digest'] != plain.seen[name]['digest']


def _told(outcome, plain) -> dict[str, Any]:
  verdict = {}
  for name in measure.EVERY:
    passed = outcome.seen[name]['passed']
    seen = 'missed' if reached(name, outcome, plain) else 'same'
    verdict[name] = seen if passed else 'caught'
  why = outcome.seen[measure.OURS]['why']
  kept = dict(verdict=verdict, ours=why, kind=kind(outcome.row))
  return outcome._asdict() | kept


def kind(row: int) -> str:
  return next((name for name, rows in KINDS.items() if row in rows), 'other')


def _row(name: str, plain, outcomes) -> dict[str, Any]:
  missed = [x for x in outcomes if x.seen[name]['passed']]
  inside = [x for x in outcomes if reached(name, x, plain)]
  count = lambda some, of: sum(kind(x.row) == of for x in some)
  return dict(
    criterion=name,
    looks_at=LOOKS[name],
    missed=len(missed),
    of=len(outcomes),
    missed_reached=len([x for x in inside if x.seen[name]['passed']]),
    reached=len(inside),
    kinds={k: (count(missed, k), count(outcomes, k)) for k in KINDS},
  )


def markdown(doc: dict[str, Any]) -> str:
  """The summary, then every bug."""
  return '\n'.join([*summary(doc), '', *_each(doc)])


def summary(doc: dict[str, Any]) -> list[str]:
  m, lost = doc['machine'], bool(doc['lost'])
  return [
    f'{machine.made_by(m["commit"], m["dirty"])}, {m["cores"]} cores, '
    f'{m["cpu"]}, Python {m["python"]}, jax {m["jax"]}; '
    f'{doc["seconds"]} s for {len(doc["outcomes"])} bugs of {doc["seeded"]} '
    'seeded. The unmutated code passes all.',
    *([f'Not run, they do not fit the code: {", ".join(doc["lost"])}.'] * lost),
    '',
    *_summary(doc),
  ]


def _summary(doc) -> list[str]:
  head = ('criterion', 'looks at', 'missed', 'missed of those it can see')
  rows = []
  for x in doc['summary']:
    kinds = [f'{a} of {b}' for a, b in x['kinds'].values()]
    seen = f'{x["missed_reached"]} of {x["reached"]}'
    missed = f'{x["missed"]} of {x["of"]}'
    rows.append((x['criterion'], x['looks_at'], missed, seen, *kinds))
  return page.table((*head, *KINDS), rows)


_SIGNS = {'caught': 'x', 'missed': '**missed**', 'same': '-'}


def _each(doc) -> list[str]:
  head, rows = ('bug', 'file', *measure.EVERY, 'the test that fails'), []
  for x in doc['outcomes']:
    signs = [_SIGNS[x['verdict'][name]] for name in measure.EVERY]
    file = pathlib.Path(x['path']).name
    rows.append((x['name'], file, *signs, x['ours'].removeprefix('tests/')))
  return page.table(head, rows)
