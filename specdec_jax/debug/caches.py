"""What decoding remembers against what the tokens say, window by window."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, sampling, types
from specdec_jax.debug import watch

Array = jax.Array


def check(
  target: types.Model,
  drafter: types.Drafter,
  rule: types.Rule,
  weights: types.Weights,
  request: decode.Request,
  options: decode.Options | None = None,
  *,
  proposals: bool = True,
) -> None:
  """Recomputes from scratch, after every window, what decoding remembers.

  Of a row of length n the target's cache must hold slots 0 to n - 2, the tokens
  that have been read: they are compared with a prefill of the row so far. And
  where the drafter's state is a function of the tokens, a fresh init must
  propose what the state does; both are asked at temperature 1, where q shows
  all of the logits.

  Two passes of other shapes round differently: a slot may differ by the square
  root of the machine epsilon (float64 1.5e-8, float32 3.5e-4, bfloat16 0.09),
  relative to its norm, and q by as much in total variation. Integers are exact.

  Args:
    target, drafter, rule, options: as decode.programs takes them.
    weights, request: as its programs do.
    proposals: False for a drafter that learns from what was accepted, and so
      may propose otherwise than a fresh one.

  Raises:
    CacheMismatch, DraftMismatch: the first difference.
  """
  run = watch.programs(target, drafter, rule, options or decode.Options())
  axes = watch.axes_of(run.start, weights, request)
  # At temperature 1 without cuts.
  smooth = request._replace(
    sampling=sampling.settings(request.tokens_BL.shape[0], 1.0)
  )
  state, info = run.start(weights, request)
  tolerance = _tolerance((weights, state.cache, state.drafter))
  while np.asarray(state.live_B).any():
    state, info, _ = run.step(weights, request, state, info)
    again = request._replace(
      tokens_BL=state.tokens_BL,
      lengths_B=state.lengths_B,
      limit_B=jnp.where(state.live_B, request.limit_B, state.lengths_B),
    )
    fresh, _ = run.start(weights, again)
    window = int(info.calls)
    _compare_caches(request, state, fresh, axes, window - 1, tolerance)
    if proposals and np.asarray(state.live_B).any():
      ran = run.step(weights, smooth, state, info)
      anew = run.step(weights, smooth, fresh, info)
      _compare_drafts(request, state, ran, anew, axes, window, tolerance)


def _tolerance(tree) -> float:
  """The square root of the coarsest epsilon among the floats of a tree."""
  kinds = {jnp.result_type(x) for x in jax.tree.leaves(tree)} | {float}
  kinds = [x for x in kinds if jnp.issubdtype(x, jnp.floating)]
  eps = (jnp.finfo(jax.dtypes.canonicalize_dtype(x)).eps for x in kinds)
  return float(max(eps)) ** 0.5


def _compare_caches(request, state, fresh, axes, window, tolerance):
  found = _first_gap(
    (state.cache, fresh.cache, axes.cache),
    np.asarray(state.lengths_B) - 1,
    tolerance,
  )
  if found is None:
    return
  row, slot, what = found
  token = int(state.tokens_BL[row, slot])
  raise watch.CacheMismatch(
    row,
    watch.number(request, row),
    window,
    slot,
    f"the target's cache is stale for token {token}: {what}",
  )


def _compare_drafts(request, state, ran, anew, axes, window, tolerance):
  """Raises DraftMismatch where two Drafts of the same rows differ."""
  (after, _, seen), (after_anew, _, seen_anew) = ran, anew
  found = _first_split(
    *jax.device_get((seen.draft, seen_anew.draft)),
    live_B=np.asarray(state.live_B),
    tolerance=tolerance,
  )
  if found is None:
    return
  row, k, what = found
  lengths_B = np.asarray(state.lengths_B)
  one_B = np.where(np.arange(len(lengths_B)) == row, lengths_B, 0)
  gap = _first_gap(
    (after.drafter, after_anew.drafter, axes.drafter), one_B, tolerance
  )
  if gap is not None:
    what += f'; its state first differs in slot {gap[1]}: {gap[2]}'
  raise watch.DraftMismatch(
    row,
    watch.number(request, row),
    window,
    int(lengths_B[row]) + k,
    f'draft {k} is not what a fresh init on the same tokens gives: {what}',
  )


def _first_split(one: types.Draft, two: types.Draft, *, live_B, tolerance):
  """(row, k, what) of the first proposal that two Drafts disagree on, or None.

  Tokens drawn from the same q may differ where rounding decides a near-tie:
  nothing after them can be compared.
  """
  for row in np.flatnonzero(live_B):
    counts = int(one.count_B[row]), int(two.count_B[row])
    for k in range(min(*counts, one.tokens_BK.shape[1])):
      tokens = one.tokens_BK[row, k], two.tokens_BK[row, k]
      if one.q_BKV is not None and two.q_BKV is not None:
        off = np.abs(one.q_BKV[row, k] - two.q_BKV[row, k]).sum() / 2
        if not off <= tolerance:
          what = f'q is off by {off:.2g} (allowed {tolerance:.2g})'
          return int(row), k, what
        if tokens[0] != tokens[1]:
          break
      elif tokens[0] != tokens[1]:
        return int(row), k, f'token {tokens[0]}, not {tokens[1]}'
    else:
      if counts[0] != counts[1]:
        what = f'{counts[0]} tokens are proposed, not {counts[1]}'
        return int(row), min(counts), what
  return None


def _first_gap(trees, count_B, tolerance: float):
  """(row, slot, what) where a tree leaves the other one first, or None.

  trees: (held, anew, watch.Axes). Of row b its first count_B[b] slots count.
  Leaves without rows and slots are skipped.
  """
  held, anew, axes = trees
  found = []
  leaves = jax.tree_util.tree_leaves_with_path(held)
  others = jax.tree.leaves(anew)
  where = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, watch.Axes))
  for (path, x), y, axis in zip(leaves, others, where, strict=True):
    if min(axis) < 0:
      continue
    x, y = (jnp.moveaxis(z, axis, (0, 1)) for z in (x, y))
    gap_BSR = np.asarray(_gap(x, y))
    counts_BS = np.arange(gap_BSR.shape[1])[None] < np.asarray(count_B)[:, None]
    exact = not jnp.issubdtype(x.dtype, jnp.floating)
    bad_BSR = ~(gap_BSR <= (0 if exact else tolerance)) & counts_BS[..., None]
    if bad_BSR.any():
      row, slot, part = (int(i) for i in np.argwhere(bad_BSR)[0])
      a, b = (np.asarray(z[row, slot]).astype(float).ravel() for z in (x, y))
      worst = np.argmax(np.nan_to_num(np.abs(a - b), nan=np.inf))
      leaf = jax.tree_util.keystr(path)  # '' for a tree of one array
      leaf = f'leaf {leaf}, ' if leaf else ''
      what = (
        f'{leaf}part {part} is off by '
        f'{gap_BSR[row, slot, part]:.2g} of its norm; it holds {a[worst]:.6g}, '
        f'anew it is {b[worst]:.6g}'
      )
      found.append((row, slot, what))
  return min(found, key=lambda x: x[:2], default=None)


@jax.jit
def _gap(held: Array, anew: Array) -> Array:
  """Distance over norm of slots, [B, S, parts]; a part is a head or a layer.

  Slots of hardly any norm are measured by a thousandth of the largest one.
  """
  B, S = held.shape[:2]
  C = held.shape[-1] if held.ndim > 2 else 1
  a, b = (x.reshape(B, S, -1, C) for x in (held, anew))
  wide = jnp.promote_types(a.dtype, jnp.float32)
  a, b = a.astype(wide), b.astype(wide)
  norm = lambda x: jnp.sqrt(jnp.sum(x * x, -1))
  size = norm(jnp.where(jnp.isfinite(b), b, 0))
  size = jnp.maximum(size, 1e-3 * jnp.max(size, (0, 1), keepdims=True))
  same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
  off = norm(jnp.where(same, 0, a - b))
  return jnp.where(off == 0, 0, off / jnp.where(size > 0, size, 1))
