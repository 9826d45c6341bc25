"""Checks a model's and a drafter's caches after every window; slow.

Runs the decode loop one window at a time and raises at the first one that is
wrong, with its row, window and slot. Windows count from 0, as in
Info.window_BL. A finding is a bug in the code under test, hence an
AssertionError.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, requests, sampling, types
from specdec_jax.models import cache as kv
from specdec_jax.models import encoder
from specdec_jax.models import weights as weights_lib

Array = jax.Array


class Finding(AssertionError):
  """A difference, at a row, a window and a slot."""

  def __init__(self, request, row: int, window: int, slot: int, text: str):
    self.row, self.window, self.slot = row, window, slot
    number = int(np.asarray(request.request_B)[row])
    super().__init__(
      f'row {row} (request {number}), window {window}, slot {slot}: {text}'
    )


def check_cache(
  loop: decode.Loop,
  weights: types.Weights,
  request: decode.Request,
  *,
  proposals: bool = True,
) -> None:
  """Compares cache and drafter state with recomputed ones after every window.

  In a row of length n the target has read tokens 0 to n - 2: these slots of its
  cache are compared with a prefill's. A drafter initialised afresh on the row
  must propose the same, at temperature 1, where q depends on all logits.

  Passes with different shapes round differently: a slot may differ by the
  square root of the machine epsilon (float64 1.5e-8, float32 3.5e-4, bfloat16
  0.09) times its norm, and q by as much in total variation. Integers must be
  equal, and what encoders left in every bit.

  proposals: compare proposals; False for a drafter that learns from acceptance,
    which may rightly differ from a fresh one.

  Raises:
    Finding: the first difference.
    NonFiniteLogits: the target's, in a row whose cache is right.
    ValueError: a Draft of the wrong shape, or a cache without slots.
  """
  start, step = _programs(loop)
  slot_axes = _slot_axes(start, weights, request)
  whole = sampling.settings(len(request.tokens_BL), 1.0)  # no cuts
  smooth = request._replace(sampling=whole)
  begun, info = start(weights, request)
  rounded = weights_lib.coarsest((weights, begun.cache, begun.drafter))
  state, tolerance = begun, float(jnp.finfo(rounded).eps) ** 0.5
  while np.asarray(state.live_B).any():
    state, info, _ = step(weights, request, state, info)
    again = request._replace(
      tokens_BL=state.tokens_BL,
      lengths_B=state.lengths_B,
      limit_B=jnp.where(state.live_B, request.limit_B, state.lengths_B),
    )
    fresh, _ = start(weights, again)
    window, lengths_B = int(info.calls_B.max()), np.asarray(state.lengths_B)
    caches = state.cache, fresh.cache, slot_axes.cache
    if gap := _first_gap(*caches, lengths_B - 1, tolerance):
      row, slot, text = gap
      token = int(state.tokens_BL[row, slot])
      text = f"the target's cache is stale for token {token}: {text}"
      raise Finding(request, row, window - 1, slot, text)
    _compare_stores(request, begun, state, window - 1)
    if np.any(info.broken_B):
      row = int(np.argmax(info.broken_B))
      count = int(lengths_B[row] - request.lengths_B[row])
      raise requests.NonFiniteLogits(int(request.request_B[row]), count)
    if proposals and np.asarray(state.live_B).any():
      ran = step(weights, smooth, state, info)
      ran_fresh = step(weights, smooth, fresh, info)
      _compare_drafts(request, state, ran, ran_fresh, slot_axes, tolerance)


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def watched(drafter: types.Drafter) -> types.Drafter:
  """Wraps a drafter: after a step its state is (its own, Draft, Outcome).

  Whoever drives decode.step puts its own state back before the next one.
  """

  def propose(weights, state, context, noise, target_cache):
    draft, state, cache = drafter.propose(
      weights, state, context, noise, target_cache
    )
    return draft, (state, draft), cache

  def commit(state, context, outcome, features_BNE):
    inner, draft = state
    inner = drafter.commit(inner, context, outcome, features_BNE)
    return inner, draft, outcome

  return drafter._replace(propose=propose, commit=commit)


@functools.lru_cache(maxsize=8)
def _programs(loop: decode.Loop) -> tuple[Callable, Callable]:
  """Jitted start -> (State, Info) and step -> (State, Info, Draft)."""
  drafter = loop.drafter

  def propose(weights, state, context, *args):
    found = drafter.propose(weights, state, context, *args)
    B, K = context.lengths_B.shape[0], drafter.gamma
    vocab = loop.target.vocab
    wanted = dict(tokens_BK=(B, K), q_BKV=(B, K, vocab), count_B=(B,))
    wanted |= dict(parents_BK=(B, K), proposed_BK=(B, K))
    for name, shape in wanted.items():
      x = getattr(found[0], name)
      if x is not None and x.shape != shape:
        raise ValueError(
          f'drafter {drafter.name!r}: {name} has shape {x.shape}, not {shape}'
        )
    return found

  loop = loop._replace(drafter=watched(drafter._replace(propose=propose)))

  def step(weights, request, state, info):
    state, info = decode.step(loop, weights, request, state, info)
    inner, draft, _ = state.drafter
    return state._replace(drafter=inner), info, draft

  return jax.jit(functools.partial(decode.start, loop)), jax.jit(step)


def _slot_axes(start, weights, request) -> decode.State:
  """Finds the axis that grows with the buffer in each leaf of a State, or -1.

  The State as kv.by_slot gives it. Slots may be rounded up, to 1,024 at most.
  """
  B, L = request.tokens_BL.shape

  def shapes(length: int):
    tokens = jax.ShapeDtypeStruct((B, length), jnp.int32)
    longer = request._replace(tokens_BL=tokens)
    return jax.eval_shape(lambda *a: kv.by_slot(start(*a)[0]), weights, longer)

  def grown(x, y):
    pairs = enumerate(zip(x.shape, y.shape, strict=True))
    return next((i for i, (a, b) in pairs if a != b), -1)

  axes = jax.tree.map(grown, shapes(L), shapes(L + 1024))
  if max(jax.tree.leaves(axes.cache), default=-1) < 0:
    raise ValueError(
      'no leaf of the cache grows with the buffer: nothing to compare; let '
      'init_cache(rows, slots) make arrays of that many slots'
    )
  return axes


def _compare_stores(request, begun, state, window: int) -> None:
  """Raises Finding if a bit differs from what encoders left at first."""
  stores = jax.device_get((_stores(begun), _stores(state)))
  for old, new in zip(*stores, strict=True):
    changed = (old != new) & ~(np.isnan(old) & np.isnan(new))
    if changed.any():
      row, *_, slot, _ = (int(i) for i in np.argwhere(changed)[0])
      text = 'what the encoder left for this token of the source has changed'
      raise Finding(request, row, window, slot, text)


def _stores(state) -> list[Array]:
  """Finds the stores of encoders in the caches of a State: [B, ..., I, C]."""
  ours = lambda x: isinstance(x, encoder.Cache)
  found = [x for x in jax.tree.leaves(state, is_leaf=ours) if ours(x)]
  return jax.tree.leaves([kv.by_slot(x.store) for x in found])


def _compare_drafts(request, state, ran, fresh, slot_axes, tolerance) -> None:
  """Raises Finding if two steps from the same tokens draft otherwise."""
  (after, info, draft), (again, _, other) = ran, fresh
  one, two = jax.device_get((draft, other))
  live_B = np.asarray(state.live_B)
  split = _first_split(one, two, live_B, tolerance)
  if split is None:
    return
  row, k, text = split
  length = int(state.lengths_B[row])
  count_B = np.where(np.arange(len(live_B)) == row, length, 0)
  states = after.drafter, again.drafter, slot_axes.drafter
  if gap := _first_gap(*states, count_B, tolerance):
    text += f'; its state first differs in slot {gap[1]}: {gap[2]}'
  text = (
    f'draft {k} is not what a fresh init on the same tokens gives: {text}. '
    'Give proposals=False for a drafter that learns as it decodes'
  )
  window = int(info.calls_B.max()) - 1
  raise Finding(request, row, window, length + k, text)


def _first_split(one: types.Draft, two: types.Draft, live_B, tolerance: float):
  """Returns (row, k, text) for the first draft token that differs, or None.

  Tokens drawn from the same q may differ where rounding decides a near-tie;
  later drafts in that row are not comparable.
  """
  for row in np.flatnonzero(live_B):
    count, again = int(one.count_B[row]), int(two.count_B[row])
    for k in range(min(count, again, one.tokens_BK.shape[1])):
      a, b = one.tokens_BK[row, k], two.tokens_BK[row, k]
      if one.q_BKV is None or two.q_BKV is None:
        if a != b:
          return int(row), k, f'token {a}, not {b}'
        continue
      off = np.abs(one.q_BKV[row, k] - two.q_BKV[row, k]).sum() / 2
      if not off <= tolerance:
        return int(row), k, f'q is off by {off:.2g} (allowed {tolerance:.2g})'
      if a != b:
        break
    else:
      if count != again:
        text = f'{count} tokens are proposed, not {again}'
        return int(row), min(count, again), text
  return None


def _first_gap(held, fresh, axes, count_B, tolerance: float):
  """Finds the first gap in rows' count_B slots: (row, slot, text), or None."""
  gaps = []
  held, fresh = kv.by_slot((held, fresh))
  leaves = jax.tree_util.tree_leaves_with_path(held)
  for (path, x), y, axis in zip(
    leaves, jax.tree.leaves(fresh), jax.tree.leaves(axes), strict=True
  ):
    if axis < 0:
      continue
    assert axis and len(x) == len(count_B), f'rows are not axis 0: {x.shape}'
    x, y = (jnp.moveaxis(z, axis, 1) for z in (x, y))
    gap_BSR = np.asarray(_distance(x, y))
    counts_BS = np.arange(gap_BSR.shape[1])[None] < np.asarray(count_B)[:, None]
    exact = not jnp.issubdtype(x.dtype, jnp.floating)
    bad_BSR = ~(gap_BSR <= (0 if exact else tolerance)) & counts_BS[..., None]
    if bad_BSR.any():
      row, slot, part = (int(i) for i in np.argwhere(bad_BSR)[0])
      a, b = (np.asarray(z[row, slot]).astype(float).ravel() for z in (x, y))
      worst = np.argmax(np.nan_to_num(np.abs(a - b), nan=np.inf))
      leaf = jax.tree_util.keystr(path)  # '' for a tree of one array
      leaf = f'leaf {leaf}, ' if leaf else ''
      text = (
        f'{leaf}part {part} is off by {gap_BSR[row, slot, part]:.2g} of its '
        f'norm; it holds {a[worst]:.6g}, anew it is {b[worst]:.6g}'
      )
      gaps.append((row, slot, text))
  return min(gaps, default=None)


@jax.jit
def _distance(held: Array, fresh: Array) -> Array:
  """Computes the relative distance of slots, [B, S, parts: heads or layers]."""
  B, S = held.shape[:2]
  C = held.shape[-1] if held.ndim > 2 else 1
  a, b = (x.reshape(B, S, -1, C) for x in (held, fresh))
  wide = jnp.promote_types(a.dtype, jnp.float32)
  a, b = a.astype(wide), b.astype(wide)
  norm = lambda x: jnp.sqrt(jnp.sum(x * x, -1))
  size = norm(jnp.where(jnp.isfinite(b), b, 0))
  size = jnp.maximum(size, 1e-3 * jnp.max(size, (0, 1), keepdims=True))
  same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
  off = norm(jnp.where(same, 0, a - b))
  return jnp.where(off == 0, 0, off / jnp.where(size > 0, size, 1))
