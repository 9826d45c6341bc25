"""Loads the parts to certify: this library's, or a user's own by path."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from specdec_jax import build, decode, fields, types
from specdec_jax.certify import base
from specdec_jax.drafters import adaptive, branch, eagle, method, table
from specdec_jax.io import load as load_lib
from specdec_jax.io import own, tokenizer
from specdec_jax.models import weights

# Trees of 1 to 8 nodes: siblings, three levels, one long path.
_LEVELS = ('1', '2', '3', '4', '2,1,2', '1,1,1,1,1,1', '3,2,2', '4,2,2')


def tree(world: base.World, gamma: int):
  """Drafts by EAGLE, with a tree of gamma nodes."""
  return _eagle(world, _LEVELS[gamma - 1])


def _eagle(world: base.World, levels: str):
  config, params = eagle.random_layer(world)
  sizes = branch.settings_of(levels)
  return eagle.make(config, world.target, gamma=0, **sizes), params


def sized_tree(world: base.World, gamma: int):
  """Drafts as many nodes as pay: of '2,2' at gamma 4, else of gamma best."""
  inner, params = _eagle(world, '2,2' if gamma == 4 else f'best:{gamma}')
  count = 0.02 * np.arange(gamma + 1, dtype=np.float32)
  costs = adaptive.Costs(1 + count, count)
  return adaptive.make(inner), adaptive.Params(params, costs)


# Drafter name -> its base.Recipe, where it has one.
RECIPES: dict[str, base.Recipe] = {
  name: row.recipe
  for name, row in table.DRAFTERS.items()
  if hasattr(row, 'recipe')
} | {base.TREE: tree}
# With a user's rule or model: one drafter that samples and one that does not. A
# rule reads only tokens, their distributions and their count.
DRAFTERS = ('lm', 'lookup')
# With a user's drafter or model: the usual rule, and one that emits plain
# decoding's text and couples the drafter's noise. Others read the same q.
RULES = ('reject', 'coupled')
_ROOM = 128  # positions that the promises need
_SMALL: dict[str, Any] = dict(vocab=5, dtype='float32', seed=0)


def subject(
  rule_path: str, drafter_path: str, model_path: str, *, seed: int
) -> base.Subject:
  """Makes a Subject from this library's parts, or the user's where given."""
  lossless, drafters = build.lossless_rules(), RECIPES
  rules = tuple(lossless.values())
  if rule_path:
    rules = (rule(rule_path),)
  elif model_path or drafter_path:
    rules = tuple(lossless[name] for name in RULES)
  if rule_path or model_path:
    # A model of the user's need not be one that EAGLE, which has trees, reads.
    own_trees = not model_path and rules[0].trees
    names = (*DRAFTERS, base.TREE) if own_trees else DRAFTERS
    drafters = {name: drafters[name] for name in names}
  own_model = model(model_path) if model_path else None
  if drafter_path:
    drafters = dict([drafter(drafter_path)])
  paths = dict(rule=rule_path, drafter=drafter_path, model=model_path)
  supplied = tuple(kind for kind, path in paths.items() if path)
  return base.Subject(rules, drafters, seed, supplied, own_model, model_path)


def rule(path: str) -> types.Rule:
  """Finds a rule by name or path; ValueError if unknown, untraceable, lossy."""
  found = build.rule_of(path)
  if not found.lossless:
    raise ValueError(
      f'rule={path}: lossless=False, so there is nothing to certify'
    )
  _check_verdict(path, found)
  return found


def _check_verdict(path: str, rule: types.Rule) -> None:
  """Traces the rule, also in a window of width 1, which has no drafts."""
  B, V = 2, 5
  first = lambda _, weights_BV: jnp.zeros(weights_BV.shape[0], jnp.int32)
  for K, sampled in itertools.product((0, 3), (True, False)):
    q_BKV = jnp.full((B, K, V), 1 / V) if sampled else None
    draft = types.Draft(
      jnp.zeros((B, K), jnp.int32), q_BKV, jnp.full(B, K, jnp.int32)
    )
    noise = types.Noise(jnp.zeros((B, K)), first, first)
    p_BNV = jnp.full((B, K + 1, V), 1 / V)
    verify = functools.partial(rule.verify, noise, draft, p_BNV)
    try:
      got = jax.eval_shape(verify)
    except Exception as error:  # a user's rule may raise anything
      kind = 'sampled drafts' if sampled else 'certain drafts (q None)'
      raise ValueError(
        f'rule={path}: called with {K} {kind} it raised '
        f'{fields.first_line(error)}'
      ) from error
    shapes = [getattr(x, 'shape', None) for x in jax.tree.leaves(got)]
    if not isinstance(got, types.Verdict) or shapes != [(B,), (B, V)]:
      raise ValueError(
        f'rule={path}: it returned {got}; want types.Verdict(accepted_B, '
        f'weights_BV), here of shapes ({B},) and ({B}, {V})'
      )


def drafter(path: str) -> tuple[str, base.Recipe]:
  """Finds (name, recipe) by a drafter's name or path (drafters.table.DRAFTS).

  make(target, *, gamma, chunk) gets the certificate's tiny targets. Raises
  ValueError for an unknown drafter, or one that cannot be made for them.
  """
  if path in RECIPES:
    return path, RECIPES[path]
  draft = table.draft_of(path, 'drafter')
  if isinstance(draft, method.Method):
    whole = draft.drafter, draft.params
    return draft.drafter.name, lambda world, gamma: whole
  kept: dict[Any, types.Drafter] = {}

  def recipe(world: base.World, gamma: int):
    chunk = base.OPTIONS.chunk
    made = table.method_of(_target(world), draft, gamma=gamma, chunk=chunk)
    # An equal drafter would compile again.
    key = world.target, gamma
    return kept.setdefault(key, made.drafter), made.params

  try:
    world = base.tables(3)
    made, params = recipe(world, 2)
    rule = build.rule_of(RULES[0])
    # Traced, not run: a make may keep what it cannot draft with.
    programs = decode.programs(world.target, made, rule, base.OPTIONS)
    request = base.make_request(world, [[0, 1]], 2)
    weights = types.Weights(world.weights.target, params)
    jax.eval_shape(programs.generate, weights, request)
  except Exception as error:  # a user's make may raise anything
    raise ValueError(
      f'drafter={path}: for a loaded target and with gamma=2 it raised '
      f'{fields.first_line(error)}'
    ) from error
  return made.name, recipe


def _target(world: base.World) -> load_lib.LanguageModel:
  """Wraps a world's target, as a drafter's make gets a loaded one."""
  words = {str(i): i for i in range(world.vocab)}
  inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, '0'))
  name = 'a model of the certificate'
  return load_lib.LanguageModel(
    name,
    name,
    tokenizer.Tokenizer(name, inner),
    world.weights.target,
    lm_config=world.config,
    own=world.target,
  )


def model(path: str) -> Callable[[int, str], base.World]:
  """Makes Subject.model from make(vocab=..., dtype=..., seed=...) at a path.

  make returns (types.Model, params): a small random model with `vocab` real
  ids, parameters of `dtype` ('float32', 'float64', 'bfloat16'), and at least
  128 positions. Raises ValueError if the path does not import or has something
  else, or its model does not fit types.Model.
  """
  found = own.named('model', path)
  if not own.binds(found, **_SMALL):
    raise ValueError(
      f'model={path}: {own.signature(found)}; want '
      'make(vocab=..., dtype=..., seed=...) -> (types.Model, params)'
    )
  try:
    wrong = _misfit(found(**_SMALL), vocab=_SMALL['vocab'])
  except Exception as error:  # a user's model may raise anything
    wrong = f'called, it raised {fields.first_line(error)}'
  if wrong:
    raise ValueError(f'model={path}: {wrong}')

  @functools.cache
  def world(vocab: int, dtype: str) -> base.World:
    (target, params), (_, other) = (
      found(vocab=vocab, dtype=dtype, seed=seed) for seed in (0, 1)
    )
    if (made := weights.coarsest(params)) != dtype:
      raise base.Broken(f'model={path}: dtype={dtype} made weights of {made}')
    return base.World(target, target, types.Weights(params, other), vocab)

  return world


def _misfit(made, *, vocab: int) -> str:
  """Says why make's result is no (types.Model, params); '' if it is."""
  if not isinstance(made, tuple) or not isinstance(made[0], types.Model):
    return f'it made {type(made).__name__}; want (types.Model, params)'
  model, params = made
  if not vocab <= model.vocab:
    return f'vocab={vocab} made a model of {model.vocab} ids'
  if model.context < _ROOM:
    return f'its context is {model.context}; want {_ROOM} or more'
  B, T, S = 2, 3, 16
  cache = model.init_cache(B, S)
  at = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
  seen = np.broadcast_to(np.arange(S) <= at[..., None], (B, T, S))

  @jax.jit
  def call(slots_BT, cache):
    hidden, _, new = model.apply(params, at % vocab, slots_BT, at, seen, cache)
    return model.head(params, hidden), new

  logits, new = jax.device_get(call(np.full_like(at, S), cache))
  if logits.shape != (B, T, model.vocab) or logits.dtype.itemsize < 4:
    return (
      f'head made {logits.dtype} of {logits.shape}; want {(B, T, model.vocab)} '
      'in float32 or wider'
    )
  if not np.isfinite(logits[..., :vocab].max(-1)).all():
    return 'its logits are not finite'
  if not np.all(np.isneginf(logits[..., vocab:])):
    return f'head gives ids from vocab={vocab} on a chance; want logit -inf'
  same = jax.tree.map(np.array_equal, new, jax.device_get(cache))
  if not all(jax.tree.leaves(same)):
    return f"slot {S} of {S} was written; want mode='drop', which drops it"
  return ''
