"""Drafts as many tokens as pay, by what a row has accepted so far."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.drafters import branch, hybrid, lm, lookup, method
from specdec_jax.io import files

WRAPS = 2

# The estimate for a row that has not drafted lately, and for how many tested
# drafts it counts.
PRIOR, WEIGHT = 0.6, 1.0
# What is left of a row's counts after each window. Where nothing is accepted,
# trying again costs at most (1 - DECAY) * WEIGHT * PRIOR of the time, 2.4 %:
# a draft is tried again when its counts have fallen below WEIGHT * PRIOR over
# its cost.
DECAY = 0.96


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked):
  drafter: object = fields.setting(
    'hybrid', help='whose windows; its own section configures it'
  )
  costs: str | os.PathLike | Mapping = fields.setting(
    '', help='measured costs, or their JSON file; empty: measured at the start'
  )


class Costs(NamedTuple):
  """Costs of passing over and of drafting 0 to gamma tokens, in plain steps."""

  verify_N: types.Array
  draft_N: types.Array


class Params(NamedTuple):
  """weights.draft: the drafter's own, and its Costs (traced); `few` has them
  for fewer rows, by how many, for a pool that narrows."""

  inner: Any
  costs: Costs
  few: Mapping[int, Costs] = {}


def for_target(
  target, settings: Settings, *, gamma: int, chunk: int, inner: method.Method
) -> method.Method:
  """Sizes the windows of `inner`, settings.drafter's Method. Sizes each part of
  a hybrid by what it alone has accepted: where a match of lookup has not paid,
  the other one drafts. Raises ValueError for missing or damaged costs."""
  parts = inner.parts or (inner,)
  drafters = [make(x.drafter) for x in parts]
  drafter = hybrid.make(*drafters) if inner.parts else drafters[0]
  return method.Method(
    drafter._replace(name='adaptive'),
    draft=inner.draft,
    parts=parts,
    costs=_read(settings.costs) if settings.costs else {},
  )


def _read(costs: str | os.PathLike | Mapping) -> Mapping[str, Any]:
  if isinstance(costs, Mapping):
    return costs
  path = pathlib.Path(costs)
  found = files.read_json(path) if path.is_file() else {}
  found = found.get('costs', found)  # a file of bench.py has more
  if not isinstance(found, dict) or 'verify' not in found:
    raise ValueError(f'adaptive.costs={costs}: no file with costs of windows')
  return found


def params(parts: Sequence[method.Method], costs: Mapping[str, Any]) -> Any:
  """Returns weights.draft for the drafter that for_target puts around `parts`.

  costs have gamma + 1 numbers or more, in plain steps, for windows with 0, 1,
  ... drafts: 'verify', and one list for each drafter's name; 'few' has the same
  for fewer rows, by how many. Raises ValueError if some are missing.
  """
  few = costs.get('few', {}).items()
  made = tuple(
    Params(
      x.params,
      _costs(x.drafter, costs),
      {int(rows): _costs(x.drafter, own) for rows, own in few},
    )
    for x in parts
  )
  return made[0] if len(parts) == 1 else made


def _costs(drafter: types.Drafter, costs: Mapping[str, Any]) -> Costs:
  numbers, gamma = [], drafter.gamma
  for name in ('verify', drafter.name):
    found = np.atleast_1d(np.asarray(costs.get(name, ()), np.float32))
    found = found[: gamma + 1]
    if len(found) <= gamma or not (np.isfinite(found) & (found >= 0)).all():
      raise ValueError(
        f'costs: {name} is {costs.get(name)}; want {gamma + 1} numbers, the '
        'cost of a window with 0, 1, 2 ... drafts'
      )
    numbers.append(found)
  return Costs(*numbers)


def recipe(world, gamma: int):
  """Makes a drafter for the certificate; its windows soon differ in length."""
  count = np.arange(gamma + 1.0)
  costs = Costs(1 + 0.1 * count, 0.2 * count), {2: Costs(1 + 0 * count, count)}
  first = lookup.make(gamma=gamma, min_match=1)
  second = lm.make(world.draft, gamma=gamma)
  drafter = hybrid.make(make(first), make(second))
  return drafter._replace(name='adaptive'), (
    Params((), *costs),
    Params(world.weights.draft, *costs),
  )


class State(NamedTuple):
  """The drafter's state; counts fade with age.

  inner: that of the drafter whose windows are sized.
  tried_B, accepted_B: drafts that were tested and accepted.
  asked_B: whether the current window was the drafter's.
  hoped_B: summed worth, where drafts have one; includes the current window,
    which accepted_B does not yet.
  """

  inner: Any
  tried_B: types.Array
  accepted_B: types.Array
  asked_B: types.Array
  hoped_B: types.Array


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(drafter: types.Drafter) -> types.Drafter:
  """Makes the drafter propose in each window as many tokens as pay.

  Picks the j from 0 to gamma with the largest E[tokens] / cost. E[tokens] =
  1 + a + ... + a^j (Leviathan et al. 2023, equation 1,
  https://arxiv.org/abs/2211.17192), where a is the share that the row accepted
  of its past drafts. The cost is for drafting j tokens and passing over them.
  In a tree j counts whole levels. Where drafts have a worth (types.Draft), E is
  1 plus their sum, cut by how far worth has fallen short in the row so far.

  How far a sampled window is drafted depends on what was committed before it,
  never on draws (drafts of known worth are certain), so every rule stays exact.
  Costs are fixed when decoding starts: a row's tokens depend on nothing but its
  request.

  All rows wait for the longest window. So greedy ones, whose text no draft
  changes, take the j with the largest sum of E over the live rows, and again
  when it is known which of them found a draft.
  """

  def init(weights, context, features):
    weights = weights._replace(draft=weights.draft.inner)
    inner = drafter.init(weights, context, features)
    none_B = jnp.zeros(context.lengths_B.shape, jnp.float32)
    return State(inner, none_B, none_B, none_B > 0, none_B)

  def commit(state, context, outcome, features_BNE):
    tested_B = jnp.minimum(outcome.accepted_B + 1, outcome.verified_B)
    kept_B = _kept(state)
    return State(
      drafter.commit(state.inner, context, outcome, features_BNE),
      kept_B * state.tried_B + tested_B,
      kept_B * state.accepted_B + outcome.accepted_B,
      state.asked_B,
      state.hoped_B,
    )

  propose = functools.partial(_propose, drafter)
  return drafter._replace(init=init, propose=propose, commit=commit)


def _propose(drafter, weights, state, context, noise, target_cache):
  ranked = branch.is_ranked(drafter)
  greedy_B = sampling_lib.is_greedy(context.sampling)
  own = weights.draft
  few = own.few.get(len(greedy_B), own.costs)
  # A sampled row's text would show how many are decoded beside it.
  pick = lambda x_N, y_N: jnp.where(greedy_B[:, None], x_N[None], y_N[None])
  verify_BN, draft_BN = map(pick, few, own.costs)
  best = functools.partial(_best, drafter, state)
  if ranked:  # How many are worth it is seen when all are drafted.
    draft_BN = draft_BN.at[:, 1:].set(draft_BN[:, -1:])
  most_B = best(context, verify_BN + draft_BN, greedy_B)
  if ranked:
    most_B = jnp.where(most_B > 0, context.gamma_B, 0)
  asked = context._replace(gamma_B=most_B), noise, target_cache
  weights = weights._replace(draft=own.inner)
  draft, inner, target_cache = drafter.propose(weights, state.inner, *asked)
  count_B = jnp.minimum(draft.count_B, most_B)
  found = context._replace(gamma_B=count_B)
  worth_BK = draft.marks.get('worth_BK')
  pays_B = best(found, verify_BN, greedy_B, worth_BK)
  known = worth_BK is not None
  count_B = jnp.where(greedy_B | known, pays_B, count_B)
  # A lookup that finds nothing learns nothing.
  asked_B = (context.gamma_B > 0) & ((most_B == 0) | (count_B > 0))
  state = state._replace(inner=inner, asked_B=asked_B)
  if known:
    taken_BK = jnp.arange(worth_BK.shape[1])[None] < count_B[:, None]
    worth_B = jnp.sum(worth_BK * taken_BK, -1).astype(jnp.float32)
    # Where none is worth its test, one has failed: the next may not be drafted.
    none_B = ((most_B > 0) & (count_B == 0)).astype(jnp.float32)
    state = state._replace(
      hoped_B=_kept(state) * state.hoped_B + worth_B,
      tried_B=state.tried_B + none_B,
    )
  return draft._replace(count_B=count_B), state, target_cache


def _kept(state: State) -> types.Array:
  """Returns what is left of a row's counts after the current window."""
  return jnp.where(state.asked_B, DECAY, 1.0).astype(jnp.float32)


def _best(drafter, state: State, context, cost_BN, shared_B, worth_BK=None):
  """Picks the number of drafts that pays most, up to context.gamma_B: [B].

  Worked example: of two drafts, whose windows cost 1, 1.2 and 1.5, a row that
  accepts half expects 1, 1.5 and 1.75 tokens, and takes one: 1.25 for 1. One
  that accepts a tenth expects 1, 1.1 and 1.11, and takes none. If both are
  shared, their sums are 2, 2.6 and 2.86, and each takes one.

  cost_BN: of a window with 0, 1, 2 ... drafts, as each row knows it.
  shared_B: rows that choose what is best for all live ones; others choose for
    themselves, and count as one token a window here.
  worth_BK: the drafts', where it is known; see types.Draft.
  """
  by_level = drafter.tree and not branch.is_ranked(drafter)
  levels = drafter.tree if by_level else (1,) * drafter.gamma
  sizes_X = jnp.asarray(np.cumsum((0, *levels)), jnp.int32)
  alpha_B = (state.accepted_B + WEIGHT * PRIOR) / (state.tried_B + WEIGHT)
  more_BX = jnp.cumprod(jnp.tile(alpha_B[:, None], (1, len(levels))), 1)
  if worth_BK is not None:
    fair_B = (state.accepted_B + WEIGHT) / (state.hoped_B + WEIGHT)
    more_BX = worth_BK * fair_B[:, None]
  more_BX = jnp.where(sizes_X[None, 1:] <= context.gamma_B[:, None], more_BX, 0)
  tokens_BX = 1 + jnp.pad(jnp.cumsum(more_BX, 1), ((0, 0), (1, 0)))
  counted_BX = jnp.where(shared_B[:, None], tokens_BX, 1)
  of_all_X = jnp.sum(counted_BX * context.live_B[:, None], 0)
  tokens_BX = jnp.where(shared_B[:, None], of_all_X[None], tokens_BX)
  gain_BX = tokens_BX / cost_BN[:, sizes_X]
  best_B = sizes_X[jnp.argmax(gain_BX, 1)]
  return jnp.minimum(best_B, context.gamma_B)
