"""What the benchmark prints and saves. Computes no metric of its own."""

import json
import math
import pathlib
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from typing import Any

import rich.console
import rich.progress

from specdec_jax.bench import tables, verdict
from specdec_jax.io import files


def track(items: Iterable, description: str) -> Iterable:
  """items, with a progress bar on stderr."""
  return rich.progress.track(
    items, description, console=rich.console.Console(stderr=True)
  )


def show(stage: str, doc: dict[str, Any]) -> None:
  """Prints the part of the document that a stage of bench.run has filled."""
  for part in {
    'machine': (tables.machine, tables.ceiling),
    'setting': (tables.setting, tables.judged),
    'calibration': (tables.calibration,),
    'predicted': (tables.predicted,),
    'rows': (tables.rows,),
    'failed': (tables.failed,),
  }[stage]:
    part(doc, tables.console())


def finish(doc: dict[str, Any]) -> bool:
  """Prints crossover, verdict and, last, one line of JSON; true if sound."""
  console = tables.console()
  if doc['crossover']:
    tables.crossover(doc, console)
  doc['verdict'] = verdict.sentences(doc)
  close(doc, console)
  return verdict.sound(verdict.named_rows(doc))


def close(doc: dict[str, Any], console: rich.console.Console) -> None:
  """Prints the verdict and, as the last line, the document as JSON."""
  console.print('\n[bold]Verdict[/bold]')
  for sentence in doc['verdict']:
    indent = ' ' * (2 + len(sentence) - len(sentence.lstrip()))
    text = textwrap.fill(
      sentence.lstrip(),
      console.width,
      initial_indent=indent,
      subsequent_indent=f'{indent}  ',
      break_long_words=False,
    )
    console.print(text, highlight=False)
  console.print()
  sys.stdout.flush()
  print(compact(doc))


def compact(doc: Any) -> str:
  """One line of JSON; what is not finite becomes null."""

  def clean(x):
    if isinstance(x, dict):
      return {str(k): clean(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
      return [clean(v) for v in x]
    if isinstance(x, float):
      return float(f'{x:.6g}') if math.isfinite(x) else None
    return x

  return json.dumps(clean(doc), separators=(',', ':'), allow_nan=False)


# --- folders ---------------------------------------------------------------


def open_workdir(path: str) -> pathlib.Path | None:
  """The folder for results, made if need be; None for no path.

  Raises:
    ValueError: a folder that cannot be written.
  """
  if not path:
    return None
  folder = pathlib.Path(path)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise ValueError(
      f'workdir {path}: cannot be written ({error.strerror}): name another'
    ) from error
  return folder


def save(folder: pathlib.Path, doc: dict[str, Any], config: str) -> None:
  """config.json, env.json and results/bench.json."""
  (folder / 'results').mkdir(exist_ok=True)
  files.write(folder / 'config.json', config)
  files.write(folder / 'env.json', compact(doc['machine']))
  files.write(folder / 'results/bench.json', compact(doc))
