"""What the benchmark prints and saves. Computes no metric of its own."""

import pathlib
import sys
import textwrap
from typing import Any

import rich.console
import rich.progress

from specdec_jax import runtime
from specdec_jax.bench import tables, verdict
from specdec_jax.io import files


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
    part(doc, runtime.console())


def finish(doc: dict[str, Any]) -> bool:
  """Prints crossover, verdict and, last, one line of JSON; true if sound."""
  console = runtime.console()
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
  print(runtime.compact(doc))


def save(folder: pathlib.Path, doc: dict[str, Any], config: str) -> None:
  """config.json, env.json and results/bench.json."""
  (folder / 'results').mkdir(exist_ok=True)
  files.write(folder / 'config.json', config)
  files.write(folder / 'env.json', runtime.compact(doc['machine']))
  files.write(folder / 'results/bench.json', runtime.compact(doc))
