"""One training in a folder: begun, resumed or found to be done."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specdec_jax import hosts, machine, sharding, types
from specdec_jax.train import data, loop, workdir


class Prepared(NamedTuple):
  """A run that is ready to be trained.

  task: of the training loop.
  layout: of the model that is trained; None is one device.
  write: (params, about) -> the path of the result, in the run's folder. about:
    how it was made, for its file. Called by every process, for hosts.fetch.
  """

  task: loop.Task
  layout: sharding.Layout | None
  write: Callable[[types.Params, dict[str, Any]], pathlib.Path]


def run(
  settings: Any,
  folder: pathlib.Path,
  prepare: Callable[[bool], Prepared],
  *,
  result: str,
  changed: bool,
  fixed: Sequence[str],
  read: dict[str, str],
) -> dict[str, Any]:
  """Trains, and writes the best step; returns at once if that was done before.

  Args:
    settings: a dataclass of sections, with `run` and `optimiser` among them.
    folder: of the run; resumed if there is one.
    prepare: called with whether there is a run to resume.
    result: what is made, 'model' or 'draft'.
    changed, fixed: as for workdir.open_run.
    read: digests of the models and of the text that the run reads, by name.

  Returns:
    The figures of the best step, with 'step', 'finished' and the path of the
    result under its name; only 'step' and 'finished' if a signal ended the run.
  """
  config = dataclasses.asdict(settings)
  if read:
    config['read'] = read
  begun = workdir.open_run(folder, config, changed=changed, fixed=fixed)
  if before := hosts.from_first(lambda: workdir.finished(folder, config)):
    return before['figures'] | {result: str(folder / before['made'])}
  task, layout, write = prepare(begun)
  ended = loop.run(
    task,
    settings.run,
    settings.optimiser,
    folder,
    config=config,
    place=data.placer(layout),
  )
  if ended.best is None:
    return {'step': ended.step, 'finished': False}
  step, params, figures = ended.best
  about = {'config': config, 'step': step, 'figures': figures}
  about['made_by'] = machine.made_by(*machine.commit())
  path = write(params, about)
  figures |= {'step': step, 'finished': True}
  workdir.finish(folder, config, path.name, figures)
  return figures | {result: str(path)}
