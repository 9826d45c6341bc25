"""A file with the best gamma by drafter, batch size and length of the buffer.

bench.py --export_gammas writes it, api.generate reads it: on the same machine
and model only.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax import requests, runtime
from specdec_jax.io import files

FORMAT = 'specdec_jax gammas 1'
_MACHINE = 'cpu', 'cores', 'platform', 'device', 'devices'


class Entry(NamedTuple):
  """drafter at a batch size and with buffers of so many tokens a row.

  gamma: the fastest; 0, plain decoding, where none was surely faster.
  """

  drafter: str
  batch: int
  buffer: int
  gamma: int


def write(
  path: str | os.PathLike,
  machine: Mapping[str, Any],
  model: str,
  entries: Sequence[Entry],
  costs: Mapping[str, Any],
) -> None:
  """Adds entries to a file, in place of those of the same cell.

  Args:
    path: made if missing; replaced if of another machine or model.
    machine: from machine.describe.
    model: digest of the target.
    entries: what was found.
    costs: of windows, as drafters.adaptive.params takes them.
  """
  where = {name: machine[name] for name in _MACHINE}
  kept: list[dict[str, Any]] = []
  cell = lambda x: (x['drafter'], x['batch'], x['buffer'])
  new = [x._asdict() for x in entries]
  if pathlib.Path(path).exists():
    before = _read(path)
    if (before['machine'], before['model']) == (where, model):
      cells = {cell(x) for x in new}
      kept = [x for x in before['entries'] if cell(x) not in cells]
  out: dict[str, Any] = dict(format=FORMAT, machine=where, model=model)
  out |= {'costs': costs, 'entries': kept + new}
  files.write(pathlib.Path(path), runtime.compact(out))


def export(doc: Any, model: str, path: str) -> None:
  """Writes the fastest gammas by the crossover of a bench Document.

  model: digest of the target.
  """
  entries = [
    Entry(drafter, batch.batch_size, doc.setting.buffer, gamma)
    for batch in doc.crossover
    for drafter, gamma in batch.best_gamma.items()
  ]
  write(path, doc.machine, model, entries, doc.costs)


def of_requests(
  path,
  machine: Mapping[str, Any],
  target,
  draft: Any,
  items: Sequence[requests.Item],
  *,
  new: int,
  rows: int,
) -> int:
  """pick for some requests.

  Args:
    path: of the file.
    machine: from machine.describe.
    target: the loaded model.
    draft: a drafter's name, a types.Drafter or a loaded model.
    items: the prompts.
    new: tokens that each may emit.
    rows: decoded together, at most.

  Raises:
    ValueError: no such file; see pick.
  """
  if not pathlib.Path(path).is_file():
    raise ValueError(
      f'gamma={path!r}: must be a whole number, as in gamma=4, or a file of '
      'bench.py --export_gammas, and there is none of this name; for windows '
      "that size themselves give draft='adaptive'"
    )
  name = draft if isinstance(draft, str) else getattr(draft, 'name', 'lm')
  shape = dict(
    batch=min(rows, len(items)),
    buffer=requests.bucket(max(len(x.tokens) for x in items) + new),
  )
  return pick(path, machine, target.digest, name, **shape)


def pick(
  path: str | os.PathLike,
  machine: Mapping[str, Any],
  model: str,
  drafter: str,
  *,
  batch: int,
  buffer: int,
) -> int:
  """The best gamma of the entry that is nearest in batch and buffer.

  Args:
    path: a file of bench.py --export_gammas.
    machine: machine.describe(), of this one.
    model: digest of the target.
    drafter: its name.
    batch: rows.
    buffer: token slots of a row.

  Raises:
    ValueError: no such file, one of another machine or model, or one without
      the drafter.
  """
  found, measure = _read(path), 'measure here with bench.py --export_gammas'
  for name in _MACHINE:
    if found['machine'].get(name) != machine[name]:
      raise ValueError(
        f'gammas {path}: measured on {name} {found["machine"].get(name)}, this '
        f'machine has {machine[name]}: {measure}'
      )
  if found['model'] != model:
    raise ValueError(f'gammas {path}: measured on another model: {measure}')
  of = [x for x in found['entries'] if x['drafter'] == drafter]
  if not of:
    names = sorted({x['drafter'] for x in found['entries']})
    raise ValueError(f'gammas {path}: has {names}, not {drafter!r}: {measure}')
  far = lambda x: (
    abs(math.log(x['batch'] / batch)) + abs(math.log(x['buffer'] / buffer))
  )
  return min(of, key=far)['gamma']


def _read(path: str | os.PathLike) -> dict[str, Any]:
  try:
    found = json.loads(pathlib.Path(path).read_text('utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(
      f'gammas {path}: cannot be read ({runtime.first_line(error)})'
    ) from error
  if not isinstance(found, dict) or found.get('format') != FORMAT:
    raise ValueError(
      f'gammas {path}: no file of bench.py --export_gammas ({FORMAT})'
    )
  return found
