"""The user's own Python, by name: rules, drafters and models."""

import functools
import importlib
import os
import sys
from typing import Any

import jax

from specdec_jax import fields


def import_name(path: str) -> Any:
  """The object at 'package.module:name'; modules of the working folder count.

  Raises:
    ImportError: another form, a module that fails, or a name that it lacks.
  """
  module, _, name = path.partition(':')
  if not (module and name):
    raise ImportError('want package.module:name')
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    loaded = importlib.import_module(module)
  except Exception as error:  # a user's module may raise anything
    why = fields.first_line(error)
    raise ImportError(f'importing {module} failed: {why}') from error
  if not hasattr(loaded, name):
    raise ImportError(f'{module} has no {name}')
  return getattr(loaded, name)


def promoting(function):
  """The function under JAX's default; programs here forbid rank promotion."""

  @functools.wraps(function)
  def call(*args, **named):
    with jax.numpy_rank_promotion('allow'):
      return function(*args, **named)

  return call
