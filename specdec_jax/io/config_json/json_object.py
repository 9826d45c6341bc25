"""Reads keys of a config.json with checks, and remembers which."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NoReturn


@dataclasses.dataclass(frozen=True)
class Json:
  """Keys of a JSON object; null counts as absent, but for `nullable`.

  path: for error messages. defaults: for absent keys. seen: keys asked for.
  """

  path: pathlib.Path
  raw: Mapping[str, Any]
  defaults: Mapping[str, Any]
  seen: set[str] = dataclasses.field(default_factory=set)

  def value(self, key: str, derived: Any = None) -> Any:
    """Returns the value, the default, or what other keys derive."""
    found = self.nullable(key)
    found = self.defaults.get(key) if found is None else found
    return derived if found is None else found

  def nullable(self, key: str) -> Any:
    """Returns the default if the key is absent, None if it is null."""
    self.seen.add(key)
    return self.raw[key] if key in self.raw else self.defaults.get(key)

  def flag(self, key: str) -> bool:
    value = self.value(key)
    if value is not None and value not in (False, True):
      self.refuse(f'{key}={value!r}', 'true, false')
    return bool(value)

  def integer(self, key: str, derived: int | None = None) -> int:
    """Returns a positive integer."""
    value = self.value(key, derived)
    # JSON's true is an int in Python, and no size is near 2^40.
    if type(value) is not int or not 0 < value < 1 << 40:
      self.refuse(f'{key}={value!r}', 'a positive integer')
    return value

  def number(self, key: str, derived: float | None = None) -> float:
    """Returns a positive number."""
    value = self.value(key, derived)
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
      self.refuse(f'{key}={value!r}', 'a positive number')
    return float(value)

  def cap(self, key: str) -> float | None:
    """Returns a positive number, or None if the key is null."""
    return None if self.nullable(key) is None else self.number(key)

  def check(self, **allowed: tuple) -> None:
    """Refuses other values than these; allows an absent key or null."""
    for key, values in allowed.items():
      self.seen.add(key)
      found = self.raw.get(key)
      if found is not None and not any(found == v for v in values):
        words = ['absent', *map(repr, values)]
        self.refuse(f'{key}={found!r}', ', '.join(words))

  def check_rest(self, neutral: Mapping[str, tuple]) -> None:
    """Refuses unread keys that change a model. neutral: such keys, each with
    the values under which it changes nothing."""
    rest = [key for key in self.raw if key in neutral and key not in self.seen]
    self.check(**{key: neutral[key] for key in rest})

  def refuse(self, what: str, allowed: str) -> NoReturn:
    raise ValueError(
      f'{self.path}: {what} is not supported; allowed: {allowed}'
    )
