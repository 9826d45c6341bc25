"""Finds the user's own Python by name: rules, drafters and models."""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from typing import Any

from specdec_jax import fields


def import_name(path: str) -> Any:
  """Imports 'package.module:name' or 'folder/file.py:name'; finds modules in
  the working folder and beside the file. ImportError: another form, a module
  that fails, or a name that it lacks."""
  module, _, name = path.partition(':')
  if not (module and name):
    raise ImportError('want package.module:name, or file.py:name')
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    if module.endswith('.py'):
      loaded = _of_file(os.path.abspath(module))
    else:
      loaded = importlib.import_module(module)
  except Exception as error:  # a user's module may raise anything
    why = fields.first_line(error)
    raise ImportError(f'importing {module} failed: {why}') from error
  if not hasattr(loaded, name):
    raise ImportError(f'{module} has no {name}')
  return getattr(loaded, name)


@functools.cache
def _of_file(path: str) -> types.ModuleType:
  """Loads a file as a module named by its path, as no other is."""
  spec = importlib.util.spec_from_file_location(path, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  if os.path.dirname(path) not in sys.path:
    sys.path.append(os.path.dirname(path))
  sys.modules[path] = module  # a dataclass looks there for its own
  spec.loader.exec_module(module)
  return module


def named(what: str, path: str) -> Any:
  """Calls import_name; its ValueError names the setting and the path."""
  try:
    return import_name(path)
  except ImportError as error:
    raise ValueError(f'{what}={path}: {error}') from error


def binds(function, *args, **named) -> bool:
  """Tells whether it is callable with these arguments."""
  try:
    inspect.signature(function).bind(*args, **named)
  except (TypeError, ValueError):
    return False
  return True


def signature(found) -> str:
  """Says what something takes, for an error message."""
  if callable(found):
    return f'it takes {inspect.signature(found)}'
  return f'{found!r} is not callable'
