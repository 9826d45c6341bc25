"""The folder of a training run.

config.json    every setting of the run
ended.json     the result of a finished run
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from specdec_jax import hosts, program
from specdec_jax.io import files
from specdec_jax.train import logs

# May change when a run is resumed, without --changed.
FREE = ('run.log_every', 'run.keep')
CONFIG, ENDED = 'config.json', 'ended.json'


def open_run(
  folder: pathlib.Path,
  config: dict[str, Any],
  *,
  changed: bool = False,
  fixed: Sequence[str] = (),
) -> bool:
  """Makes the folder of a run, or checks config against its config.json.

  Only one job may use a folder: partial files of killed ones are removed. It
  has to be the same for every process. Returns whether it has a run to resume.

  Args:
    config: every setting, nested by section.
    changed: resume even if config differs.
    fixed: keys, such as 'run.seed', or sections, such as 'text', that a resumed
      run cannot change.
  """
  begun = hosts.from_first(lambda: _open(folder, config, changed, fixed))
  if jax.process_count() > 1:
    _check_shared(folder)
  return begun


def _check_shared(folder: pathlib.Path) -> None:
  """Raises ValueError unless all processes see what the first one writes.

  Every process writes its part of a checkpoint there.
  """
  path = folder / 'job'
  hosts.from_first(lambda: _write(path, {}))
  blind = hosts.differing('seen' if path.exists() else 'missing')
  if hosts.is_first():
    path.unlink()
  if blind is not None:
    raise ValueError(
      f'workdir {folder}: process {blind} does not see what process 0 wrote '
      'there; take a folder that all hosts share'
    )


def _open(
  folder: pathlib.Path,
  config: dict[str, Any],
  changed: bool,
  fixed: Sequence[str],
) -> bool:
  program.open_workdir(str(folder))
  files.sweep(folder)
  path = folder / CONFIG
  if not path.exists():
    return False
  before = files.read_json(path)
  differ = _differ(before, config)
  # A version without a key cannot say what it would have been.
  known = [x for x in differ if x in _flat(before)]
  stuck = [x for x in known if x in fixed or x.partition('.')[0] in fixed]
  if stuck:
    raise ValueError(
      f'workdir {folder}: begun with other values of {", ".join(stuck)}, which '
      'cannot change in a run; take another workdir'
    )
  if differ and not changed:
    reasons = [f'with other values of {", ".join(known)}'] if known else []
    if new := [x for x in differ if x not in known]:
      reasons.append(f'by a version without {", ".join(new)}')
    raise ValueError(
      f'workdir {folder}: begun {" and ".join(reasons)}; take another workdir, '
      'or go on with the new ones by --changed'
    )
  return True


def write_config(folder: pathlib.Path, config: dict[str, Any]) -> None:
  path = folder / CONFIG
  if not hosts.is_first():
    return
  # Whatever differs, FREE settings too; otherwise the file keeps its date.
  if not path.exists() or _flat(files.read_json(path)) != _flat(config):
    _write(path, config)


def finished(
  folder: pathlib.Path, config: dict[str, Any]
) -> dict[str, Any] | None:
  """The {'made', 'figures', 'config'} that `finish` wrote.

  None if the run is not finished, config differs or the result is missing.
  """
  path = folder / ENDED
  if not path.exists():
    return None
  found = files.read_json(path)
  exists = (folder / found['made']).exists()
  return found if exists and not _differ(found['config'], config) else None


def finish(
  folder: pathlib.Path,
  config: dict[str, Any],
  made: str,
  figures: dict[str, Any],
) -> None:
  """Marks a run as finished; made: the path of its result in the folder."""
  if hosts.is_first():
    _write(folder / ENDED, {'made': made, 'figures': figures, 'config': config})


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
  with logs.writing(path):
    files.write(path, json.dumps(content, indent=1))


def _differ(before: dict[str, Any], config: dict[str, Any]) -> list[str]:
  """The keys with different values, except FREE ones."""
  before, now = _flat(before), _flat(config)
  names = sorted((before.keys() | now) - set(FREE))
  return [x for x in names if before.get(x) != now.get(x)]


def _flat(config: dict[str, Any]) -> dict[str, Any]:
  """{'section': {'key': 1}} -> {'section.key': 1}, with lists for tuples."""
  return {
    f'{name}.{key}': list(x) if isinstance(x, tuple) else x
    for name, section in config.items()
    for key, x in section.items()
  }
