"""Trains in a folder: begins, resumes, or finds that it is done."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specdec_jax import hosts, machine, program, types
from specdec_jax.io import files
from specdec_jax.train import logs, loop

# Written last: the path of the result, its figures and the config.
ENDED = 'ended.json'
# A task, and a function (params, about) -> the path of the result, in the run's
# folder. about: how it was made, for its file. All processes call it.
Prepared = tuple[
  loop.Task, Callable[[types.Params, dict[str, Any]], pathlib.Path]
]


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

  settings: a dataclass with sections, `run` and `optimiser` among them.
  prepare: called with whether there is a run to resume.
  result: what is made, 'model' or 'draft'.
  read: digests of the models and the text that the run reads, by name.

  Returns the best step's figures, with 'step', 'finished' and, under its name,
  the result's path; only 'step' and 'finished' if a signal ended the run.
  """
  config, end = dataclasses.asdict(settings) | {'read': read}, folder / ENDED
  begun = open_run(folder, config, changed=changed, fixed=fixed)
  before = hosts.from_first(lambda: files.read_json(end, missing={}))
  if before and not _differing(before['config'], config):
    if hosts.from_first((folder / before['made']).exists):
      return before['figures'] | {result: str(folder / before['made'])}
  task, write = prepare(begun)
  step, params, figures = loop.run(
    task, settings.run, settings.optimiser, folder, config
  )
  if params is None:
    return {'step': step, 'finished': False}
  about = {'config': config, 'step': step, 'figures': figures}
  about['made_by'] = machine.made_by(*machine.commit())
  path = write(params, about)
  figures |= {'step': step, 'finished': True}
  if hosts.is_first():
    found = {'made': path.name, 'figures': figures, 'config': config}
    logs.write_json(end, found)
  return figures | {result: str(path)}


def open_run(
  folder: pathlib.Path,
  config: dict[str, Any],
  *,
  changed: bool = False,
  fixed: Sequence[str] = (),
) -> bool:
  """Makes a run's folder, or checks config against its config.json.

  Returns whether there is a run to resume. Only one job may use a folder:
  killed ones' partial files are removed. All processes need the same one.

  changed: resume even if config differs.
  fixed: keys, such as 'run.seed', or sections, such as 'text', that a resumed
    run cannot change.
  """

  def resumes() -> bool:
    program.open_workdir(str(folder))
    files.sweep(folder)
    if not (path := folder / loop.CONFIG).exists():
      return False
    differ = _differing(files.read_json(path), config)
    stuck = [x for x in differ if x in fixed or x.partition('.')[0] in fixed]
    if stuck or (differ and not changed):
      cure = '; take another workdir, or go on with the new ones by --changed'
      if stuck:
        cure = ', which cannot change in a run; take another workdir'
      raise ValueError(
        f'workdir {folder}: begun with other values of '
        f'{", ".join(stuck or differ)}{cure}'
      )
    return True

  begun = hosts.from_first(resumes)
  if jax.process_count() > 1:
    _check_shared(folder)
  return begun


def _check_shared(folder: pathlib.Path) -> None:
  """Raises ValueError unless all processes see what the first one writes; every
  one writes its part of a checkpoint there."""
  path = folder / 'job'
  hosts.from_first(lambda: logs.write_json(path, {}))
  blind = hosts.differing('seen' if path.exists() else 'missing')
  if hosts.is_first():
    path.unlink()
  if blind is not None:
    raise ValueError(
      f'workdir {folder}: process {blind} does not see what process 0 wrote '
      'there; take a folder that all hosts share'
    )


def _differing(before: dict[str, Any], config: dict[str, Any]) -> list[str]:
  """Lists the keys with different values, as 'section.key'."""
  flat = lambda config: {
    f'{name}.{key}': x
    for name, section in config.items()
    for key, x in section.items()
  }
  before, now = flat(before), flat(json.loads(json.dumps(config)))
  return sorted(x for x in before | now if before.get(x) != now.get(x))
