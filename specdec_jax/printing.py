"""Prints the tables, progress and JSON of programs."""

import collections
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import rich.console
import rich.progress

from specdec_jax import hosts

# Seconds in which `track` told of something, by its description.
spent: dict[str, float] = collections.defaultdict(float)


def console(width: int = 120) -> rich.console.Console:
  """Opens a rich console on stdout; `width` columns in a pipe."""
  # 120 hold every table.
  columns = None if sys.stdout.isatty() else width
  return rich.console.Console(width=columns, highlight=False, emoji=False)


def progress_console() -> rich.console.Console:
  """Opens a rich console on stderr, which says nothing but in process 0."""
  # Of one process, is_first would start JAX's devices.
  quiet = jax.distributed.is_initialized() and not hosts.is_first()
  return rich.console.Console(stderr=True, quiet=quiet, emoji=False)


@contextlib.contextmanager
def progress(description: str, total: int, done: int = 0) -> Iterator[Any]:
  """Yields advance(done, text=''), which tells on stderr what is left.

  A bar on a terminal; elsewhere a line at once, then at most every 15 seconds.
  The time left is told from the second call on: before it something compiles.
  """
  console = progress_console()
  if console.is_terminal:
    own = rich.progress.TextColumn('{task.fields[text]}')
    columns = *rich.progress.Progress.get_default_columns(), own
    with rich.progress.Progress(*columns, console=console) as bars:
      bar = bars.add_task(description, total=total, completed=done, text='')
      yield lambda done, text='': bars.update(bar, completed=done, text=text)
    return
  how: Any = dict(soft_wrap=True, markup=False, highlight=False)
  console.print(f'{description}: {done} of {total}', **how)
  said, begun = time.monotonic(), None

  def advance(done: int, text: str = '') -> None:
    nonlocal said, begun
    now = time.monotonic()
    begun = begun or (now, done)
    if begun[1] < done < total and now - said >= 15:
      said, left = now, (now - begun[0]) / (done - begun[1]) * (total - done)
      line = f'{description}: {done} of {total}, {time_text(left)} left  {text}'
      console.print(line.rstrip(), **how)

  yield advance


def track(
  items: Iterable, description: str, total: int | None = None
) -> Iterable:
  """Iterates with progress; give `total` for items that have no length."""
  if total is None:
    total = len(items := list(items))
  start = time.perf_counter()
  try:
    with progress(description, total) as advance:
      for done, item in enumerate(items, 1):
        yield item
        advance(done)
  finally:
    spent[description] += time.perf_counter() - start


def time_text(seconds: float) -> str:
  """Says '40 s', '2 min 05 s' or '3 h 20 min'."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds} s'
  if seconds < 3600:
    return f'{seconds // 60} min {seconds % 60:02} s'
  return f'{seconds // 3600} h {seconds // 60 % 60:02} min'


def compact(document: Any) -> str:
  """Writes a document as one line of JSON.

  Floats keep six digits; NaN and infinity become null, a NamedTuple an object.
  """

  def clean(x):
    if hasattr(x, '_asdict'):
      x = x._asdict()
    if isinstance(x, dict):
      return {str(k): clean(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
      return [clean(v) for v in x]
    if isinstance(x, float):
      return float(f'{x:.6g}') if math.isfinite(x) else None
    return x

  return json.dumps(clean(document), separators=(',', ':'), allow_nan=False)


def result(document: Any, sentence: str = '') -> str:
  """Prints a document as JSON, which it returns; a terminal, the sentence."""
  text = compact(document)
  if not sys.stdout.isatty():
    print(text, flush=True)
  elif sentence:
    print(sentence)
  return text
