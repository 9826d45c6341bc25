"""Drafters as the certificate builds them: base.Recipe."""

import functools
from collections.abc import Callable
from typing import Any

from specdec_jax import build

# (world, gamma) -> (drafter, weights.draft) of every drafter that has one.
RECIPES = {
  name: row.recipe
  for name, row in build.DRAFTERS.items()
  if hasattr(row, 'recipe')
}


def of(make: Callable[..., Any], *, model: bool = False):
  """A user's make as a recipe: (world, gamma) -> (drafter, weights.draft).

  model: make(model, gamma=...) takes the draft model and reads weights.draft.
  """
  once = functools.lru_cache(maxsize=64)(make)

  def recipe(world, gamma: int):
    if model:
      return once(world.draft, gamma=gamma), world.weights.draft
    return once(gamma=gamma), ()

  return recipe
