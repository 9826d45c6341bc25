"""The loop of decode.py, watched: what its parts said, and what is wrong."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from specdec_jax import decode, types
from specdec_jax.debug import lenient

PREFILL = -1  # the number of the window before the first


class Finding(AssertionError):
  """What is wrong, and where. row is None if no row alone shows it."""

  def __init__(self, row, request, window: int, slot, what: str):
    self.row, self.window, self.slot = row, window, slot
    who = 'some row' if row is None else f'row {row} (request {request})'
    when = 'the prefill' if window == PREFILL else f'window {window}'
    super().__init__(f'{who}, {when}, slot {slot}: {what}')


class CacheMismatch(Finding):
  """The target's cache is not that of the committed tokens."""


class DraftMismatch(Finding):
  """The drafter's state does not propose what a fresh one would."""


class BadValue(Finding):
  """An index out of bounds, a NaN, or a value that types.py does not allow."""


class Seen(NamedTuple):
  """What a drafter and a rule said in one window, as they said it."""

  draft: types.Draft
  outcome: types.Outcome


class Programs(NamedTuple):
  """start -> (State, Info); step -> (State, Info, Seen); nothing is donated.

  checked_start and checked_step return (checkify.Error, the same).
  """

  start: Any
  step: Any
  checked_start: Any
  checked_step: Any


@functools.cache
def programs(target, drafter, rule, options) -> Programs:
  watched = _watched(target, drafter)
  loop = decode.Loop(target, drafter, rule, options)

  def start(weights, request):
    return decode.start(loop, weights, request)

  def step(rule, weights, request, state, info):
    one = decode.Loop(target, watched, rule, options)
    state, info = decode.step(one, weights, request, state, info)
    inner, seen = state.drafter
    return state._replace(drafter=inner), info, seen

  errors = checkify.index_checks | checkify.nan_checks | checkify.user_checks
  checked = lambda f: jax.jit(checkify.checkify(lenient.wrap(f), errors=errors))
  return Programs(
    jax.jit(start),
    jax.jit(functools.partial(step, rule)),
    checked(start),
    checked(functools.partial(step, _weighed(rule))),
  )


def _watched(target, drafter: types.Drafter) -> types.Drafter:
  """The drafter; after a window its state is (its own, Seen)."""

  def propose(weights, state, context, noise, target_cache):
    draft, state, cache = drafter.propose(
      weights, state, context, noise, target_cache
    )
    B, K = context.lengths_B.shape[0], drafter.gamma
    wanted = dict(tokens_BK=(B, K), q_BKV=(B, K, target.vocab), count_B=(B,))
    for name, shape in wanted.items():
      x = getattr(draft, name)
      if x is not None and x.shape != shape:
        raise ValueError(
          f'drafter {drafter.name!r}: {name} has shape {x.shape}, not {shape}'
        )
    return draft, (state, draft), cache

  def commit(state, context, outcome, features_BNE):
    inner, draft = state
    inner = drafter.commit(inner, context, outcome, features_BNE)
    return inner, Seen(draft, outcome)

  return drafter._replace(propose=propose, commit=commit)


def _weighed(rule: types.Rule) -> types.Rule:
  """The rule under a check of its weights; the loop forgives bad ones."""

  def verify(noise, draft, p_BNV):
    verdict = rule.verify(noise, draft, p_BNV)
    x_BV = verdict.weights_BV
    bad_BV = ~(jnp.isfinite(x_BV) & (x_BV >= 0))
    first = jnp.argmax(bad_BV)
    checkify.check(
      ~jnp.any(bad_BV),
      'the rule: weights_BV is {value} for id {id}',
      value=x_BV.ravel()[first],
      id=first % x_BV.shape[1],
    )
    return verdict

  return rule._replace(verify=verify)


def number(request, row: int) -> int:
  return int(np.asarray(request.request_B)[row])


class Axes(NamedTuple):
  """Where a leaf of the State has its rows and its slots; -1 is nowhere."""

  row: int
  slot: int


def axes_of(start, weights, request) -> decode.State:
  """A State of Axes: the axes that grow with the batch and with the buffer."""
  B, L = request.tokens_BL.shape

  def shapes(rows: int, length: int):
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), request
    )
    tokens = jax.ShapeDtypeStruct((rows, length), like.tokens_BL.dtype)
    return jax.eval_shape(start, weights, like._replace(tokens_BL=tokens))[0]

  def grown(x, y):
    pairs = enumerate(zip(x.shape, y.shape, strict=True))
    return next((i for i, (a, b) in pairs if a != b), -1)

  # Twice as many, not one more: a mesh divides the rows.
  return jax.tree.map(
    lambda x, wide, long: Axes(grown(x, wide), grown(x, long)),
    *(shapes(B, L), shapes(2 * B, L), shapes(B, 2 * L)),
  )


def take(tree, rows, axes=None):
  """A batch of the given rows; axes: of a State, else rows come first."""
  if axes is None:
    axes = jax.tree.map(lambda x: Axes(0, -1), tree)
  return jax.tree.map(
    lambda x, a: x if a.row < 0 else jnp.take(x, rows, a.row), tree, axes
  )
