"""Experiments that are formulas: what the six of Leviathan et al. 2023 share.

Each is data of the print, a report made from specdec_jax.bench.cost, a figure.
"""

import pathlib
from collections.abc import Callable
from typing import NamedTuple

from absl import flags

from experiments import page
from specdec_jax import runtime
from specdec_jax.analysis import plots
from specdec_jax.bench import machine
from specdec_jax.io import files

HERE = pathlib.Path(__file__).parent
# What a run writes is no change of what it runs.
WRITTEN = (':!experiments/*/results/*', ':!experiments/*/README.md')


class Found(NamedTuple):
  """lines: Markdown. good: every number is what the README claims of it."""

  lines: list[str]
  good: bool


class Experiment(NamedTuple):
  """name: its folder here. size: of the figure, in inches."""

  name: str
  compute: Callable[[], Found]
  paint: Callable[[plots.Axes], None]
  size: tuple[float, float] = (6.4, 4.0)


def launch(experiment: Experiment) -> None:
  """The program: exit status 1 where a number is not as claimed."""
  workdir = flags.DEFINE_string(
    'workdir', '', 'folder for the results; if given, no README is filled'
  )
  runtime.launch(lambda: run(experiment, workdir.value))


def run(experiment: Experiment, workdir: str = '') -> bool:
  """Prints and writes NAME.md and NAME.png; fills the README by default.

  Raises:
    ValueError: a folder that cannot be written, before anything is.
  """
  home = HERE / experiment.name
  folder = runtime.open_workdir(workdir or str(home / 'results'))
  assert folder is not None
  if not workdir:
    runtime.open_workdir(str(home))
  found = experiment.compute()
  picture = plots.png(experiment.paint, size=experiment.size)
  made_by = machine.made_by(*machine.commit(*WRITTEN))
  lines = [f'{made_by}.', '', *found.lines]
  files.write(folder / f'{experiment.name}.md', '\n'.join(lines))
  files.write(folder / f'{experiment.name}.png', picture)
  if not workdir:
    page.fill(home, '\n'.join(lines))
  print('\n'.join(lines))
  return found.good


def off(theirs: float, ours: float, digits: int) -> float:
  """How far ours, rounded as the print is, lies from it."""
  return round(round(ours, digits) - theirs, digits)


def gap(theirs: float, ours: float, digits: int) -> str:
  """The same in words: '0' where they are equal to the print's last digit."""
  x = off(theirs, ours, digits)
  return f'{x:+.{digits}f}' if x else '0'


def cell(theirs: float, digits: int) -> tuple[float, float]:
  """The values that round to what is printed."""
  half = 0.5 * 10**-digits
  return theirs - half, theirs + half


def meet(one: tuple[float, float], two: tuple[float, float]) -> bool:
  """Whether two intervals have a point in common."""
  return max(one[0], two[0]) <= min(one[1], two[1])
