"""Frozen dataclasses of settings, with each field's range and meaning.

    @dataclasses.dataclass(frozen=True)
    class Run(fields.Checked):
      steps: int = fields.setting(1000, low=1, help='optimiser steps')

    Run(steps=0)  # ValueError: steps=0: must be a whole number, at least 1

A config has a section for each such class; `parse` turns it into dataclasses.
"""

import dataclasses
import difflib
import operator
import os
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Refusal(ValueError):
  """Takes a setting, its value as it is shown, and what is allowed."""

  setting = property(lambda self: self.args[0])

  def __str__(self) -> str:
    return '{}={}: {}'.format(*self.args)


# Annotation -> what to call a value, and two of them in a tuple.
_WORDS: dict[Any, tuple[str, str]] = {
  bool: ('True or False', 'True, False'),
  int: ('a whole number', '2, 4'),
  float: ('a number', '0.0, 1.0'),
  str: ('a text', "'one', 'two'"),
  os.PathLike: ('a path', ''),
  Mapping: ('a dict', ''),
  types.NoneType: ('None', ''),
}
_BOUNDS = {
  'low': ('at least', operator.ge),
  'above': ('more than', operator.gt),
  'high': ('at most', operator.le),
  'below': ('less than', operator.lt),
}


def setting(
  default: Any = dataclasses.MISSING,
  *,
  low: float | None = None,
  high: float | None = None,
  above: float | None = None,
  below: float | None = None,
  allowed: Sequence[Any] = (),
  needed: str = '',
  help: str = '',
) -> Any:
  """Declares a settings field; without a default it is required.

  low, high: inclusive bounds. above, below: exclusive ones.
  allowed: the only values allowed; () for any.
  needed: what to give; empty is allowed only where there is a default, and the
    section is not used (see check_needed).
  help: one line, also shown when a value is refused.
  """
  about = dict(low=low, high=high, above=above, below=below)
  about |= dict(allowed=tuple(allowed), needed=needed, help=help)
  return dataclasses.field(default=default, metadata=about)


class Checked:
  """Base of a settings dataclass: checks every field on construction."""

  def __post_init__(self):
    check(self)


def check(settings: Any) -> None:
  """Raises ValueError, 'name=value: must be ...', for a field out of range.

  Checks a tuple, or a list for it, by element. Makes NumPy's numbers Python's.
  """
  for field in dataclasses.fields(settings):
    if not field.metadata:  # not made by setting()
      continue
    value = plain(getattr(settings, field.name))
    object.__setattr__(settings, field.name, value)
    kind, each = field.type, [value]
    if typing.get_origin(kind) is tuple:
      kind, each = typing.get_args(kind)[0], value
      # --config.decode.methods=lm,lookup arrives as the one text 'lm,lookup'.
      listed = isinstance(each, tuple | list)
      if not listed or any(isinstance(x, str) and ',' in x for x in each):
        raise ValueError(
          f'{field.name}={value!r}: must be a tuple of single values, as in '
          f'"({_WORDS[kind][1]})"{_help(field)}'
        )
    for one in each:
      if one is not None or types.NoneType not in typing.get_args(kind):
        _check_value(field, kind, one)
    if field.default is dataclasses.MISSING:
      _check_needed(field, value)


def plain(value: Any) -> Any:
  """Turns an array without axes, such as a NumPy number, into Python's."""
  return value.item() if getattr(value, 'ndim', None) == 0 else value


def short(value: Any) -> str:
  """Makes a repr that fits into a sentence; of a longer one only the type."""
  text = repr(value)
  return text if len(text) <= 60 else f'<{type(value).__name__}>'


def choices(given: Any, known: Iterable[Any]) -> str:
  """Lists the allowed names, the one that was perhaps meant first."""
  names = [str(x) or "''" for x in known]
  known = [x.partition(':')[0] for x in names]  # of 'lenient:NUMBER'
  near = difflib.get_close_matches(str(given).lower(), known, 1)
  meant = f'did you mean {near[0]}? ' if near else ''
  return f'{meant}allowed are {", ".join(names) or "none"}'


def check_needed(settings: Any) -> None:
  """Raises ValueError if a field that was declared `needed` is empty."""
  for field in dataclasses.fields(settings):
    _check_needed(field, getattr(settings, field.name))


def _check_needed(field: dataclasses.Field, value: Any) -> None:
  what = field.metadata.get('needed', '')
  if what and not value:
    raise ValueError(f'{field.name} is empty: give {what}')


def make(kind: Any, section: str, values: Mapping[str, Any]) -> Any:
  """Makes the dataclass `kind`; a ValueError begins with the section's name."""
  known = {f.name: f for f in dataclasses.fields(kind)}
  for name, value in values.items():
    if name not in known:
      raise ValueError(
        f'{section}.{name}={short(value)}: no such setting; '
        f'{choices(name, known)}'
      )
  for name, field in known.items():
    if field.default is dataclasses.MISSING and name not in values:
      raise ValueError(f'{section}.{name}: is missing{_help(field)}')
  try:
    return kind(**values)
  except ValueError as error:
    raise ValueError(f'{section}.{error}') from error


def parse(kind: Any, config: Mapping[str, Any]) -> Any:
  """Turns a config into the dataclass `kind`, which has a field a section."""
  sections = {f.name: f.type for f in dataclasses.fields(kind)}
  return kind(**parse_sections(sections, config))


def parse_sections(
  sections: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
  """Makes the dataclass of each section; ValueError: as make, or wrong keys."""
  if set(config) != set(sections):
    raise ValueError(
      f'config sections {sorted(config)}: want {sorted(sections)}; is it '
      "another program's?"
    )
  return {
    name: make(kind, name, config[name]) for name, kind in sections.items()
  }


def defaults(kind: Any) -> dict[str, Any]:
  """Lists the defaults of a settings dataclass, as a section of a config."""
  return {f.name: f.default for f in dataclasses.fields(kind)}


def _check_value(field: dataclasses.Field, kind: Any, value: Any) -> None:
  kinds = typing.get_args(kind) or (kind,)
  about = field.metadata
  good = isinstance(value, int | float if kind is float else kind)
  good = good and isinstance(value, bool) == (kind is bool)
  # No math.isfinite: it cannot read a whole number past the floats.
  good = good and (kind is not float or abs(value) <= sys.float_info.max)
  want = ' or '.join(_WORDS.get(x, (f'a {x.__name__}',))[0] for x in kinds)
  bounds = []
  for name, (words, holds) in _BOUNDS.items():
    if (bound := about[name]) is not None:
      good = good and holds(value, bound)
      bounds.append(f'{words} {bound}')
  want = ', '.join(x for x in (f'must be {want}', ' and '.join(bounds)) if x)
  if allowed := about['allowed']:
    good = good and value in allowed
    want = choices(value, allowed)
  if not good:
    raise Refusal(field.name, short(value), f'{want}{_help(field)}')


def _help(field: dataclasses.Field) -> str:
  text = field.metadata.get('help', '')
  return f' ({text})' if text else ''


def first_line(error: BaseException) -> str:
  """Says an error's kind and its message's first line, if it has one."""
  name, lines = type(error).__name__, str(error).splitlines()
  return f'{name}: {lines[0]}' if lines else name
