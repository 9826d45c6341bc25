"""Builders (base.Recipe) of all drafters that the certificate checks."""

import functools
from collections.abc import Callable
from typing import Any

from specdec_jax import build

# Drafter name -> its base.Recipe, where it has one.
RECIPES = {
  name: row.recipe
  for name, row in build.DRAFTERS.items()
  if hasattr(row, 'recipe')
}


def of(make: Callable[..., Any], *, model: bool = False):
  """A base.Recipe of a user's make(gamma=...).

  model: it is make(model, gamma=...), which reads weights.draft.
  """
  once = functools.lru_cache(maxsize=64)(make)

  def recipe(world, gamma: int):
    if model:
      return once(world.draft, gamma=gamma), world.weights.draft
    return once(gamma=gamma), ()

  return recipe
