"""Names the drafters, and makes one for a target from what a user gives.

To add a drafter, write a file and add a row (see drafters.method). A user's own
needs no row: see DRAFTS.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from specdec_jax import fields, types
from specdec_jax.drafters import (
  adaptive,
  branch,
  dflash,
  eagle,
  early_exit,
  hybrid,
  lm,
  lookup,
  medusa,
  method,
  ngram,
)
from specdec_jax.io import download, load, own, sources
from specdec_jax.io.arrays import stored
from specdec_jax.io.published import draft_file, eagle_folder, medusa_heads

DRAFTERS: dict[str, Any] = {
  'lm': lm,
  'lookup': lookup,
  'ngram': ngram,
  'early_exit': early_exit,
  'self': early_exit.Itself,
  'eagle': eagle,
  'medusa': medusa,
  'dflash': dflash,
  'hybrid': hybrid,
  'adaptive': adaptive,
}
DRAFTS = (
  'Settings of one, a loaded model, a types.Drafter or Method, a function '
  "make(target, *, gamma, chunk) of one, a path, as 'file.py:make', or None"
)
# package.module:make or file.py:make, then :argument if any.
PATH = re.compile(f'({sources.FUNCTION.pattern})(?::(.+))?')


def draft_of(draft: Any, what: str = 'draft') -> Any:
  """Turns a draft, and the one that its Settings are around (`drafter`), into
  what method_of takes: None, Settings, a Method, or a function.

  draft: one of DRAFTS; ValueError for any other, or a setting that is empty. A
    path is 'package.module:name' or 'file.py:name'; with 'file.py:make:SOURCE'
    make is called with source='SOURCE' too.
  what: its name in error messages.
  """
  if isinstance(draft, str) and (path := PATH.fullmatch(draft)):
    draft = _imported(what, *path.groups())
  if isinstance(draft, load.LanguageModel):
    return lm.Settings(source=draft)
  if isinstance(draft, types.Drafter):
    return method.Method(draft)
  if draft is None or isinstance(draft, method.Method):
    return draft
  if name := name_of(draft):
    settings = DRAFTERS[name].Settings() if isinstance(draft, str) else draft
    return _checked(name, settings)
  if own.binds(draft, 'target', gamma=1, chunk=1):
    return draft
  given = f'{what}={fields.short(draft)}'
  text = os.fspath(draft) if isinstance(draft, str | os.PathLike) else ''
  if set(text) & set(':/.'):
    raise ValueError(
      f'{given}: a source is given to Settings of drafters, as in lm.Settings('
      f'{text!r}) or eagle.Settings({text!r}), or to specdec_jax.load'
    )
  takes = f'; {own.signature(draft)}' if callable(draft) else ''
  names = fields.choices(draft, DRAFTERS)
  raise ValueError(f'{given}: {names}, {DRAFTS}{takes}')


@functools.cache  # one function, so that what it makes is compiled once
def _imported(what: str, path: str, source: str | None) -> Any:
  found = own.named(what, path)
  return functools.partial(found, source=source) if source else found


def name_of(draft: Any) -> str:
  """Finds the row of DRAFTERS for a name or Settings; '' for any other."""
  if isinstance(draft, str):
    return draft if draft in DRAFTERS else ''
  rows = DRAFTERS.items()
  return next((name for name, x in rows if type(draft) is x.Settings), '')


def innermost(draft: Any) -> Any:
  """Returns what Settings are around, or these."""
  inner = getattr(draft, 'drafter', None)
  return innermost(inner) if name_of(draft) and inner is not None else draft


def gamma_of(draft: Any, gamma: int) -> int:
  """Counts a window's drafts: the nodes in a draft's tree, else gamma."""
  tree = getattr(innermost(draft), 'tree', '')
  return (branch.size_of(tree) if isinstance(tree, str) else 0) or gamma


def numbers(draft: Any) -> int:
  """Counts numbers in a draft's file or folder; 0 for any other draft. Raises
  ValueError if a file in our format is missing, damaged, or another draft's."""
  name, source = name_of(draft), str(getattr(draft, 'source', ''))
  whole = name == 'lm' and lm.is_model(source)
  if whole or not source or source.startswith('random:'):
    return 0
  where, arrays = download.local(source), {}
  if name in draft_file.FORMS and not where.is_dir():
    arrays, _ = draft_file.read(name, source)
  elif where.exists():
    for path in medusa_heads.find(where):
      arrays |= stored.open_file(path)
  # Of a draft inside of a model the model is not counted.
  inside = eagle_folder.MTP, medusa_heads.INSIDE
  alone = {n: x for n, x in arrays.items() if n.startswith(inside)}
  return sum(math.prod(x.shape) for x in (alone or arrays).values())


def section(name: str) -> str:
  """Returns the config section for a row of DRAFTERS."""
  return getattr(DRAFTERS[name], 'SECTION', name)


def inside(name: str) -> list[str]:
  """Lists the rows of DRAFTERS that this one may be around; [] for none."""
  rank = lambda name: getattr(DRAFTERS[name], 'WRAPS', 0)
  return [x for x in DRAFTERS if rank(x) < rank(name)]


def _checked(name: str, settings: Any) -> Any:
  """Returns a row's Settings with nothing empty, and their draft checked."""
  try:
    fields.check_needed(settings)
  except ValueError as error:
    raise ValueError(
      f'{section(name)}.{error}; in Python, to {name}.Settings'
    ) from error
  if not (allowed := inside(name)):
    return settings
  what, inner = f'{name}.drafter', settings.drafter
  if inner is None or name_of(inner) and name_of(inner) not in allowed:
    raise ValueError(
      f'{what}={fields.short(inner)}: {fields.choices(inner, allowed)}, or a '
      'draft of your own'
    )
  return dataclasses.replace(settings, drafter=draft_of(inner, what))


def with_options(draft: Any, options: Mapping[str, Any] | None) -> Any:
  """Makes Settings from a dict, for a drafter by its name, or a loaded model.
  Raises ValueError for a setting unknown or not allowed, or another draft."""
  if not options:
    return draft
  given = f'draft_options={fields.short(options)}'
  if not isinstance(options, Mapping):
    raise ValueError(
      f"{given}: must be a dict of the drafter's settings by name"
    )
  if isinstance(draft, load.LanguageModel):
    made = fields.make(method.Stopping, f'draft {draft.label}', options)
    return lm.Settings(source=draft, **dataclasses.asdict(made))
  if isinstance(draft, str) and draft in DRAFTERS:
    return fields.make(DRAFTERS[draft].Settings, draft, options)
  raise ValueError(
    f'{given}: they are for a drafter by its name, or a loaded model; '
    f'draft={fields.short(draft)} has none'
  )


def method_of(
  target: load.LanguageModel, draft: Any, *, gamma: int, chunk: int
) -> method.Method:
  """Makes the drafter for a target, with its parameters, from a draft_of result
  that is not None. Raises ValueError if it does not fit the target or gamma. A
  prefill pass reads `chunk` prompt tokens."""
  sizes, made = dict(gamma=gamma, chunk=chunk), draft
  if name := name_of(draft):
    inner = {}
    if inside(name):
      inner['inner'] = method_of(target, draft.drafter, **sizes)
    made = DRAFTERS[name].for_target(target, draft, **sizes, **inner)
  elif not isinstance(draft, method.Method):
    # An equal drafter would compile again.
    made = target.once((draft, gamma, chunk), lambda: draft(target, **sizes))
  if isinstance(made, types.Drafter):
    made = method.Method(made)
  if not isinstance(made, method.Method):
    raise ValueError(
      f'draft={fields.short(draft)}: it made {fields.short(made)}; want a '
      'types.Drafter or a Method of drafters.method'
    )
  if made.drafter.gamma != gamma:
    raise ValueError(
      f'gamma={gamma}: drafter {made.drafter.name} was made for '
      f'{made.drafter.gamma}; give gamma={made.drafter.gamma}, or make another '
      'drafter'
    )
  taps, config = made.drafter.taps, target.lm_config
  if config and not set(taps) <= set(range(-1, config.depth + 1)):
    raise ValueError(
      f'drafter {made.drafter.name}: taps={taps}: allowed are layers 0 to '
      f'{config.depth - 1} of {target.label}, -1 for its embedding and '
      f'{config.depth} for its final norm'
    )
  return made
