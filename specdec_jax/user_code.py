"""A user's own rule or drafter, by its import path: package.module:name."""

import importlib
import inspect
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import build, types
from specdec_jax.eval.promises import base


def rule(path: str) -> types.Rule:
  """The types.Rule, or the function verify(noise, draft, p_BNV), at a path.

  Raises:
    ValueError: a path that does not import, something else at it, a rule that
      cannot be traced, or one that says it is lossy.
  """
  found = _import('rule', path)
  if not isinstance(found, types.Rule):
    _check_call('rule', path, found, ('noise', 'draft', 'p_BNV'), {})
    found = types.Rule(path.partition(':')[2], found)
  if not found.lossless:
    raise ValueError(
      f'rule={path}: it says lossless=False, so there is nothing to certify'
    )
  for K in (0, 1, 3):
    _check_verdict(path, found, K)
  return found


def drafter(path: str) -> base.Recipe:
  """The types.Drafter, make(gamma=...) or make(model, gamma=...) at a path.

  A make with a model gets the draft model, and reads weights.draft.

  Raises:
    ValueError: a path that does not import, or something else at it.
  """
  found = _import('drafter', path)
  if isinstance(found, types.Drafter):
    return lambda world, gamma: (found, ())
  if callable(found) and _binds(found, gamma=1):
    recipe = build.recipe(found)
  else:
    _check_call('drafter', path, found, ('model',), {'gamma': 1})
    recipe = build.recipe(found, model=True)
  try:
    made, _ = recipe(base.tables(3), 2)
  except Exception as error:  # whatever the user's make does
    raise ValueError(
      f'drafter={path}: with gamma=2 it raised {type(error).__name__}: {error}'
    ) from error
  if not isinstance(made, types.Drafter):
    raise ValueError(f'drafter={path}: it made {made!r}; want a types.Drafter')
  return recipe


def _import(what: str, path: str) -> Any:
  module, colon, name = path.partition(':')
  if not (module and colon and name):
    raise ValueError(f'{what}={path!r}: want package.module:function')
  if os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())
  try:
    loaded = importlib.import_module(module)
  except Exception as error:  # whatever the user's module does
    raise ValueError(
      f'{what}={path}: importing {module} failed: '
      f'{type(error).__name__}: {error}'
    ) from error
  if not hasattr(loaded, name):
    raise ValueError(f'{what}={path}: {module} has no {name}')
  return getattr(loaded, name)


def _binds(function, *args, **named) -> bool:
  try:
    inspect.signature(function).bind(*args, **named)
  except (TypeError, ValueError):
    return False
  return True


def _check_call(what: str, path: str, found: Any, names, named) -> None:
  if callable(found) and _binds(found, *names, **named):
    return
  wanted = ', '.join([*names, *(f'{k}=...' for k in named)])
  kind = {
    'rule': f'verify({wanted}) -> Verdict or a types.Rule',
    'drafter': f'make({wanted}), make(gamma=...) or a types.Drafter',
  }[what]
  has = f'{found!r} is not callable'
  if callable(found):
    has = f'it takes {inspect.signature(found)}'
  raise ValueError(f'{what}={path}: {has}; want {kind}')


def _check_verdict(path: str, rule: types.Rule, K: int) -> None:
  """Traces the rule on shapes alone; K is 0 where no row proposes anything."""
  B, V = 2, 5
  real = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  whole = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

  def call(accept_BK, tokens_BK, q_BKV, count_B, p_BNV):
    first = lambda _, weights_BV: jnp.zeros(weights_BV.shape[0], jnp.int32)
    noise = types.Noise(accept_BK, first, first)
    return rule.verify(noise, types.Draft(tokens_BK, q_BKV, count_B), p_BNV)

  for q_BKV in (real(B, K, V), None):
    try:
      got = jax.eval_shape(
        call, real(B, K), whole(B, K), q_BKV, whole(B), real(B, K + 1, V)
      )
    except Exception as error:  # whatever the user's rule does
      kind = 'certain drafts (q None)' if q_BKV is None else 'sampled drafts'
      raise ValueError(
        f'rule={path}: called with {K} {kind} it raised '
        f'{type(error).__name__}: {str(error).splitlines()[0]}'
      ) from error
    good = (
      isinstance(got, types.Verdict)
      and getattr(got.accepted_B, 'shape', None) == (B,)
      and jnp.issubdtype(got.accepted_B.dtype, jnp.integer)
      and getattr(got.weights_BV, 'shape', None) == (B, V)
    )
    if not good:
      raise ValueError(
        f'rule={path}: it returned {got}; want types.Verdict(accepted_B, '
        f'weights_BV): here integers of ({B},) and floats of ({B}, {V})'
      )
