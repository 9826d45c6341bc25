"""A user's own rule, drafter or model by its path: package.module:name."""

import functools
import importlib
import inspect
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, types
from specdec_jax.certify import base, recipes

# Drafters of ours that ask no more of a target than types.Model does.
ANY_TARGET = ('lm', 'lookup', 'ngram')


def subject(
  rule_path: str, drafter_path: str, model_path: str, *, seed: int
) -> base.Subject:
  """What is certified: ours, but for what has a path.

  Raises:
    ValueError: what rule, drafter and model refuse.
  """
  rules, drafters, own = build.lossless_rules(), recipes.RECIPES, None
  if rule_path:
    found = rule(rule_path)
    rules = {found.name: found}
  if model_path:
    own = model(model_path)
    drafters = {name: drafters[name] for name in ANY_TARGET}
  if drafter_path:
    drafters = {drafter_path.partition(':')[2]: drafter(drafter_path)}
  brought = dict(rule=rule_path, drafter=drafter_path, model=model_path)
  kinds = tuple(kind for kind, path in brought.items() if path)
  return base.Subject(rules, drafters, seed, kinds, own)


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
    recipe = recipes.of(found)
  else:
    _check_call('drafter', path, found, ('model',), {'gamma': 1})
    recipe = recipes.of(found, model=True)
  try:
    made, _ = recipe(base.tables(3), 2)
  except Exception as error:  # whatever the user's make does
    raise ValueError(
      f'drafter={path}: with gamma=2 it raised {_said(error)}'
    ) from error
  if not isinstance(made, types.Drafter):
    raise ValueError(f'drafter={path}: it made {made!r}; want a types.Drafter')
  return recipe


def model(path: str) -> base.OwnModel:
  """The make(vocab=..., dtype=..., seed=...) at a path.

  It returns (types.Model, params), a small model with random weights: `vocab`
  real ids, floats of `dtype` ('float32', 'float64', 'bfloat16'), and room for
  128 positions at least.

  Raises:
    ValueError: a path that does not import, something else at it, or a model
      that does not fit types.Model.
  """
  found = _import('model', path)
  _check_call('model', path, found, (), _SMALL)
  make = _lenient(found)
  refuse = lambda what: ValueError(f'model={path}: {what}')
  try:
    made = make(**_SMALL)
  except Exception as error:  # whatever the user's make does
    raise refuse(f'it raised {_said(error)}') from error
  pair = isinstance(made, tuple) and len(made) == 2
  if not pair or not isinstance(made[0], types.Model):
    raise refuse(f'it made {type(made).__name__}; want (types.Model, params)')
  try:
    wrong = _misfit(*made, vocab=_SMALL['vocab'])
  except Exception as error:  # whatever the user's model does
    raise refuse(f'called, it raised {_said(error)}') from error
  if wrong:
    raise refuse(wrong)

  @functools.cache
  def world(vocab, dtype):
    (target, params), (_, other) = (
      make(vocab=vocab, dtype=dtype, seed=seed) for seed in (0, 1)
    )
    target = target._replace(
      apply=_lenient(target.apply), head=_lenient(target.head)
    )
    return base.World(target, target, types.Weights(params, other), vocab)

  return base.OwnModel(path, world)


_SMALL: dict[str, Any] = dict(vocab=5, dtype='float32', seed=0)
_ROOM = 128  # positions that the promises need


def _lenient(function):
  """The function under JAX's own default; programs here forbid promotion."""

  @functools.wraps(function)
  def call(*args, **named):
    with jax.numpy_rank_promotion('allow'):
      return function(*args, **named)

  return call


def _misfit(model: types.Model, params, *, vocab: int) -> str | None:
  """Where a model leaves types.Model, in words."""
  if not vocab <= model.vocab:
    return f'vocab={vocab} made a model of {model.vocab} ids'
  if model.context < _ROOM:
    return f'its context is {model.context}; want {_ROOM} or more'
  B, T, S = 2, 3, 16
  cache = model.init_cache(B, S)
  at = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
  seen = np.broadcast_to(np.arange(S) <= at[..., None], (B, T, S))

  @jax.jit
  @_lenient
  def call(slots_BT, cache):
    hidden, _, new = model.apply(params, at % vocab, slots_BT, at, seen, cache)
    return hidden, model.head(params, hidden), new

  kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  hidden, logits, new = jax.eval_shape(call, at, cache)
  if kinds(new) != kinds(cache):
    return f'apply turns a cache of {kinds(cache)} into {kinds(new)}'
  if hidden.shape[:2] != (B, T):
    return f'hidden has shape {hidden.shape}; want {(B, T)} and a width'
  if logits.shape != (B, T, model.vocab) or logits.dtype.itemsize < 4:
    return (
      f'head made {logits.dtype} of {logits.shape}; want {(B, T, model.vocab)} '
      'in float32 or wider'
    )
  _, logits, new = jax.device_get(call(np.full_like(at, S), cache))
  if not np.all(np.isneginf(logits[..., vocab:])):
    return f'head gives ids from vocab={vocab} on a chance; want logit -inf'
  same = jax.tree.map(np.array_equal, new, jax.device_get(cache))
  if not all(jax.tree.leaves(same)):
    return f"slot {S} of {S} was written; want mode='drop', which drops it"
  return None


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
      f'{what}={path}: importing {module} failed: {_said(error)}'
    ) from error
  if not hasattr(loaded, name):
    raise ValueError(f'{what}={path}: {module} has no {name}')
  return getattr(loaded, name)


def _said(error: BaseException) -> str:
  """The kind of an error and its first line, if it has one."""
  name, lines = type(error).__name__, str(error).splitlines()
  return f'{name}: {lines[0]}' if lines else name


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
    'model': f'make({wanted}) -> (types.Model, params)',
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
        f'rule={path}: called with {K} {kind} it raised {_said(error)}'
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
